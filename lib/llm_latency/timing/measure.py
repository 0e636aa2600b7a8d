"""`measure`: the time of one function, waited for, with warm-up and statistics; `Measurement`: what it found."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from llm_latency.arguments import check_callable, check_count
from llm_latency.host import last_level_cache_bytes
from llm_latency.timing.clock import Clock, CudaClock, Device, clock_for


@dataclass(frozen=True, slots=True)
class Measurement:
    """Times of one function, in milliseconds of wall clock until the device had done the work.

    Args:
        samples_ms: one time per repeat, in order.
        returned_ms: for the same repeats, the time until the function returned. On a CPU it is the sample; on an
            asynchronous device it is the launch alone.
        first_call_ms: the very first call, kept apart: it may compile, allocate, and load libraries.
        device: the clock's name. cold_cache: whether the cache was emptied before each sample.
        flushed_bytes: how much was passed over to empty it; 0 if warm.
        flush_is_partial: the cache is larger than half of that, so some of it may have stayed warm.
    """

    samples_ms: tuple[float, ...]
    returned_ms: tuple[float, ...]
    first_call_ms: float
    device: str
    cold_cache: bool = False
    flushed_bytes: int = 0
    flush_is_partial: bool = False

    @property
    def median_ms(self) -> float:
        return statistics.median(self.samples_ms)

    @property
    def p10_ms(self) -> float:
        return float(np.percentile(self.samples_ms, 10))

    @property
    def p90_ms(self) -> float:
        return float(np.percentile(self.samples_ms, 90))

    @property
    def launch_ms(self) -> float:
        """Median time until the function returned: what a clock without synchronise reads."""
        return statistics.median(self.returned_ms)

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader of the median should know; empty if nothing looks odd."""
        notes = []
        if first_is_off(self.samples_ms):
            off = self.samples_ms[0] / statistics.median(self.samples_ms[1:])
            notes.append(f"the first sample is {off:.2f} times the others' median: raise warmup")
        if self.flush_is_partial:
            notes.append(f"the cache is larger than half of the {self.flushed_bytes} bytes passed over: partly warm")
        return tuple(notes)

    def report(self) -> str:
        """Lines for `print`: median, spread, number of samples, first call, and the notes."""
        state = "cold cache" if self.cold_cache else "warm cache"
        lines = [
            f"median {self.median_ms:.4g} ms (p10 {self.p10_ms:.4g} ms, p90 {self.p90_ms:.4g} ms)",
            f"{len(self.samples_ms)} samples on {self.device}, {state}; first call {self.first_call_ms:.4g} ms",
        ]
        return "\n".join(lines + [f"note: {note}" for note in self.notes])

    def __str__(self) -> str:
        return self.report()


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


_LARGEST_BUFFER = 2**30


class CacheFlusher:
    """Streams a buffer twice the size of the cache nearest to memory (L2 on a GPU, the last level on a CPU), so that
    work finds its data in memory, not where the last repeat left it.

    The buffer stops at 1 GiB: on a server with a larger cache, or a virtual machine that is told of the whole server's,
    the flush is partial, and `nbytes` tells.
    """

    def __init__(self, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        cache = torch.cuda.get_device_properties(device).L2_cache_size if on_gpu else last_level_cache_bytes()
        self.nbytes = min(2 * cache, _LARGEST_BUFFER)
        self.partial = self.nbytes < 2 * cache
        self._buffer = torch.zeros(self.nbytes // 4, dtype=torch.int32, device=device)

    def flush(self) -> None:
        """Evict everything. The caller synchronises."""
        # Read and write: a plain fill may bypass a CPU's cache (non-temporal stores) and evict nothing.
        self._buffer.add_(1)


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


_FAR_FROM_MEDIAN = 1.5
_FAR_FROM_SPREAD = 5.0


def first_is_off(samples: list[float] | tuple[float, ...]) -> bool:
    """True if the first sample lies far off the others' median: by half of it, and by five times their spread."""
    if len(samples) < 4:
        return False
    rest = samples[1:]
    median = statistics.median(rest)
    spread = statistics.median(abs(sample - median) for sample in rest)
    distance = abs(samples[0] - median)
    return distance > (_FAR_FROM_MEDIAN - 1) * median and distance > _FAR_FROM_SPREAD * spread
