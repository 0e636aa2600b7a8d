"""The texts that quality is measured on, and the edges of length at which optimisations break."""

from __future__ import annotations

from importlib.resources import files

import torch
from torch import Tensor

ORDINARY = {"short": 32, "medium": 256, "long": 768}
REPEATED = 48  # tokens of the case that says the same over and over
LIMIT = "at the context limit"


def reading_text() -> str:
    """Explanations of programming exercises in plain English, written for this course: about 4,400 tokens.

    The bundled model has not seen it, and it is the kind of text the course's request is about.
    """
    return files("llm_latency").joinpath("data", "reading.txt").read_text(encoding="utf-8")


def standard_cases(tokenizer, max_positions: int, *, new_tokens: int = 16, longest: int = 1024) -> dict[str, Tensor]:
    """Prompts by name, int64 [1, n]: short, medium, long, one token, one token repeated, and the context limit.

    max_positions: of whichever model has fewer. The last case leaves room for exactly `new_tokens`; it is left out
    where that would take more than `longest` tokens, since a prompt of the full length takes minutes on a CPU. Ordinary
    cases that do not fit are left out, too.

    Raises ValueError if not even one token fits, or if the tokenizer makes less than two tokens of the text.
    """
    room = max_positions - new_tokens
    if room < 1:
        raise ValueError(f"max_positions={max_positions} leaves no room for a token and new_tokens={new_tokens}")
    ids = tokenizer(reading_text(), add_special_tokens=False)["input_ids"]
    if len(ids) < 2:
        raise ValueError(f"the tokenizer makes {len(ids)} tokens of the text; expected some thousands")
    ids = ids * -(-longest // len(ids))
    cases = {name: ids[:n] for name, n in ORDINARY.items() if n <= room}
    cases["one token"] = ids[:1]
    if room >= REPEATED:
        cases["one token, repeated"] = ids[1:2] * REPEATED
    if room <= longest:
        cases[LIMIT] = ids[:room]
    return {name: torch.tensor([case]) for name, case in cases.items()}
