"""Many requests at once: continuous batching over a paged cache, static batching beside it, and their latencies."""

from llm_latency.batching.engine import BatchingEngine, EngineOptions, NewToken
from llm_latency.batching.request import Request, RequestRefused, Sampling, State
from llm_latency.batching.scheduler import Scheduler, SchedulerOptions

__all__ = [
    "BatchingEngine",
    "EngineOptions",
    "NewToken",
    "Request",
    "RequestRefused",
    "Sampling",
    "Scheduler",
    "SchedulerOptions",
    "State",
]
