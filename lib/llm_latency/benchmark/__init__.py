"""Where the milliseconds of requests and of forward passes go."""

from llm_latency.benchmark.benchmark_result import BenchmarkResult, Spread, results_table
from llm_latency.benchmark.inference_benchmark import InferenceBenchmark

__all__ = [
    "BenchmarkResult",
    "InferenceBenchmark",
    "Spread",
    "results_table",
]
