"""Claims of the two source articles, each with a verdict computed from figures, never written by hand.

7B means Llama-2-7B in BF16, on the datasheet figures of `hardware.DATASHEET`. A check called without figures judges by
arithmetic and published figures alone; with figures of a machine, by those too.
"""

from every_millisecond.claims import (
    arithmetic_claims,
    attention_claims,
    cache_claims,
    serving_claims,
    speculation_claims,
    weights_claims,
    whole_request,
)
from every_millisecond.claims.check import CHECKS, VERDICTS, ClaimCheck, quadratic_share
from every_millisecond.claims.ledger import HEADERS, Row, counts, ledger, table
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

for _id in sorted(CHECKS, key=lambda name: (name[0], int(name[1:]))):
    CHECKS[_id] = CHECKS.pop(_id)  # in the articles' order, whatever file a claim stands in

__all__ = [
    "CHECKS",
    "HEADERS",
    "VERDICTS",
    "ClaimCheck",
    "Findings",
    "Row",
    "arithmetic_claims",
    "attention_claims",
    "cache_claims",
    "counts",
    "from_gpu_check",
    "from_ladder",
    "ledger",
    "machine_name",
    "own",
    "quadratic_share",
    "recorded",
    "results_folder",
    "serving_claims",
    "settle",
    "speculation_claims",
    "table",
    "weights_claims",
    "whole_request",
]
