"""The ladder: the standard request measured rung by rung."""

from every_millisecond.ladder.contributions import (
    Step,
    best,
    best_order,
    factors,
    product_of_factors,
    run_with_factors,
    steps,
    way,
)
from every_millisecond.ladder.record import RungRecord, load_run, nearest_run, newest_run, records_of
from every_millisecond.ladder.rungs import BASELINE, RUNGS, Rung
from every_millisecond.ladder.runner import run_ladder

__all__ = [
    "BASELINE",
    "RUNGS",
    "Rung",
    "RungRecord",
    "Step",
    "best",
    "best_order",
    "factors",
    "load_run",
    "nearest_run",
    "newest_run",
    "product_of_factors",
    "records_of",
    "run_ladder",
    "run_with_factors",
    "steps",
    "way",
]
