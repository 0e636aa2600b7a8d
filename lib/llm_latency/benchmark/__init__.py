"""Where the milliseconds of requests and of forward passes go."""

from llm_latency.benchmark.inference_benchmark import BenchmarkResult, InferenceBenchmark, Spread
from llm_latency.benchmark.respond import Response, respond

__all__ = [
    "BenchmarkResult",
    "InferenceBenchmark",
    "Response",
    "Spread",
    "respond",
]
