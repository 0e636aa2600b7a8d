"""Continuous batching against static batching and one at a time, in one run on one set of requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from every_millisecond.laboratory.static_batching import generate_static, left_pad
from every_millisecond.laboratory.workload import Ask
from llm_latency.batching.engine import BatchingEngine, EngineOptions
from llm_latency.batching.scheduler import SchedulerOptions
from llm_latency.engine.kernel_decoder import KernelDecoder
from llm_latency.generation import Stepper, as_stepper, generate
from llm_latency.timing import Comparison, compare

ONE, STATIC, CONTINUOUS = "one at a time", "static", "continuous"


def run_one_at_a_time(model: PreTrainedModel | Stepper, asks: Sequence[Ask]) -> list[list[int]]:
    """Each request alone, by the plain loop: over the decoder itself, or over transformers' own cache."""
    stepper = as_stepper(model)
    outputs = [generate(stepper, torch.tensor([ask.prompt]), ask.max_new_tokens).sequences[0] for ask in asks]
    return [output[len(ask.prompt) :].tolist() for output, ask in zip(outputs, asks, strict=True)]


def run_static(model: PreTrainedModel, asks: Sequence[Ask], batch: int) -> list[list[int]]:
    """Batches in order of arrival, each padded and run until its longest answer is done."""
    rows: list[list[int]] = []
    for first in range(0, len(asks), batch):
        part = asks[first : first + batch]
        ids, mask = left_pad([ask.prompt for ask in part], pad_id=0)
        rows.extend(generate_static(model, ids, mask, [ask.max_new_tokens for ask in part]))
    return rows


def make_engine(
    model: PreTrainedModel | KernelDecoder, batch: int, *, token_budget: int = 256, num_blocks: int = 512
) -> BatchingEngine:
    """An engine of `batch` slots without a prefix cache, so that no round benefits from the one before.

    A kernel brings its own pool, and num_blocks does not count.
    """
    scheduler = SchedulerOptions(max_running=batch, token_budget=token_budget)
    blocks = model.kernel.blocks if isinstance(model, KernelDecoder) else num_blocks
    return BatchingEngine(model, EngineOptions(num_blocks=blocks, prefix_caching=False, scheduler=scheduler))


def run_continuous(model: PreTrainedModel | KernelDecoder, asks: Sequence[Ask], batch: int) -> list[list[int]]:
    """All requests submitted at once to an engine that runs `batch` of them at a time."""
    return _run(make_engine(model, batch), asks)


def run_in_groups(model: PreTrainedModel | KernelDecoder, asks: Sequence[Ask], batch: int) -> list[list[int]]:
    """The same engine, `batch` requests at a time: the next group begins when the longest answer of one is done."""
    engine = make_engine(model, batch)
    return [row for first in range(0, len(asks), batch) for row in _run(engine, asks[first : first + batch])]


def _run(engine: BatchingEngine, asks: Sequence[Ask]) -> list[list[int]]:
    ids = [engine.submit(ask.prompt, ask.max_new_tokens) for ask in asks]
    done = engine.run()
    return [done[i].generated for i in ids]


@dataclass(frozen=True, slots=True)
class BatchingResult:
    """times: of the whole set, by method; tokens: useful ones in it; same: requests with equal tokens in all three."""

    times: Comparison
    requests: int
    batch: int
    tokens: int
    same: int
    dtype: str

    def tokens_per_second(self, method: str) -> float:
        return 1e3 * self.tokens / self.times.median_ms[method]

    def report(self) -> str:
        lines = [f"{self.requests} requests, {self.tokens} new tokens, {self.batch} places, {self.dtype}"]
        for method in (ONE, STATIC, CONTINUOUS):
            ratio = self.times.speedup(method, ONE)
            lines.append(f"{method:<14}{self.tokens_per_second(method):8.1f} tok/s  {ratio} one at a time")
        lines.append(f"continuous over static: {self.times.speedup(CONTINUOUS, STATIC)}")
        lines.append(f"requests with the same tokens in all three: {self.same} of {self.requests}")
        return "\n".join(lines)


def compare_batching(model: PreTrainedModel, asks: Sequence[Ask], *, batch: int = 8, rounds: int = 3) -> BatchingResult:
    """The three ways on the same requests, in turns.

    Raises ValueError for no requests.
    """
    if not asks:
        raise ValueError("expected at least one request")
    rows: dict[str, list[list[int]]] = {}
    ways = {
        ONE: lambda: rows.__setitem__(ONE, run_one_at_a_time(model, asks)),
        STATIC: lambda: rows.__setitem__(STATIC, run_static(model, asks, batch)),
        CONTINUOUS: lambda: rows.__setitem__(CONTINUOUS, run_continuous(model, asks, batch)),
    }
    times = compare(ways, rounds=rounds, warmup=0, device=model.device)
    same = sum(a == b == c for a, b, c in zip(*rows.values(), strict=True))
    tokens = sum(ask.max_new_tokens for ask in asks)
    return BatchingResult(times, len(asks), batch, tokens, same, str(model.dtype).removeprefix("torch."))
