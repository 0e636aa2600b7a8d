"""Quick measurements of claims on this machine, each as a notebook makes it: `llm-latency claims --measure`."""

from __future__ import annotations

import datetime
import json
import math
import re
from collections.abc import Callable
from pathlib import Path

import torch

from every_millisecond.claims.check import Figures, storable
from every_millisecond.claims.sources import KIND, Findings, machine_name
from every_millisecond.claims.speculation_claims import output_distance
from every_millisecond.laboratory import batching_bench as bench
from every_millisecond.laboratory import cache_bench
from every_millisecond.laboratory.workload import mixed_asks
from every_millisecond.notebook import memory
from every_millisecond.notebook.module_breakdown import module_breakdown
from every_millisecond.notebook.outcome import Interval
from every_millisecond.request import NEW_TOKENS
from every_millisecond.subject import Subject
from llm_latency import files, hardware, models, quality, roofline
from llm_latency.attention import attend, attention_reference
from llm_latency.benchmark import respond
from llm_latency.generation import RecomputeStepper, TransformersStepper
from llm_latency.kv_cache import Int8KVCache
from llm_latency.kv_cache.int8 import ATTENTION_NAME
from llm_latency.text import TokenCache
from llm_latency.timing import LatencyTimer, Measurement, compare, measure

Found = dict[str, Figures]


def over(slow: Measurement, fast: Measurement) -> Interval:
    """How many times as long one function took as another, which was not timed in turns with it."""
    return Interval(slow.median_ms / fast.median_ms, slow.p10_ms / fast.p90_ms, slow.p90_ms / fast.p10_ms)


def clock(subject: Subject) -> Found:
    """B1: a decode step on a GPU, and when the call returned. A CPU's clock cannot show it."""
    if subject.device.type != "cuda":
        return {"B1": {"cuda": 0.0}}
    stepper = subject.stepper
    stepper.prefill(subject.ids)
    step = measure(lambda: stepper.step(subject.token), repeats=10, device=subject.device)
    return {"B1": {"cuda": 1.0, "flattery": step.median_ms / step.launch_ms}}


def whole_request(subject: Subject) -> Found:
    """A14 from three standard requests and a look-up of their ids, B5 from one of 512 tokens in, 256 out as well."""
    stepper = TransformersStepper(subject.fp32)
    respond(stepper, subject.tokenizer, subject.prompt, 2)
    runs = [respond(stepper, subject.tokenizer, subject.prompt, NEW_TOKENS).breakdown for _ in range(3)]
    fastest, b, slowest = sorted(runs, key=lambda run: run.total_ms)
    cache = TokenCache(subject.tokenizer)
    cache.encode(subject.prompt)
    look_up = measure(lambda: cache.encode(subject.prompt), device="cpu").median_ms
    timer = LatencyTimer(subject.device)
    with timer.stage("prefill"):
        int(stepper.prefill(subject.ids.repeat(1, 2)).argmax())
    with timer.stage("decode"):
        for _ in range(255):
            int(stepper.step(subject.token).argmax())
    prefill, decode = timer.get_elapsed_ms("prefill"), timer.get_elapsed_ms("decode")
    saved_ms, differ_ms = b.tokenize_ms - look_up, slowest.total_ms - fastest.total_ms
    ends = {"ends_share": (b.tokenize_ms + b.detokenize_ms) / b.total_ms, "lookup_share": saved_ms / b.total_ms}
    return {
        "A14": ends | ({"noticed": saved_ms / differ_ms} if differ_ms > 0 else {}),
        "B5": {"decode_share": b.decode_ms / b.total_ms, "decode_share_512_256": decode / (prefill + decode)},
    }


def lengths(subject: Subject) -> Found:
    """A4 and A7 from the prefill at growing lengths, B7 from a step at 64 and 512 tokens with and without a cache."""
    text = subject.ids.repeat(1, 4)
    cached, recomputing = TransformersStepper(subject.fp32), RecomputeStepper(subject.fp32)
    first = {n: measure(lambda n=n: cached.prefill(text[:, :n]), warmup=1, repeats=3) for n in (64, 256, 512, 1024)}
    without = {n: measure(lambda n=n: recomputing.prefill(text[:, :n]), warmup=0, repeats=2) for n in (64, 512)}
    with_cache = {}
    for n in (64, 512):
        cached.prefill(text[:, :n])
        with_cache[n] = measure(lambda: cached.step(subject.token), warmup=1, repeats=5)
    grown = over(first[1024], first[64])
    power = Interval(*(math.log(x) / math.log(1024 / 64) for x in (grown.median, grown.low, grown.high)))
    return {
        "A4": {"power": power, "longest": 1024},
        "A7": {
            "ms_per_token": (first[512].median_ms - first[64].median_ms) / (512 - 64),
            "first_512_over_256": over(first[512], first[256]),
        },
        "B7": {
            "growth_without": over(without[512], without[64]),
            "growth_with": over(with_cache[512], with_cache[64]),
        },
    }


def parts(subject: Subject) -> Found:
    """B3 by forward hooks, at the claim's 512 tokens."""
    ids = subject.ids.repeat(1, 2)
    found = module_breakdown(subject.fp32, ids, repeats=3).parts_ms
    share = found["attention"] / (found["attention"] + found["ffn"])
    return {"B3": {"attention_share": share, "tokens": ids.shape[1]}}


def attention(subject: Subject) -> Found:
    """A5, A11 and B10: attention alone and the whole prefill by length, memory and error of the blocked form."""
    shape = roofline.shape_of(subject.fp32)
    saved, alone = {}, {}
    for n in (64, 256, 512, 1024):
        q, k, v = (torch.randn(1, n, shape.heads, shape.head_dim, device=subject.device) for _ in range(3))
        ways = {name: lambda q=q, k=k, v=v, name=name: attend(q, k, v, backend=name, causal=True)
                for name in ("reference", "sdpa")}  # fmt: skip
        turns = compare(ways, rounds=6, warmup=1)
        ratio = turns.ratio("sdpa", "reference")
        saved[f"saved_{n}"] = Interval(1 - ratio.median, 1 - ratio.high, 1 - ratio.low)
        alone[n] = turns.speedup("sdpa", "reference")
    q, k, v = (torch.randn(1, 4096, 2, 64, device=subject.device) for _ in range(3))
    peaks = [
        memory.peak_extra_bytes(lambda way=way: attend(q, k, v, backend=way, causal=True))
        for way in ("reference", "flash")
    ]
    few = [x[:, :300] for x in (q, k, v)]
    error = (attend(*few, backend="flash", causal=True) - attention_reference(*few, causal=True)).abs().max()
    eager = models.load_target(subject.profile, dtype=torch.float32, attn_implementation="eager")
    steppers = {"by hand": TransformersStepper(eager), "sdpa": TransformersStepper(subject.fp32)}
    gains = {}
    for n in (128, 256, 1024):
        text = subject.ids.repeat(1, 4)[:, :n]
        ways = {name: lambda s=s, text=text: s.prefill(text) for name, s in steppers.items()}
        gains[n] = compare(ways, rounds=3, warmup=1).speedup("sdpa", "by hand")
    return {
        "A5": {"memory_less": peaks[0] / peaks[1], "max_error": float(error), "gain_256": gains[256],
               "gain_1024": gains[1024]},
        "A11": {**{f"whole_{n}": gain for n, gain in gains.items()}, "alone_256": alone[256]},
        "B10": saved,
    }  # fmt: skip


def sixteen_bits(subject: Subject) -> Found:
    """B9: prefill and decode apart."""
    steppers = {"32": TransformersStepper(subject.fp32), "16": TransformersStepper(subject.half())}
    ids = subject.ids[:, : subject.sixteen_bit_tokens]
    prefill = compare({name: lambda s=s: s.prefill(ids) for name, s in steppers.items()}, rounds=4, warmup=1)
    decode = compare({name: lambda s=s: s.step(subject.token) for name, s in steppers.items()}, rounds=10, warmup=2)
    gains = {"prefill_gain": prefill.speedup("16", "32"), "decode_gain": decode.speedup("16", "32")}
    return {"B9": gains | {"prefill_tokens": ids.shape[1]}}


def int8_cache(subject: Subject) -> Found:
    """A6, A12 and A16: bytes, steps, perplexity and drift of the INT8 cache, and what the acceptance rule shifts."""
    p, q = torch.rand(2, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    ratio = cache_bench.bytes_ratio(subject.fp32.config)
    half = subject.half(ATTENTION_NAME)
    steps = {n: cache_bench.step_times(half, n, rounds=5).ratio(cache_bench.INT8, cache_bench.BF16)
             for n in (256, 4096)}  # fmt: skip
    text = subject.text(1024)
    exact = quality.perplexity(subject.fp32, text)
    coded = quality.perplexity(subject.fp32, text, cache=Int8KVCache(subject.fp32.config))
    drifted = quality.drift(subject.fp32, text[:, :256], lambda: Int8KVCache(subject.fp32.config), chunk_size=16)
    return {
        "A6": {"bytes_ratio": ratio, **{f"step_ratio_{n}": value for n, value in steps.items()}},
        "A12": {"bytes_ratio": ratio, "loss": coded / exact - 1},
        "A16": {"int8_kl": drifted.mean_kl, "speculative_distance": output_distance(p / p.sum(), q / q.sum())},
    }


def batches(subject: Subject) -> Found:
    """B12 and A13: sixteen requests one at a time and in shared passes of eight."""
    model = subject.half() if hardware.bf16_is_native() else subject.fp32
    asks = mixed_asks(16, vocab_size=model.config.vocab_size, seed=1, prompt_tokens=(16, 64), new_tokens=(2, 32))
    result = bench.compare_batching(model, asks, rounds=1)

    def steps(count: int) -> Measurement:
        engine = bench.make_engine(model, count)
        for ask in asks[:count]:
            engine.submit(ask.prompt[:16], 24)
        while len(engine.step()) < count:  # until all have read their prompts
            pass
        return measure(engine.step, warmup=2, repeats=8, device=model.device)

    slower = over(steps(8), steps(1))
    more = Interval(8 / slower.median, 8 / slower.high, 8 / slower.low)
    gain = result.times.speedup(bench.CONTINUOUS, bench.ONE)
    return {"B12": {"gain": gain}, "A13": {"throughput": more, "slower": slower}}


MEASUREMENTS: dict[str, Callable[[Subject], Found]] = {
    function.__name__: function
    for function in (clock, whole_request, lengths, parts, attention, sixteen_bits, int8_cache, batches)
}


def measure_claims(
    names: list[str] | None = None,
    *,
    profile: str | None = None,
    progress: Callable[[str, int, int], None] = lambda name, done, of: None,
) -> Findings:
    """Run the named measurements (all, in about two minutes on two cores) and return what they found.

    Raises ValueError for an unknown name.
    """
    chosen = list(MEASUREMENTS) if names is None else names
    unknown = [name for name in chosen if name not in MEASUREMENTS]
    if unknown:
        raise ValueError(f"unknown measurement {unknown[0]!r}; expected one of {', '.join(MEASUREMENTS)}")
    subject = Subject(profile)
    values: dict[str, dict] = {}
    for done, name in enumerate(chosen):
        progress(name, done, len(chosen))
        for claim, figures in MEASUREMENTS[name](subject).items():
            values.setdefault(claim, {}).update((figure, storable(value)) for figure, value in figures.items())
    progress("done", len(chosen), len(chosen))
    machine = machine_name(hardware.machine_facts())
    return Findings("quick measurements", machine, datetime.date.today().isoformat(), values, here=True)


def write(found: Findings, folder: Path) -> Path:
    """Write findings as a dated JSON that `sources.recorded` reads again; returns its path."""
    record = {"kind": KIND, "date": found.date, "machine": hardware.machine_facts(), "figures": dict(found.values)}
    label = re.sub(r"[^a-z0-9]+", "-", found.machine.lower()).strip("-")
    path = folder / f"{found.date}-{label}-claims.json"
    files.write_atomically(path, json.dumps(record, indent=1))
    return path
