"""Claims of the two source articles, each with a verdict that this machine's figures give, never written by hand.

7B means Llama-2-7B in BF16, on the datasheet figures of `hardware.DATASHEET`. What arithmetic and published figures
say of a claim stands beside its verdict and is none: a claim called without figures is not measured here.
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
from every_millisecond.claims.check import CHECKS, VERDICTS, Claim, Judged, quadratic_share
from every_millisecond.claims.ledger import HEADERS, counts, ledger, table
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
    "Claim",
    "Findings",
    "Judged",
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
