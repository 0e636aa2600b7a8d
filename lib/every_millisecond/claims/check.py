"""What a check of a claim is, and the arithmetic that the checks share."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from llm_latency import roofline
from llm_latency.roofline import total

HOLDS = "holds"
CONDITION = "holds under a condition"
IMPOSSIBLE = "impossible as stated"
NOT_MEASURED = "not measured here"
VERDICTS = (HOLDS, CONDITION, IMPOSSIBLE, NOT_MEASURED)

Figures = Mapping[str, float]  # what one machine measured for one claim, by name

MODEL = "llama-2-7b"
A100 = "A100-80GB-SXM"


# Every claim's check by its id, filled by `claim` as the files of this package are loaded.
CHECKS: dict[str, Callable[..., ClaimCheck]] = {}


@dataclass(frozen=True, slots=True)
class ClaimCheck:
    """What the roofline allows, the verdict, the arithmetic line by line, what was measured; and which claim it is."""

    allowed: str
    verdict: str
    arithmetic: tuple[str, ...]
    measured: tuple[str, ...] = ()
    id: str = ""
    claim: str = ""

    def __str__(self) -> str:
        lines = [f"{self.id}: {self.verdict}", f"    claim:   {self.claim}", f"    allowed: {self.allowed}"]
        lines += [f"      {line}" for line in self.arithmetic]
        return "\n".join(lines + [f"    measured: {line}" for line in self.measured])


def claim(id: str, title: str, *names: str) -> Callable[[Callable[[Figures], ClaimCheck]], Callable[..., ClaimCheck]]:
    """Enter a claim's check into `CHECKS`: its id, its title, and the figures of this machine that it takes.

    Each figure is optional, and so are all of them. The check then raises KeyError for a figure of another name, which
    would be ignored in silence, and ValueError for one that is not a finite number.
    """

    def wrap(check: Callable[[Figures], ClaimCheck]) -> Callable[..., ClaimCheck]:
        @functools.wraps(check)
        def checked(here: Figures | None = None) -> ClaimCheck:
            for name, value in (here or {}).items():
                if name not in names:
                    raise KeyError(f"{id} knows no figure {name!r}; expected {', '.join(names) or 'none'}")
                if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                    raise ValueError(f"{id}: {name}={value!r}; expected a finite number")
            return replace(check(dict(here or {})), id=id, claim=title)

        if id in CHECKS:
            raise ValueError(f"claim {id} is checked twice")
        checked.figures = names
        CHECKS[id] = checked
        return checked

    return wrap


def from_parts(parts: Mapping[str, bool]) -> str:
    """The verdict of a claim in several parts: holds if all do, else under a condition; without any, not measured."""
    if not parts:
        return NOT_MEASURED
    return HOLDS if all(parts.values()) else CONDITION


def part_lines(parts: Mapping[str, bool]) -> tuple[str, ...]:
    """Which parts hold, one line each."""
    return tuple(f"{name}: {'yes' if holds else 'no'}" for name, holds in parts.items())


def within(value: float, low: float, high: float) -> bool:
    """Whether a figure, as rounded as the claim's own, lies in its range."""
    return low <= value <= high


def quadratic_share(model: object, prompt_tokens: int) -> float:
    """The share of a prefill's FLOPs that grows with the square of its length."""
    work = roofline.prefill_work(model, prompt_tokens)
    return work["attention"].flops / total(work).flops


def least_number(holds: Callable[[int], bool], limit: int = 1 << 20) -> int:
    """The least n from 1 to `limit` for which `holds(n)`, for something that, once true, stays so.

    Raises ValueError if it does not hold at `limit`.
    """
    if not holds(limit):
        raise ValueError(f"does not hold up to {limit}")
    low, high = 0, limit
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def ffn_compute_bound(model: object, peak: roofline.Peak, tokens: int, batch: int = 1) -> bool:
    """Whether the FFN, the largest part, has more FLOPs per byte than the machine's ridge."""
    return roofline.forward_work(model, tokens, batch=batch)["ffn"].intensity > peak.ridge
