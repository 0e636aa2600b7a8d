"""The one request of the course: a learner asks for the explanation of a solution; 256 tokens in, 50 out."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

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

# Notes between statement and solution: as many whole sentences, from the first on, as the wanted length has room for.
_NOTES = (
    "Format: plain English, short sentences, no headings, no lists.",
    "Name each variable once and say what it holds.",
    "Begin with the idea, then walk through the loop, then give the running time.",
    "Notes for the tutor: a first attempt often compares every number with every other one, which is right but slow on "
    "a long list.",
    "A dictionary remembers what has been seen, so that one look-up replaces an inner loop.",
    "The order of the two steps inside the loop matters: look first, then store, or a number could be paired with "
    "itself.",
    "Negative numbers and zero need no special care.",
    "A number that appears twice is found at its second place.",
    "Memory grows with the list, time does too, and the list is read only once.",
    "If the list were sorted, two fingers moving towards each other would need no dictionary at all.",
    "Hidden tests use lists of up to a hundred thousand numbers.",
    "Praise what is good in the learner's code before you suggest a change.",
)

# Short ones of several lengths, to make the number of tokens exact without breaking off in the middle of a sentence.
_SHORT = (
    "Think.",
    "Be kind.",
    "Be brief here.",
    "Stay close to the code.",
    "Use no formulas.",
    "One example is enough.",
    "Do not rewrite it.",
    "Speak to one person, as a friend would.",
)


def standard_prompt(tokenizer, tokens: int = PROMPT_TOKENS) -> str:
    """The request's text, chat template included, that this tokenizer turns into exactly `tokens` ids.

    Longer prompts repeat the notes. The text already holds the template's special tokens: encode it with
    `encode_prompt`, which adds no second beginning-of-text token.

    Every sentence is whole. Raises ValueError if `tokens` is too small for the statement and the question, or no choice
    of sentences gives that number.
    """
    return _fitted(tokenizer, tokens, _QUESTION)


def quoting_prompt(tokenizer, tokens: int = PROMPT_TOKENS) -> str:
    """The same request with another question, whose answer quotes the prompt: for drafting by looking the prompt up.

    It is as long as the standard request and gets as many tokens for an answer, so that both take a plain decoder the
    same time. Raises as `standard_prompt`.
    """
    return _fitted(tokenizer, tokens, _QUOTE)


def _fitted(tokenizer, tokens: int, question: str) -> str:
    """The request with a question, and with notes chosen such that it has exactly `tokens` ids."""
    least = len(encode_prompt(tokenizer, _text(tokenizer, [], question)))
    if tokens < least:
        raise ValueError(f"tokens={tokens}: the request without its notes already has {least} tokens")
    size = {sentence: len(token_ids(tokenizer, f" {sentence}")) for sentence in (*_NOTES, *_SHORT)}
    room, notes = tokens - least, []
    for sentence in itertools.cycle(_NOTES):
        if size[sentence] > room:
            break
        notes.append(sentence)
        room -= size[sentence]
    some = [chosen for k in range(len(_SHORT) + 1) for chosen in itertools.combinations(_SHORT, k)]
    for kept in range(len(notes), max(-1, len(notes) - 4), -1):  # a sentence less leaves the short ones more room
        left = room + sum(size[sentence] for sentence in notes[kept:])
        for chosen in some:
            # The sizes are those of sentences alone; across a seam a tokenizer may merge: near ones are tried.
            if abs(left - sum(size[sentence] for sentence in chosen)) <= 1:
                text = _text(tokenizer, [*notes[:kept], *chosen], question)
                if len(encode_prompt(tokenizer, text)) == tokens:
                    return text
    raise ValueError(
        f"tokens={tokens}: no choice of whole sentences gives exactly that length with this tokenizer; try a few more"
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


def _text(tokenizer, notes: Sequence[str], question: str) -> str:
    return chat_text(tokenizer, f"{_STATEMENT}{' '.join(notes)}\n{_SOLUTION}{question}")
