"""Claims of the two source articles, each with a verdict computed from figures, never written by hand.

7B means Llama-2-7B in BF16, on the datasheet figures of `hardware.DATASHEET`. A check called without figures judges by
arithmetic and published figures alone; with figures of a machine, by those too.
"""

from __future__ import annotations

from collections.abc import Callable

from every_millisecond.claims.article_a import check_A3, check_A4, check_A8
from every_millisecond.claims.article_b import check_B2, check_B4, check_B6, check_B16
from every_millisecond.claims.attention_claims import check_A5, check_A11, check_B3, check_B10, check_B13
from every_millisecond.claims.cache_claims import check_A6, check_A12, check_A15, check_B7, check_B15
from every_millisecond.claims.check import (
    CONDITION,
    HOLDS,
    IMPOSSIBLE,
    NOT_MEASURED,
    VERDICTS,
    ClaimCheck,
    Figures,
    implied_bandwidth,
    implied_flop_rate,
    passes_that_fit,
    quadratic_share,
)
from every_millisecond.claims.ledger import HEADERS, Row, counts, ledger, table
from every_millisecond.claims.serving_claims import check_A7, check_A13, check_B1, check_B12, check_B17
from every_millisecond.claims.sources import (
    Findings,
    from_gpu_check,
    from_ladder,
    machine_name,
    own,
    recorded,
    results_folder,
    settle,
)
from every_millisecond.claims.speculation_claims import check_A9, check_A10, check_A16, check_B14
from every_millisecond.claims.weights_claims import check_B8, check_B9, check_B11
from every_millisecond.claims.whole_request import check_A1, check_A2, check_A14, check_B5

CHECKS: dict[str, Callable[..., ClaimCheck]] = {
    check.__name__.removeprefix("check_"): check
    for check in (
        check_A1, check_A2, check_A3, check_A4, check_A5, check_A6, check_A7, check_A8, check_A9, check_A10, check_A11,
        check_A12, check_A13, check_A14, check_A15, check_A16,
        check_B1, check_B2, check_B3, check_B4, check_B5, check_B6, check_B7, check_B8, check_B9, check_B10, check_B11,
        check_B12, check_B13, check_B14, check_B15, check_B16, check_B17,
    )
}  # fmt: skip

__all__ = [
    "CHECKS",
    "CONDITION",
    "HEADERS",
    "HOLDS",
    "IMPOSSIBLE",
    "NOT_MEASURED",
    "VERDICTS",
    "ClaimCheck",
    "Figures",
    "Findings",
    "Row",
    "check_A1",
    "check_A2",
    "check_A3",
    "check_A4",
    "check_A5",
    "check_A6",
    "check_A7",
    "check_A8",
    "check_A9",
    "check_A10",
    "check_A11",
    "check_A12",
    "check_A13",
    "check_A14",
    "check_A15",
    "check_A16",
    "check_B1",
    "check_B2",
    "check_B3",
    "check_B4",
    "check_B5",
    "check_B6",
    "check_B7",
    "check_B8",
    "check_B9",
    "check_B10",
    "check_B11",
    "check_B12",
    "check_B13",
    "check_B14",
    "check_B15",
    "check_B16",
    "check_B17",
    "counts",
    "from_gpu_check",
    "from_ladder",
    "implied_bandwidth",
    "implied_flop_rate",
    "ledger",
    "machine_name",
    "own",
    "passes_that_fit",
    "quadratic_share",
    "recorded",
    "results_folder",
    "settle",
    "table",
]  # fmt: skip
