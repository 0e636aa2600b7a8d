"""The one request of the course: a learner asks for the explanation of a solution; 256 tokens in, 50 out."""

from __future__ import annotations

from llm_latency.text.prompt import chat_text, encode_prompt, token_ids

PROMPT_TOKENS = 256
NEW_TOKENS = 50

_STATEMENT = (
    "Exercise: given a list of integers and a target, return the positions of two different numbers that add up to "
    "the target. Exactly one pair does.\n"
)

_SOLUTION = """Solution:
def two_sum(numbers, target):
    seen = {}
    for position, number in enumerate(numbers):
        if target - number in seen:
            return seen[target - number], position
        seen[number] = position
"""

_QUESTION = "Explain to a beginner why this solution works and how long it takes."
_QUOTE = "Write the solution out again, word for word, in a code block, and nothing else."

# Notes between statement and solution; as many tokens of them are used as the wanted length leaves room for.
_NOTES = (
    "Format: plain English, short sentences, no headings, no lists. Name each variable once and say what it "
    "holds. Begin with the idea, then walk through the loop, then give the running time. Notes for the tutor: a "
    "first attempt often compares every number with every other one, which is right but slow on a long list. A "
    "dictionary remembers what has been seen, so that one look-up replaces an inner loop. The order of the two "
    "steps inside the loop matters: look first, then store, or a number could be paired with itself. Negative "
    "numbers and zero need no special care. A number that appears twice is found at its second place. Memory "
    "grows with the list, time does too, and the list is read only once. If the list were sorted, two fingers "
    "moving towards each other would need no dictionary at all. Hidden tests use lists of up to a hundred "
    "thousand numbers. Praise what is good in the learner's code before you suggest a change. "
)


def standard_prompt(tokenizer, tokens: int = PROMPT_TOKENS) -> str:
    """The request's text, chat template included, that this tokenizer turns into exactly `tokens` ids.

    Longer prompts repeat the notes. The text already holds the template's special tokens: encode it with
    `encode_prompt`, which adds no second beginning-of-text token.

    Raises ValueError if `tokens` is too small for the statement and the question, or no cut gives that number.
    """
    return _fitted(tokenizer, tokens, _QUESTION)


def quoting_prompt(tokenizer, tokens: int = PROMPT_TOKENS) -> str:
    """The same request with another question, whose answer quotes the prompt: for drafting by looking the prompt up.

    It is as long as the standard request and gets as many tokens for an answer, so that both take a plain decoder the
    same time. Raises as `standard_prompt`.
    """
    return _fitted(tokenizer, tokens, _QUOTE)


def _fitted(tokenizer, tokens: int, question: str) -> str:
    """The request with a question, its notes cut so that it has exactly `tokens` ids."""
    notes = token_ids(tokenizer, _NOTES)
    least = len(encode_prompt(tokenizer, _text(tokenizer, "", question)))
    if tokens < least:
        raise ValueError(f"tokens={tokens}: the request without its notes already has {least} tokens")
    filler = notes * (1 + (tokens - least) // len(notes) + 1)
    # Tokens merge at the seams of the repeated notes, so the first guess may be off: correct it by what is missing,
    # then look at its neighbours.
    keep = tokens - least
    tried: set[int] = set()
    for offset in [0] * 10 + sorted(range(-8, 9), key=abs):
        text = _text(tokenizer, tokenizer.decode(filler[: max(0, keep + offset)]), question)
        missing = tokens - len(encode_prompt(tokenizer, text))
        if missing == 0:
            return text
        if keep not in tried and offset == 0:
            tried.add(keep)
            keep += missing
    raise ValueError(
        f"tokens={tokens}: no cut of the notes gives exactly that length with this tokenizer; try {tokens + 1}"
    )


def shared_prefix(tokenizer, tokens: int = PROMPT_TOKENS) -> list[int]:
    """The ids with which every request about this exercise begins: template, statement and notes, up to the solution.

    What a service that answers many learners can read once for all of them. Arguments and errors as `standard_prompt`.
    """
    text = standard_prompt(tokenizer, tokens)
    whole, before = encode_prompt(tokenizer, text), encode_prompt(tokenizer, text[: text.index(_SOLUTION)])
    # Tokens may merge across the cut: what both encodings begin with is common to every solution.
    same = next((i for i, (a, b) in enumerate(zip(whole, before, strict=False)) if a != b), len(before))
    return whole[:same]


def _text(tokenizer, notes: str, question: str) -> str:
    return chat_text(tokenizer, f"{_STATEMENT}{notes}\n{_SOLUTION}{question}")
