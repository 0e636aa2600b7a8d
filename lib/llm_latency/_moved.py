"""Names of the first edition that left this package: importing one fails with the place where it is now."""

from __future__ import annotations

import sys
from importlib.abc import MetaPathFinder

# Old dotted name -> new one; what lay below a room is below the new one.
MOVED = {
    "llm_latency.attention.figure": "every_millisecond.notebook.attention_figure",
    "llm_latency.attention.kernel_benchmark": "every_millisecond.laboratory.kernel_benchmark",
    "llm_latency.attention.kernel_text": "every_millisecond.notebook.kernel_text",
    "llm_latency.batching.Ask": "every_millisecond.laboratory.workload.Ask",
    "llm_latency.batching.Deadline": "every_millisecond.laboratory.workload.Deadline",
    "llm_latency.batching.LoadReport": "every_millisecond.laboratory.workload.LoadReport",
    "llm_latency.batching.StaticOutput": "every_millisecond.laboratory.static_batching.StaticOutput",
    "llm_latency.batching.bench": "every_millisecond.laboratory.batching_bench",
    "llm_latency.batching.generate_static": "every_millisecond.laboratory.static_batching.generate_static",
    "llm_latency.batching.left_pad": "every_millisecond.laboratory.static_batching.left_pad",
    "llm_latency.batching.metrics": "every_millisecond.laboratory.workload",
    "llm_latency.batching.mixed_asks": "every_millisecond.laboratory.workload.mixed_asks",
    "llm_latency.batching.poisson_arrivals": "every_millisecond.laboratory.workload.poisson_arrivals",
    "llm_latency.batching.report": "every_millisecond.laboratory.workload.report",
    "llm_latency.batching.serve": "every_millisecond.laboratory.workload.serve",
    "llm_latency.batching.static": "every_millisecond.laboratory.static_batching",
    "llm_latency.batching.workload": "every_millisecond.laboratory.workload",
    "llm_latency.benchmark.ModuleBreakdown": "every_millisecond.notebook.module_breakdown.ModuleBreakdown",
    "llm_latency.benchmark.PARTS": "every_millisecond.notebook.module_breakdown.PARTS",
    "llm_latency.benchmark.module_breakdown": "every_millisecond.notebook.module_breakdown",
    "llm_latency.benchmark.module_hooks": "every_millisecond.notebook.module_breakdown",
    "llm_latency.checklist": "every_millisecond.checklist",
    "llm_latency.checks": "every_millisecond.checks",
    "llm_latency.claims": "every_millisecond.claims",
    "llm_latency.cli": "every_millisecond.cli",
    "llm_latency.doctor": "every_millisecond.doctor",
    "llm_latency.experiment": "every_millisecond.ladder",
    "llm_latency.explorer": "every_millisecond.notebook.explorer",
    "llm_latency.gpu_check": "every_millisecond.gpu_check",
    "llm_latency.kv_cache.SlotUse": "every_millisecond.laboratory.paged_waste.SlotUse",
    "llm_latency.kv_cache.contiguous_use": "every_millisecond.laboratory.paged_waste.contiguous_use",
    "llm_latency.kv_cache.paged_use": "every_millisecond.laboratory.paged_waste.paged_use",
    "llm_latency.kv_cache.paged_waste": "every_millisecond.laboratory.paged_waste",
    "llm_latency.memory": "every_millisecond.notebook.memory",
    "llm_latency.openmp": "every_millisecond.openmp",
    "llm_latency.peers": "every_millisecond.peers",
    "llm_latency.plots": "every_millisecond.notebook.plots",
    "llm_latency.quality.cache_bench": "every_millisecond.laboratory.cache_bench",
    "llm_latency.quality.cache_peers": "every_millisecond.laboratory.cache_peers",
    "llm_latency.request": "every_millisecond.request",
    "llm_latency.roofline.RooflinePoint": "every_millisecond.notebook.roofline_figure.RooflinePoint",
    "llm_latency.roofline.count_flops": "every_millisecond.laboratory.counting.count_flops",
    "llm_latency.roofline.count_operators": "every_millisecond.laboratory.counting.count_operators",
    "llm_latency.roofline.counting": "every_millisecond.laboratory.counting",
    "llm_latency.roofline.draw_roofline": "every_millisecond.notebook.roofline_figure.draw_roofline",
    "llm_latency.roofline.figure": "every_millisecond.notebook.roofline_figure",
    "llm_latency.roofline.matmul_rate": "every_millisecond.laboratory.counting.matmul_rate",
    "llm_latency.roofline.narrow_twin": "every_millisecond.laboratory.counting.narrow_twin",
    "llm_latency.roofline.twin": "every_millisecond.laboratory.counting",
    "llm_latency.scorecard": "every_millisecond.notebook.scorecard",
    "llm_latency.show": "every_millisecond.notebook.show",
    "llm_latency.speculative.Explanation": "every_millisecond.laboratory.speculation.Explanation",
    "llm_latency.speculative.Replay": "every_millisecond.laboratory.replay.Replay",
    "llm_latency.speculative.costs": "every_millisecond.laboratory.speculation_costs",
    "llm_latency.speculative.explain": "every_millisecond.laboratory.speculation.explain",
    "llm_latency.speculative.reasons": "every_millisecond.laboratory.speculation",
    "llm_latency.speculative.replay": "every_millisecond.laboratory.replay",
    "llm_latency.text.CompressedPrompt": "every_millisecond.compress.CompressedPrompt",
    "llm_latency.text.Dropped": "every_millisecond.compress.Dropped",
    "llm_latency.text.Section": "every_millisecond.compress.Section",
    "llm_latency.text.compress": "every_millisecond.compress",
    "llm_latency.text.compress_prompt": "every_millisecond.compress.compress_prompt",
    "llm_latency.timing.OperatorTime": "every_millisecond.notebook.trace.OperatorTime",
    "llm_latency.timing.SelfCheck": "every_millisecond.laboratory.self_check.SelfCheck",
    "llm_latency.timing.SimulatedEvent": "every_millisecond.laboratory.simulated_stream.SimulatedEvent",
    "llm_latency.timing.SimulatedStream": "every_millisecond.laboratory.simulated_stream.SimulatedStream",
    "llm_latency.timing.profile": "every_millisecond.notebook.trace",
    "llm_latency.timing.profile_operators": "every_millisecond.notebook.trace.profile_operators",
    "llm_latency.timing.self_check": "every_millisecond.laboratory.self_check",
    "llm_latency.timing.simulated_event": "every_millisecond.laboratory.simulated_stream",
    "llm_latency.timing.simulated_stream": "every_millisecond.laboratory.simulated_stream",
    "llm_latency.trace": "every_millisecond.notebook.trace",
}


class MovedFinder(MetaPathFinder):
    """Asked last, for modules that nobody found; `from room import name` asks for a module of that name, too."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name in MOVED:
            raise ImportError(f"{name} is now {MOVED[name]}, in the package that runs the course", name=name)


def install() -> None:
    """Ask once more than the interpreter does, however often this package is imported."""
    if not any(isinstance(finder, MovedFinder) for finder in sys.meta_path):
        sys.meta_path.append(MovedFinder())
