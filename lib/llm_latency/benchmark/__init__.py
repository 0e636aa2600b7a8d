"""Where the milliseconds of requests and of forward passes go."""

from llm_latency.benchmark.benchmark_result import BenchmarkResult, Spread, results_table
from llm_latency.benchmark.inference_benchmark import InferenceBenchmark
from llm_latency.benchmark.module_breakdown import PARTS, ModuleBreakdown, module_breakdown

__all__ = [
    "PARTS",
    "BenchmarkResult",
    "InferenceBenchmark",
    "ModuleBreakdown",
    "Spread",
    "module_breakdown",
    "results_table",
]
