"""People beside the gate: pairs of answers shown without saying which decoder wrote which."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from scipy.stats import binomtest
from torch import Tensor

from every_millisecond.notebook import scorecard, show
from llm_latency import files
from llm_latency.text.prompt import chat_text, encode_prompt

# Ten questions of a learner, none of them the standard request's.
QUESTIONS = (
    "What does a for loop do in Python? Answer in one sentence.",
    "Why is a dictionary quicker to search than a list? Answer briefly.",
    "What is recursion? Give a short explanation.",
    "How do I reverse a string in Python?",
    "What is the difference between a list and a tuple?",
    "What does it mean that a list is sorted in place?",
    "Why does integer division drop the remainder?",
    "What is a stack, and what is it good for?",
    "How does binary search work? Answer in two sentences.",
    "What does the word None mean in Python?",
)
CHOICES = ("A", "B", "=", "")
FIRST, SECOND = "original", "optimised"


@dataclass(frozen=True, slots=True)
class Pairs:
    """Questions with two answers each, A and B. flipped: entry i is True where A is the optimised model's; nobody looks
    there before choosing."""

    questions: tuple[str, ...]
    answers: tuple[tuple[str, str], ...]
    flipped: tuple[bool, ...]


def pairs(questions: Sequence[str], original: Sequence[str], optimised: Sequence[str]) -> Pairs:
    """Put each question's two answers into an order drawn by the machine, so that not even the notebook knows it.

    Raises ValueError unless there are as many answers of each as questions, and at least one.
    """
    if not questions or not len(questions) == len(original) == len(optimised):
        raise ValueError(
            f"{len(questions)} questions, {len(original)} and {len(optimised)} answers; expected the same number"
        )
    flipped = tuple(bool(secrets.randbits(1)) for _ in questions)
    both = zip(original, optimised, flipped, strict=True)
    return Pairs(tuple(questions), tuple((b, a) if flip else (a, b) for a, b, flip in both), flipped)


def show_pairs(found: Pairs) -> None:
    """Print every pair, and how many differ; what is equal to the letter is said and needs no choice."""
    for number, (question, (a, b)) in enumerate(zip(found.questions, found.answers, strict=True), start=1):
        show.here(f"{number}. {question}")
        for name, text in (("A", a), ("B", b)) if a != b else (("A and B, equal to the letter", a),):
            show.here(f"   {name}: {' '.join(text.split())}")
    differ = sum(a != b for a, b in found.answers)
    show.here(f"pairs that differ, and can be judged: {differ} of {len(found.answers)}")


def judge(found: Pairs, choices: Sequence[str], key: str = "13-people") -> None:
    """Say what the choices come to, and keep them in the scorecard.

    choices: for each pair "A" or "B" (the better answer), "=" (no difference), or "" (not read). Two equal answers are
    "=" whatever was chosen. Raises ValueError for another number of choices, or another word.
    """
    if len(choices) != len(found.questions) or not set(choices) <= set(CHOICES):
        raise ValueError(
            f"choices={list(choices)!r}; expected {len(found.questions)} of {', '.join(map(repr, CHOICES))}"
        )
    if not any(choices):
        show.here("no choices yet: write A, B or = for each pair into the list and run this cell again")
        return
    prefers = {FIRST: 0, SECOND: 0, "neither": 0}
    for choice, (a, b), flip in zip(choices, found.answers, found.flipped, strict=True):
        if choice:
            prefers["neither" if choice == "=" or a == b else SECOND if (choice == "A") == flip else FIRST] += 1
    decided = prefers[FIRST] + prefers[SECOND]
    chance = binomtest(prefers[SECOND], decided).pvalue if decided else 1.0
    show.here(
        f"you preferred the original {prefers[FIRST]} times, the optimised {prefers[SECOND]} times, neither "
        f"{prefers['neither']} times; a coin would be as one-sided as this with a chance of {chance:.0%}"
    )
    row = {
        "question": "Answers read blind: how many pairs was the optimised one no worse in?", "unit": "pairs",
        "guess": float(sum(map(bool, choices))), "measured": float(prefers[SECOND] + prefers["neither"]),
        "choices": list(choices),
    }  # fmt: skip
    files.update_json(scorecard.path(), lambda rows: rows | {key: row}, default={})


@torch.inference_mode()
def answers(model, tokenizer, questions: Sequence[str], new_tokens: int) -> list[str]:
    """Greedy answers of a transformers model to all questions in one batch, padded on the left."""
    ids = [encode_prompt(tokenizer, chat_text(tokenizer, question)) for question in questions]
    longest = max(map(len, ids))
    rows = torch.tensor([[0] * (longest - len(row)) + row for row in ids], device=model.device)  # [batch, longest]
    mask: Tensor = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in ids], device=model.device)
    out = model.generate(rows, attention_mask=mask, max_new_tokens=new_tokens, do_sample=False, pad_token_id=0)
    return tokenizer.batch_decode(out[:, longest:], skip_special_tokens=True)
