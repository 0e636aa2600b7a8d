"""`compare`: several functions timed in turns, so that a drifting machine cannot favour one of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from llm_latency.timing.checks import check_callable, check_count
from llm_latency.timing.clock import Device, clock_for
from llm_latency.timing.comparison import Comparison
from llm_latency.timing.measure import flusher_for, garbage_collector_at_rest, time_once


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
