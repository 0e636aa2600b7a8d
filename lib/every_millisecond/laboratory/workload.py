"""Who asks for what, and when: mixed lengths, Poisson arrivals, a loop that plays them in real time, and what the load
did to everybody: throughput, latencies, and goodput."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from llm_latency.arguments import check_number
from llm_latency.batching import BatchingEngine, Request, State


@dataclass(frozen=True, slots=True)
class Ask:
    """A request to come: prompt ids, tokens wanted, and when it arrives (seconds after the beginning)."""

    prompt: tuple[int, ...]
    max_new_tokens: int
    arrival_s: float = 0.0


def poisson_arrivals(rate_per_s: float, count: int, *, seed: int) -> list[float]:
    """Arrival times, in seconds from the beginning, of independent users: exponential gaps of mean 1 / rate.

    Raises ValueError for a rate that is not positive or a negative count.
    """
    if not 0 < rate_per_s < float("inf") or count < 0:
        raise ValueError(f"expected a positive rate and a count of 0 or more, got {rate_per_s} and {count}")
    generator = torch.Generator().manual_seed(seed)
    uniform = torch.rand(count, generator=generator, dtype=torch.float64)
    return (-torch.log1p(-uniform) / rate_per_s).cumsum(0).tolist()


def mixed_asks(
    count: int,
    *,
    vocab_size: int,
    seed: int,
    prompt_tokens: tuple[int, int] = (32, 256),
    new_tokens: tuple[int, int] = (4, 128),
) -> list[Ask]:
    """Requests of mixed lengths from a seed: prompts of random ids, lengths log-uniform between the bounds.

    Log-uniform because real answers are like that: many short ones, a few long ones.

    Raises ValueError for bounds that are not 1 <= low <= high.
    """
    for name, (low, high) in (("prompt_tokens", prompt_tokens), ("new_tokens", new_tokens)):
        if not 1 <= low <= high:
            raise ValueError(f"{name} must be 1 <= low <= high, got {low} and {high}")
    generator = torch.Generator().manual_seed(seed)

    def lengths(low: int, high: int) -> list[int]:
        uniform = torch.rand(count, generator=generator, dtype=torch.float64)
        return (low * (high / low) ** uniform).round().long().tolist()

    pairs = zip(lengths(*prompt_tokens), lengths(*new_tokens), strict=True)
    return [Ask(tuple(torch.randint(vocab_size, (n,), generator=generator).tolist()), new) for n, new in pairs]


def serve(
    engine: BatchingEngine,
    asks: Sequence[Ask],
    *,
    sleep: Callable[[float], None] = time.sleep,
    progress: Callable[[int], None] | None = None,
) -> list[Request]:
    """Plays requests to an idle engine as they arrive and steps until all are done; returns them in order of `asks`.

    A request's times count from its arrival, also where the engine was in the middle of a step when it came. progress
    is told after each step how many requests are done.

    Raises ValueError if the engine is busy, and as `BatchingEngine.submit` for a request that it cannot serve; before
    the first of them is played, so that none is left half done.
    """
    if engine.busy:
        raise ValueError("the engine still has requests; serve begins with an idle one")
    for ask in asks:
        engine.check_request(ask.prompt, ask.max_new_tokens)
    start = engine.clock()
    order = sorted(range(len(asks)), key=lambda i: asks[i].arrival_s)
    ids: dict[int, int] = {}
    while order or engine.busy:
        while order and asks[order[0]].arrival_s <= engine.clock() - start:
            ask = asks[order[0]]
            ids[order.pop(0)] = engine.submit(ask.prompt, ask.max_new_tokens, arrival_s=start + ask.arrival_s)
        if engine.busy:
            engine.step()
            if progress:
                progress(len(engine.done))
        else:
            sleep(max(0.0, start + asks[order[0]].arrival_s - engine.clock()))
    return [engine.done[ids[i]] for i in range(len(asks))]


@dataclass(frozen=True, slots=True)
class Deadline:
    """What a user puts up with: first token and each further one in time (milliseconds). None: no limit.

    Raises TypeError or ValueError for a limit that is not positive and finite.
    """

    first_token_ms: float | None = None
    per_token_ms: float | None = None

    def __post_init__(self) -> None:
        for name in ("first_token_ms", "per_token_ms"):
            limit = getattr(self, name)
            if limit is not None and check_number(name, limit, 0) == 0:
                raise ValueError(f"{name}=0; expected a positive time, or None for no limit")

    def met_by(self, request: Request) -> bool:
        if request.state is not State.FINISHED:
            return False
        per_token = request.time_per_output_token_ms
        first_in_time = self.first_token_ms is None or request.time_to_first_token_ms <= self.first_token_ms
        others_in_time = self.per_token_ms is None or per_token is None or per_token <= self.per_token_ms
        return first_in_time and others_in_time


@dataclass(frozen=True, slots=True)
class LoadReport:
    """Figures of one run. Times in milliseconds, by percentile over requests; rates per second of the whole run."""

    requests: int
    finished: int
    tokens: int
    seconds: float
    first_token_ms_p50: float
    first_token_ms_p90: float
    first_token_ms_p99: float
    per_token_ms_p50: float
    per_token_ms_p90: float
    per_token_ms_p99: float
    end_to_end_ms_p50: float
    end_to_end_ms_p90: float
    end_to_end_ms_p99: float
    in_time: int

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def goodput_per_second(self) -> float:
        """Finished requests that met the deadline, per second. (In DistServe, arXiv 2401.09670, goodput is the highest
        rate at which a set share of the requests meets it.)"""
        return self.in_time / self.seconds


def report(requests: Sequence[Request], deadline: Deadline | None = None) -> LoadReport:
    """Figures of requests that are done, from the first arrival to the last end.

    Raises ValueError if there are none or one is still under way.
    """
    if not requests:
        raise ValueError("no requests to report on")
    seconds = max(r.arrival_s + r.end_to_end_ms / 1e3 for r in requests) - min(r.arrival_s for r in requests)
    finished = [r for r in requests if r.state is State.FINISHED]
    first = [r.time_to_first_token_ms for r in finished]
    per_token = [r.time_per_output_token_ms for r in finished if r.time_per_output_token_ms is not None]
    whole = [r.end_to_end_ms for r in finished]
    times = {"first_token_ms": first, "per_token_ms": per_token, "end_to_end_ms": whole}
    percentiles = {
        f"{name}_p{percent}": float(np.percentile(values, percent)) if values else math.nan
        for name, values in times.items()
        for percent in (50, 90, 99)
    }
    return LoadReport(
        requests=len(requests),
        finished=len(finished),
        tokens=sum(len(r.generated) for r in requests),
        seconds=seconds,
        in_time=sum((deadline or Deadline()).met_by(r) for r in requests),
        **percentiles,
    )
