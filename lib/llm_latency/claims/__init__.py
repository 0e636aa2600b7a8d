"""Claims of the two source articles, each with a verdict computed from figures, never written by hand.

7B means Llama-2-7B in BF16, on the datasheet figures of `hardware.DATASHEET`.
"""

from collections.abc import Callable

from llm_latency.claims.article_a import check_A3, check_A4, check_A8
from llm_latency.claims.article_b import check_B2, check_B4, check_B6, check_B16
from llm_latency.claims.check import (
    CONDITION,
    HOLDS,
    IMPOSSIBLE,
    ClaimCheck,
    implied_bandwidth,
    implied_flop_rate,
    passes_that_fit,
    quadratic_share,
)

CHECKS: dict[str, Callable[[], ClaimCheck]] = {
    check.__name__.removeprefix("check_"): check
    for check in (check_A3, check_A4, check_A8, check_B2, check_B4, check_B6, check_B16)
}

__all__ = [
    "CHECKS",
    "CONDITION",
    "HOLDS",
    "IMPOSSIBLE",
    "ClaimCheck",
    "check_A3",
    "check_A4",
    "check_A8",
    "check_B2",
    "check_B4",
    "check_B6",
    "check_B16",
    "implied_bandwidth",
    "implied_flop_rate",
    "passes_that_fit",
    "quadratic_share",
]
