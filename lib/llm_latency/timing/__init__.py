"""Clocks that tell the truth: stages, measurements and comparisons of work that may still be on its way."""

from llm_latency.timing.compare import Comparison, Ratio, compare
from llm_latency.timing.latency_breakdown import LatencyBreakdown
from llm_latency.timing.latency_timer import LatencyTimer
from llm_latency.timing.measure import Measurement, measure

__all__ = [
    "Comparison",
    "LatencyBreakdown",
    "LatencyTimer",
    "Measurement",
    "Ratio",
    "compare",
    "measure",
]
