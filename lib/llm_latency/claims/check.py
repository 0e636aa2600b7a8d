"""What a check of a claim is, and the arithmetic that the checks share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from llm_latency import roofline
from llm_latency.roofline import total

HOLDS = "holds"
CONDITION = "holds under a condition"
IMPOSSIBLE = "impossible as stated"

MODEL = "llama-2-7b"
A100 = "A100-80GB-SXM"


@dataclass(frozen=True, slots=True)
class ClaimCheck:
    """One claim, what the roofline allows, the verdict, and the arithmetic line by line."""

    id: str
    claim: str
    allowed: str
    verdict: str
    arithmetic: tuple[str, ...]

    def __str__(self) -> str:
        lines = [f"{self.id}: {self.verdict}", f"    claim:   {self.claim}", f"    allowed: {self.allowed}"]
        return "\n".join(lines + [f"      {line}" for line in self.arithmetic])


def _positive(**values: float) -> None:
    for name, value in values.items():
        if not value > 0:
            raise ValueError(f"{name}={value} must be above 0")


def passes_that_fit(stage_ms: float, pass_ms: float) -> float:
    """How many forward passes fit into a stage."""
    _positive(stage_ms=stage_ms, pass_ms=pass_ms)
    return stage_ms / pass_ms


def implied_bandwidth(nbytes: float, ms: float) -> float:
    """Bytes per second that moving `nbytes` in `ms` takes."""
    _positive(nbytes=nbytes, ms=ms)
    return nbytes / ms * 1e3


def implied_flop_rate(flops: float, ms: float) -> float:
    """FLOP/s that computing `flops` in `ms` takes."""
    _positive(flops=flops, ms=ms)
    return flops / ms * 1e3


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
