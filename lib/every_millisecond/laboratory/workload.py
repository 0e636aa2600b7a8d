"""Who asks for what, and when: mixed lengths, Poisson arrivals, and a loop that plays them in real time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from llm_latency.batching.engine import BatchingEngine
from llm_latency.batching.request import Request


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


def serve(engine: BatchingEngine, asks: Sequence[Ask], *, sleep: Callable[[float], None] = time.sleep) -> list[Request]:
    """Plays requests to an idle engine as they arrive and steps until all are done; returns them in order of `asks`.

    A request's times count from its arrival, also where the engine was in the middle of a step when it came.

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
        else:
            sleep(max(0.0, start + asks[order[0]].arrival_s - engine.clock()))
    return [engine.done[ids[i]] for i in range(len(asks))]
