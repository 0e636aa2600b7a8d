"""The ladder: the standard request measured rung by rung."""

from llm_latency.experiment.contributions import Step, best, best_order, product_of_factors, steps, way
from llm_latency.experiment.record import RungRecord
from llm_latency.experiment.rungs import BASELINE, RUNGS, Rung
from llm_latency.experiment.runner import load_run, newest_run, records_of, run_ladder

__all__ = [
    "BASELINE",
    "RUNGS",
    "Rung",
    "RungRecord",
    "Step",
    "best",
    "best_order",
    "load_run",
    "newest_run",
    "product_of_factors",
    "records_of",
    "run_ladder",
    "steps",
    "way",
]
