"""A load test of the batching engine in this process: the same workload at rising loads, and where its knee is.

Open loop: requests arrive when they like (Poisson), whether or not the server keeps up. A load of 1 is the rate at
which the engine answers this workload when all of it waits at its door.
"""

from __future__ import annotations

import datetime
import json
import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from every_millisecond.laboratory.batching_bench import make_engine
from every_millisecond.laboratory.workload import Ask, Deadline, mixed_asks, poisson_arrivals, report, serve
from every_millisecond.ladder import speculation
from llm_latency import files, hardware, models
from llm_latency.arguments import check_count
from llm_latency.batching import Request
from llm_latency.engine.kernel_decoder import KernelDecoder
from llm_latency.engine.kernel_rows import BLOCK

LOADS = (0.4, 0.6, 0.8, 1.0, 1.3)
LENGTHS = dict(prompt_tokens=(16, 64), new_tokens=(4, 64))
KEEPS_UP = 0.9  # share of the requests in time from which a server keeps up
GROWTH = 2.0  # the queue grows if the later half of the requests waits so many times as long as the earlier half
WARM_UP = 0.1  # of the requests: these meet an empty server
FIRST_TOKEN, PER_TOKEN = 5, 3  # the deadline, in times of an idle server's medians


@dataclass(frozen=True, slots=True)
class Knee:
    """load: the largest that is kept up with, None if it was not found. why: a sentence."""

    load: float | None
    why: str


def knee(shares: Mapping[float, float], share: float = KEEPS_UP) -> Knee:
    """The largest load up to which at every load at least `share` of the requests were in time.

    shares: load -> share of its requests in time, which is goodput over offered load. The knee is found only if a
    larger load that falls behind was tried, too: a test that stops before the knee has not seen it. Raises ValueError
    for fewer than two loads.
    """
    if len(shares) < 2:
        raise ValueError(f"shares holds {len(shares)} loads; expected two or more")
    kept = None
    for load in sorted(shares):
        if shares[load] < share:
            if kept is None:
                return Knee(None, f"not found: even the lightest load, {load:g}, is not kept up with")
            return Knee(kept, f"load {kept:g} is kept up with, load {load:g} is not")
        kept = load
    return Knee(None, f"not found: the heaviest load tried, {kept:g}, is still kept up with")


def steady(requests: Sequence[Request], growth: float = GROWTH) -> bool:
    """Whether no growth of the queue shows while these requests arrived: the median wait for a first token of the later
    half is at most `growth` times that of the earlier half, which proves little in a short run. In order of arrival;
    raises ValueError for fewer than four."""
    if len(requests) < 4:
        raise ValueError(f"{len(requests)} requests; expected four or more to compare two halves")
    waits = [r.time_to_first_token_ms for r in sorted(requests, key=lambda r: r.arrival_s)]
    half = len(waits) // 2
    return statistics.median(waits[half:]) <= growth * statistics.median(waits[:half])


def settled(requests: Sequence[Request]) -> list[Request]:
    """Without those that met an empty server: the first tenth to arrive."""
    order = sorted(requests, key=lambda r: r.arrival_s)
    return order[int(WARM_UP * len(order)) :]


def idle_deadline(model, asks: Sequence[Ask], slots: int) -> Deadline:
    """What counts as in time: a multiple of what an idle server takes for these requests, one after another."""
    engine = make_engine(model, slots)
    alone = report([serve(engine, [Ask(ask.prompt, ask.max_new_tokens)])[0] for ask in asks])
    return Deadline(FIRST_TOKEN * alone.first_token_ms_p50, PER_TOKEN * alone.per_token_ms_p50)


def load_model(profile: str | None, slots: int) -> tuple[KernelDecoder | torch.nn.Module, int]:
    """What the engine runs on here, and its vocabulary: the kernel where it runs, else the transformers model."""
    if speculation.kernel_unavailable() is None:
        model = models.load_target(profile, dtype=torch.float32)
        longest = sum(bounds[1] for bounds in LENGTHS.values())
        return KernelDecoder.from_model(model, blocks=slots * -(-longest // BLOCK)), model.config.vocab_size
    half = torch.cuda.is_available() or hardware.bf16_is_native()
    model = models.load_target(profile, dtype=hardware.half_dtype() if half else torch.float32)
    return model, model.config.vocab_size


def run_load_test(
    model,
    *,
    vocab_size: int,
    requests: int = 1000,
    loads: Sequence[float] = LOADS,
    slots: int = 8,
    seed: int = 0,
    clock: Callable[[], float] = time.perf_counter,
    progress: Callable[[str, int, int], None] = lambda title, done, of: None,
) -> dict:
    """Play so many requests at each load; a JSON object with the raw times of each request.

    model: what `BatchingEngine` takes. Raises ValueError or TypeError for counts below 20 requests or loads that are
    not positive.
    """
    check_count("requests", requests, 20)
    check_count("slots", slots, 1)
    if len(set(loads)) < 2 or min(loads) <= 0:
        raise ValueError(f"loads={tuple(loads)}; expected two or more positive ones")
    asks = mixed_asks(requests, vocab_size=vocab_size, seed=seed, **LENGTHS)
    first = asks[: min(len(asks), 8 * slots)]
    progress("capacity", 0, len(first))
    deadline = idle_deadline(model, asks[:4], slots)
    begin = clock()
    serve(make_engine(model, slots), first)
    capacity = len(first) / (clock() - begin)
    runs = []
    for number, load in enumerate(sorted(set(loads))):
        arrivals = poisson_arrivals(load * capacity, requests, seed=seed + 1 + number)
        timed = [Ask(ask.prompt, ask.max_new_tokens, at) for ask, at in zip(asks, arrivals, strict=True)]
        title = f"load {load:g}"
        done = serve(make_engine(model, slots), timed, progress=lambda n, title=title: progress(title, n, requests))
        runs.append(_run(load, load * capacity, done, deadline))
    found = knee({run["load"]: run["goodput_share"] for run in runs})
    return {
        "kind": "load",
        "date": datetime.date.today().isoformat(),
        "machine": hardware.machine_facts(),
        "decoder": type(model).__name__,
        "settings": {"requests": requests, "slots": slots, "seed": seed, **{k: list(v) for k, v in LENGTHS.items()}},
        "capacity_per_second": capacity,
        "deadline": {"first_token_ms": deadline.first_token_ms, "per_token_ms": deadline.per_token_ms},
        "runs": runs,
        "knee": {"load": found.load, "why": found.why},
    }


def _run(load: float, offered: float, requests: list[Request], deadline: Deadline) -> dict:
    counted = settled(requests)
    figures = report(counted, deadline)
    names = ("first_token_ms_p50", "first_token_ms_p99", "per_token_ms_p50", "per_token_ms_p99")
    start = min(request.arrival_s for request in requests)
    return {
        "load": load,
        "offered_per_second": offered,
        "tokens_per_second": figures.tokens_per_second,
        "goodput_per_second": figures.goodput_per_second,
        "goodput_share": figures.in_time / len(counted),
        "steady": steady(counted),
        **{name: getattr(figures, name) for name in names},
        "samples": [
            {
                "arrival_s": round(request.arrival_s - start, 4),
                "prompt_tokens": len(request.prompt),
                "new_tokens": len(request.generated),
                "first_token_ms": round(request.time_to_first_token_ms, 3),
                "per_token_ms": _rounded(request.time_per_output_token_ms),
                "end_to_end_ms": round(request.end_to_end_ms, 3),
            }
            for request in requests
        ],
    }


def _rounded(ms: float | None) -> float | None:
    return None if ms is None else round(ms, 3)


def lines(result: dict) -> list[str]:
    """The result in words, one line a load, and the knee."""
    deadline = result["deadline"]
    said = [
        f"{result['decoder']}, {result['settings']['slots']} slots; load 1 is {result['capacity_per_second']:.2f} "
        f"requests a second; in time: first token within {deadline['first_token_ms']:.0f} ms and "
        f"{deadline['per_token_ms']:.1f} ms a token"
    ]
    for run in result["runs"]:
        said.append(
            f"load {run['load']:g}: {run['tokens_per_second']:.0f} tok/s; first token "
            f"{run['first_token_ms_p50']:.0f} ms (p99 {run['first_token_ms_p99']:.0f} ms); a token "
            f"{run['per_token_ms_p50']:.1f} ms (p99 {run['per_token_ms_p99']:.1f} ms); "
            f"{run['goodput_share']:.0%} in time; {'steady' if run['steady'] else 'the queue grows'}"
        )
    return [*said, f"knee: {result['knee']['why']}"]


def write(result: dict, folder: Path) -> Path:
    """Store a result as a dated file; a second one of the same day and machine replaces the first."""
    machine = result["machine"]
    name = str(machine.get("gpu") or f"{machine['cpu']}, {machine['threads']} threads")
    label = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    path = folder / f"{result['date']}-{label}-load.json"
    files.write_atomically(path, json.dumps(result, indent=1))
    return path
