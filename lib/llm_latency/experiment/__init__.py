"""The ladder: the standard request measured rung by rung."""

from llm_latency.experiment.record import RungRecord
from llm_latency.experiment.rungs import BASELINE, RUNGS, Rung
from llm_latency.experiment.runner import load_run, records_of, run_ladder

__all__ = ["BASELINE", "RUNGS", "Rung", "RungRecord", "load_run", "records_of", "run_ladder"]
