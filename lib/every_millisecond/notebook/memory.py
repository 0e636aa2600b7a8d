"""How much memory a piece of work needs beyond what was there before it."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from llm_latency.arguments import check_device


def peak_extra_bytes(fn: Callable[[], object], *, device: str | torch.device | None = None) -> int:
    """The most memory that `fn` held at one moment beyond what was held before, its result included, in bytes.

    On CUDA: `torch.cuda.max_memory_allocated` less what was allocated at the start. On a CPU there is no such counter,
    so the profiler writes down every allocation and release of torch's allocator, inside operators too, and the largest
    running sum is taken. Memory that a library takes past that allocator (a BLAS's work space) is not seen.

    fn runs twice: once before the measurement, because a first call may set up buffers that stay. The CPU's count
    costs some 10 us per allocation: time `fn` elsewhere.

    Raises TypeError if fn cannot be called, ValueError for a device that is not here.
    """
    if not callable(fn):
        raise TypeError(f"fn={fn!r}; expected a function without arguments")
    device = check_device(device)
    fn()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        fn()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    live = peak = 0
    for change in _allocations(fn):
        live += change
        peak = max(peak, live)
    return peak


def _allocations(fn: Callable[[], object]) -> list[int]:
    """Bytes allocated (positive) and released (negative) on the CPU while fn runs, in order."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or the profiler writes its start and stop to stderr
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        result = fn()
    del result
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    # "Device Type" 0 is the CPU. Two events may carry one time stamp; "Ev Idx" keeps their order.
    memory = [event for event in events if event.get("name") == "[memory]" and event["args"]["Device Type"] == 0]
    memory.sort(key=lambda event: (event["ts"], event["args"].get("Ev Idx", 0)))
    return [event["args"]["Bytes"] for event in memory]
