"""`compare`: several functions timed in turns, so that a drifting machine cannot favour one of them; `Comparison`: what
it found, and the ratios that may be quoted from it."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from llm_latency.arguments import check_callable, check_count
from llm_latency.timing.clock import Device, clock_for
from llm_latency.timing.measure import flusher_for, garbage_collector_at_rest, time_once


@dataclass(frozen=True, slots=True)
class Ratio:
    """A ratio of two times: the median over rounds, and the 10th and 90th percentile of the rounds' ratios."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.2f} times ({self.low:.2f} to {self.high:.2f})"


@dataclass(frozen=True, slots=True)
class Comparison:
    """Times of several functions, measured in turns.

    Args:
        samples_ms: name -> one time per round, in milliseconds. The n-th samples of all names lie side by side in time.
        first_call_ms: name -> the very first call, kept apart.
        device: the clock's name. cold_cache: whether the cache was emptied before each sample.
    """

    samples_ms: dict[str, tuple[float, ...]]
    first_call_ms: dict[str, float]
    device: str
    cold_cache: bool = False

    @property
    def median_ms(self) -> dict[str, float]:
        return {name: statistics.median(samples) for name, samples in self.samples_ms.items()}

    @property
    def p10_ms(self) -> dict[str, float]:
        return {name: float(np.percentile(samples, 10)) for name, samples in self.samples_ms.items()}

    @property
    def p90_ms(self) -> dict[str, float]:
        return {name: float(np.percentile(samples, 90)) for name, samples in self.samples_ms.items()}

    def ratio(self, name: str, baseline: str) -> Ratio:
        """The time of `name` over the time of `baseline`, round by round: 2.0 means twice as slow.

        A machine that slows down for a while slows both sides of a round, so the ratio holds where the times do not.

        Raises:
            KeyError: a name that was not compared.
        """
        for wanted in (name, baseline):
            if wanted not in self.samples_ms:
                raise KeyError(f"{wanted!r} was not compared; known: {', '.join(self.samples_ms)}")
        ratios = [a / b for a, b in zip(self.samples_ms[name], self.samples_ms[baseline], strict=True)]
        return Ratio(statistics.median(ratios), float(np.percentile(ratios, 10)), float(np.percentile(ratios, 90)))

    def speedup(self, name: str, baseline: str) -> Ratio:
        """How many times faster `name` is than `baseline`: 2.0 means half the time. Otherwise as `ratio`."""
        return self.ratio(baseline, name)

    def report(self, baseline: str | None = None) -> str:
        """A table for `print`: median, p10, p90, and each name's time over the baseline's (default: the first)."""
        baseline = next(iter(self.samples_ms)) if baseline is None else baseline
        width = max(len(name) for name in self.samples_ms) + 2
        lines = [f"{'':<{width}}{'median':>13}{'p10':>13}{'p90':>13}   time over {baseline!r}"]
        for name in self.samples_ms:
            times = (self.median_ms[name], self.p10_ms[name], self.p90_ms[name])
            lines.append(
                f"{name:<{width}}" + "".join(f"{ms:>10.4g} ms" for ms in times) + f"   {self.ratio(name, baseline)}"
            )
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.report()


def compare(
    functions: Mapping[str, Callable[[], object]],
    *,
    rounds: int = 10,
    warmup: int = 3,
    device: Device = None,
    cold_cache: bool = False,
) -> Comparison:
    """Time each function once per round, the order reversed in every second round.

    Times and waits as `measure` does: each function's first call is kept apart, then `warmup` rounds are thrown away.

    Args:
        functions: name -> work without arguments; two or more.
        rounds: samples of each function, 1 or more. warmup: rounds thrown away, 0 or more.
        device, cold_cache: as in `measure`.

    Raises:
        TypeError: functions is no mapping of functions, or a count is not an integer. ValueError: fewer than two
            functions, a count too small, an unknown device.
    """
    if not isinstance(functions, Mapping):
        raise TypeError(f"functions is {functions!r}; expected a mapping of names to functions")
    if len(functions) < 2:
        raise ValueError(f"functions holds {len(functions)}; expected two or more to compare")
    for name, fn in functions.items():
        check_callable(f"functions[{name!r}]", fn)
    check_count("rounds", rounds, least=1)
    check_count("warmup", warmup, least=0)
    clock = clock_for(device)
    flusher = flusher_for(clock) if cold_cache else None
    samples: dict[str, list[float]] = {name: [] for name in functions}
    with garbage_collector_at_rest():
        first = {name: time_once(fn, clock)[0] for name, fn in functions.items()}
        for turn in range(warmup + rounds):
            names = list(functions) if turn % 2 == 0 else list(reversed(functions))
            for name in names:
                done, _ = time_once(functions[name], clock, flusher)
                if turn >= warmup:
                    samples[name].append(done)
    return Comparison(
        samples_ms={name: tuple(times) for name, times in samples.items()},
        first_call_ms=first,
        device=clock.name,
        cold_cache=cold_cache,
    )
