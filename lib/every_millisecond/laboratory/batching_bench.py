"""Continuous batching against static batching and one at a time, in one run on one set of requests.

python -m every_millisecond.laboratory.batching_bench
python -m every_millisecond.laboratory.batching_bench --dtype float32 --json out.json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from every_millisecond.laboratory.paged_waste import SlotUse, contiguous_use, paged_use
from every_millisecond.laboratory.static_batching import generate_static, left_pad
from every_millisecond.laboratory.workload import Ask, mixed_asks
from llm_latency import hardware, models
from llm_latency.batching.engine import BatchingEngine, EngineOptions
from llm_latency.batching.scheduler import SchedulerOptions
from llm_latency.generation import TransformersStepper, generate
from llm_latency.timing import Comparison, compare

ONE, STATIC, CONTINUOUS = "one at a time", "static", "continuous"


def run_one_at_a_time(model: PreTrainedModel, asks: Sequence[Ask]) -> list[list[int]]:
    """Each request alone, by the plain loop over transformers' own cache."""
    stepper = TransformersStepper(model)
    outputs = [generate(stepper, torch.tensor([ask.prompt]), ask.max_new_tokens).sequences[0] for ask in asks]
    return [output[len(ask.prompt) :].tolist() for output, ask in zip(outputs, asks, strict=True)]


def run_static(model: PreTrainedModel, asks: Sequence[Ask], batch: int) -> list[list[int]]:
    """Batches in order of arrival, each padded and run until its longest answer is done."""
    rows: list[list[int]] = []
    for first in range(0, len(asks), batch):
        part = asks[first : first + batch]
        ids, mask = left_pad([ask.prompt for ask in part], pad_id=0)
        rows.extend(generate_static(model, ids, mask, [ask.max_new_tokens for ask in part]).rows)
    return rows


def make_engine(model: PreTrainedModel, batch: int, *, token_budget: int = 256, num_pages: int = 512) -> BatchingEngine:
    """An engine of `batch` places without a prefix cache, so that no round profits from the one before."""
    scheduler = SchedulerOptions(max_running=batch, token_budget=token_budget)
    return BatchingEngine(model, EngineOptions(num_pages=num_pages, prefix_caching=False, scheduler=scheduler))


def run_continuous(model: PreTrainedModel, asks: Sequence[Ask], batch: int) -> list[list[int]]:
    """All requests submitted at once to an engine that runs `batch` of them at a time."""
    engine = make_engine(model, batch)
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

    def as_dict(self) -> dict:
        """For JSON: raw samples in milliseconds, and what they were measured on."""
        return {
            "requests": self.requests,
            "batch": self.batch,
            "tokens": self.tokens,
            "same": self.same,
            "dtype": self.dtype,
            "samples_ms": {name: list(samples) for name, samples in self.times.samples_ms.items()},
            "first_call_ms": self.times.first_call_ms,
            "machine": hardware.machine_facts(),
        }


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


def count_waste(
    count: int = 1000, *, longest_answer: int = 256, page_size: int = 16, seed: int = 0
) -> dict[str, SlotUse]:
    """Slots at the end of each of many requests: prompts of 64 to 512 tokens, answers of 4 to 128.

    A contiguous cache must reserve `longest_answer` behind each prompt, since nobody knows where an answer ends.
    The end is its best moment: before it, even more of the reservation is empty.
    """
    asks = mixed_asks(count, vocab_size=2, seed=seed, prompt_tokens=(64, 512), new_tokens=(4, 128))
    lengths = [len(ask.prompt) + ask.max_new_tokens for ask in asks]
    reserved = [len(ask.prompt) + longest_answer for ask in asks]
    return {"contiguous": contiguous_use(lengths, reserved), "paged": paged_use(lengths, page_size)}


def main() -> None:
    parser = argparse.ArgumentParser(description="Continuous batching, static batching and one request at a time.")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write raw samples and machine facts to this file")
    args = parser.parse_args()
    model = models.load_target(dtype=hardware.DTYPES[args.dtype])
    asks = mixed_asks(
        args.requests, vocab_size=model.config.vocab_size, seed=1, prompt_tokens=(16, 128), new_tokens=(2, 64)
    )
    result = compare_batching(model, asks, batch=args.batch, rounds=args.rounds)
    waste = count_waste()
    print(result.report())
    for name, use in waste.items():
        print(f"{name:<14}{use.held:>8} slots held, {use.waste:6.1%} of them empty")
    if args.json:
        record = result.as_dict() | {"waste": {name: use.waste for name, use in waste.items()}}
        args.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
