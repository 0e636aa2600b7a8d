"""`measure`: the time of one function, waited for, with warm-up and statistics."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from llm_latency.timing.checks import check_callable, check_count
from llm_latency.timing.clock import Clock, CudaClock, Device, clock_for
from llm_latency.timing.cold_cache import CacheFlusher
from llm_latency.timing.measurement import Measurement


def measure(
    fn: Callable[[], object],
    *,
    warmup: int = 3,
    repeats: int = 10,
    device: Device = None,
    cold_cache: bool = False,
) -> Measurement:
    """Call `fn` 1 + warmup + repeats times and time each of the repeats until the device has done the work.

    The clock is the host's, with a synchronise of the device before the start and before the end: what a caller who
    needs the result waits for, launches included. The first call is timed apart from the warm-up. The garbage collector
    rests meanwhile, as in `timeit`; what `fn` returns is freed outside the timed span.

    Args:
        fn: the work, without arguments.
        warmup: calls thrown away after the first one, 0 or more.
        repeats: samples, 1 or more.
        device: where the work runs: "cpu", "cuda", "cuda:N", a `Clock`; None is the GPU where there is one.
        cold_cache: empty the cache (L2 on a GPU, the last level on a CPU) before each sample, outside the timed span.

    Raises:
        TypeError: fn is not callable, or a count is not an integer. ValueError: a count too small, an unknown device.
    """
    check_callable("fn", fn)
    check_count("warmup", warmup, least=0)
    check_count("repeats", repeats, least=1)
    clock = clock_for(device)
    flusher = flusher_for(clock) if cold_cache else None
    with garbage_collector_at_rest():
        first, _ = time_once(fn, clock)
        for _ in range(warmup):
            time_once(fn, clock, flusher)
        timed = [time_once(fn, clock, flusher) for _ in range(repeats)]
    return Measurement(
        samples_ms=tuple(done for done, _ in timed),
        returned_ms=tuple(returned for _, returned in timed),
        first_call_ms=first,
        device=clock.name,
        cold_cache=cold_cache,
        flushed_bytes=flusher.nbytes if flusher else 0,
        flush_is_partial=flusher.partial if flusher else False,
    )


def time_once(fn: Callable[[], object], clock: Clock, flusher: CacheFlusher | None = None) -> tuple[float, float]:
    """One call: milliseconds until the device had done the work, and until `fn` returned."""
    if flusher:
        flusher.flush()
    clock.synchronize()
    begin = time.perf_counter_ns()
    result = fn()
    returned = time.perf_counter_ns()
    clock.synchronize()
    # On a CPU both moments are one, and reading the clock twice would count the reading as work.
    done = returned if clock.name == "cpu" else time.perf_counter_ns()
    del result
    return (done - begin) / 1e6, (returned - begin) / 1e6


def flusher_for(clock: Clock) -> CacheFlusher:
    """What empties the cache under a clock's device; a simulated device computes on the CPU, so the CPU's."""
    return CacheFlusher(clock.device if isinstance(clock, CudaClock) else torch.device("cpu"))


@contextmanager
def garbage_collector_at_rest() -> Iterator[None]:
    """Keep Python's cyclic garbage collector out of the timed spans; leave it afterwards as it was."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
