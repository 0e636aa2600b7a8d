"""`profile_operators`: which of PyTorch's operators took the time. To find, not to quote: recording costs time too."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch.profiler import ProfilerActivity, profile

from llm_latency.arguments import check_callable
from llm_latency.timing.clock import CudaClock, clock_for


@dataclass(frozen=True, slots=True)
class OperatorTime:
    """One operator: its name, how many times it was called, and its own milliseconds, without what it called."""

    name: str
    calls: int
    own_ms: float


def profile_operators(fn: Callable[[], object], *, device: str | None = None) -> list[OperatorTime]:
    """Run `fn` once under PyTorch's profiler and return its operators, the longest first.

    On a GPU the times are the kernels' on the device; on a CPU they are the operators' own, in this thread only.

    Args:
        fn: the work, without arguments. device: "cpu", "cuda", or None for the GPU where there is one.

    Raises:
        TypeError: fn is not callable. ValueError: an unknown device.
    """
    check_callable("fn", fn)
    clock = clock_for(device)
    on_gpu = isinstance(clock, CudaClock)
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if on_gpu else [])
    profiler = profile(activities=activities)
    clock.synchronize()
    with silent_stderr():
        profiler.start()
    try:
        fn()
        clock.synchronize()
    finally:
        with silent_stderr():
            profiler.stop()
    field = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    found = [OperatorTime(row.key, row.count, getattr(row, field) / 1000) for row in profiler.key_averages()]
    return sorted(found, key=lambda operator: -operator.own_ms)


@contextmanager
def silent_stderr() -> Iterator[None]:
    """Kineto, the profiler's core, writes a line with time and process id at start and stop, and no setting helps."""
    kept = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
