"""`Measurement`: what `measure` found, raw samples included."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

_FAR_FROM_MEDIAN = 1.5
_FAR_FROM_SPREAD = 5.0


def percentile(samples: list[float] | tuple[float, ...], percent: float) -> float:
    """The given percentile of the samples, by linear interpolation between the neighbouring ones."""
    ordered = sorted(samples)
    place = percent / 100 * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def first_is_off(samples: list[float] | tuple[float, ...]) -> bool:
    """True if the first sample lies far off the others' median: by half of it, and by five times their spread."""
    if len(samples) < 4:
        return False
    rest = samples[1:]
    median = statistics.median(rest)
    spread = statistics.median(abs(sample - median) for sample in rest)
    distance = abs(samples[0] - median)
    return distance > (_FAR_FROM_MEDIAN - 1) * median and distance > _FAR_FROM_SPREAD * spread


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
        return percentile(self.samples_ms, 10)

    @property
    def p90_ms(self) -> float:
        return percentile(self.samples_ms, 90)

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
