"""Many requests at once: continuous batching over a paged cache, static batching beside it, and their latencies."""

from .engine import BatchingEngine, EngineOptions, NewToken
from .metrics import Deadline, LoadReport, report
from .request import Request, RequestRefused, Sampling, State
from .scheduler import Scheduler, SchedulerOptions
from .static import StaticOutput, generate_static, left_pad
from .workload import Ask, mixed_asks, poisson_arrivals, serve

__all__ = [
    "Ask",
    "BatchingEngine",
    "Deadline",
    "EngineOptions",
    "LoadReport",
    "NewToken",
    "Request",
    "RequestRefused",
    "Sampling",
    "Scheduler",
    "SchedulerOptions",
    "State",
    "StaticOutput",
    "generate_static",
    "left_pad",
    "mixed_asks",
    "poisson_arrivals",
    "report",
    "serve",
]
