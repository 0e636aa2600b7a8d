"""The texts that a regression test reads: ordinary lengths, and the edges at which optimisations break."""

from __future__ import annotations

import torch
from torch import Tensor

from llm_latency.quality.reading import reading_text

ORDINARY = {"short": 32, "medium": 256, "long": 768}
REPEATED = 48  # tokens of the case that says the same over and over
LIMIT = "at the context limit"


def standard_cases(tokenizer, max_positions: int, *, new_tokens: int = 16, longest: int = 1024) -> dict[str, Tensor]:
    """Prompts by name, int64 [1, n]: short, medium, long, one token, one token repeated, and the context limit.

    max_positions: of whichever model has fewer. The last case leaves room for exactly `new_tokens`; it is left out
    where that would take more than `longest` tokens, since a prompt of the full length takes minutes on a CPU. Ordinary
    cases that do not fit are left out, too.

    Raises ValueError if not even one token fits.
    """
    room = max_positions - new_tokens
    if room < 1:
        raise ValueError(f"max_positions={max_positions} leaves no room for a token and new_tokens={new_tokens}")
    ids = tokenizer(reading_text(), add_special_tokens=False)["input_ids"]
    while len(ids) < longest:
        ids = ids * 2
    cases = {name: ids[:n] for name, n in ORDINARY.items() if n <= room}
    cases["one token"] = ids[:1]
    if room >= REPEATED:
        cases["one token, repeated"] = ids[1:2] * REPEATED
    if room <= longest:
        cases[LIMIT] = ids[:room]
    return {name: torch.tensor([case]) for name, case in cases.items()}
