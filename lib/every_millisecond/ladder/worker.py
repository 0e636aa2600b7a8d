"""Measures one rung in a process of its own: `python -m every_millisecond.ladder.worker`. Started by `runner`."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from statistics import median

import torch

from every_millisecond.ladder.record import MEASURED, STAGES, UNAVAILABLE, RungRecord
from every_millisecond.ladder.rungs import BASELINE, rung
from every_millisecond.ladder.twins import measure_twins, save_twins
from every_millisecond.processes import Parent
from every_millisecond.request import NEW_TOKENS, PROMPT_TOKENS
from llm_latency import files, models, quality
from llm_latency.benchmark import Response, respond
from llm_latency.generation import StaticStepper, Stepper
from llm_latency.speculative import SpeculativeDecoder
from llm_latency.text.prompt import encode_prompt

QUALITY_TOKENS = 512
WARM_TOKENS = 8  # of a warm-up answer: it touches every kernel, and compiles what is compiled
PROBE_TOKENS = (8, 24)
PROBE_STEPS = 5
# Times the slowness of the machine, a step of the baseline in FP32 against SmolLM2-135M's on two cores of 2023:
REFERENCE_STEP_S, REFERENCE_BYTES = 0.05, 538e6
LONGEST_PREFILL_S = 30.0  # a format without hardware for its products takes minutes, and says no more in ten rungs
LONGEST_ANSWER_S = 180.0  # a slower rung would hold up the whole ladder for one figure
SLOT_STEP = 512  # a static cache is made this much larger until the answer fits


def measure_rung(
    name: str,
    profile: str | None,
    *,
    warmup: int,
    repeats: int,
    budget_s: float,
    folder: Path,
    with_quality: bool,
    new_tokens: int = NEW_TOKENS,
    slowness: float = 1.0,
    say: Callable[[float], None] = lambda slowness: None,
) -> RungRecord:
    """Answer the standard request `repeats` times after `warmup` short answers, and keep every sample.

    After `budget_s` seconds no further answer begins, but one is always measured. A rung whose prefill would take over
    half a minute, or its answer over three, is recorded as unavailable; both limits grow with `slowness`, which the
    baseline finds out in its first steps. With quality, a text is scored through the rung's own weights and cache, its
    top-1 choices are compared with the baseline's, and its kind of decoder is measured on the baseline's twins. `say`
    is called with the slowness after each answer and each other step, as a sign of life.
    """
    entry = rung(name)
    reason = entry.unavailable()
    if reason:
        return entry.record(UNAVAILABLE, reason=reason)
    started = time.perf_counter()
    try:
        stepper = with_room(entry.build(profile), PROMPT_TOKENS + new_tokens)
    except ValueError as error:
        if not entry.activations:
            raise
        return entry.record(UNAVAILABLE, reason=f"the kernel does not take this model: {error}")
    if name == BASELINE:
        slowness = _slowness(stepper)
    say(slowness)
    seconds = 0.0 if name == BASELINE else prefill_seconds(stepper)
    if seconds > LONGEST_PREFILL_S * slowness:
        reason = f"its prefill would take about {seconds:.0f} s here: no hardware for its products"
        return entry.record(UNAVAILABLE, reason=reason)
    tokenizer = models.load_tokenizer(profile)
    record = entry.record(MEASURED, load_s=time.perf_counter() - started, slowness=slowness)
    prompt = entry.prompt(tokenizer)
    for _ in range(warmup):
        response = respond(stepper, tokenizer, prompt, min(WARM_TOKENS, new_tokens))
        say(slowness)
        first = record.first_ms is None
        record.first_ms = record.first_ms or response.breakdown.total_ms
        seconds = _answer_seconds(response, new_tokens)
        # The first answer compiles and allocates: what it took says nothing about the next.
        if not first and seconds > LONGEST_ANSWER_S * slowness and name != BASELINE:
            reason = f"an answer of {new_tokens} tokens would take about {seconds / 60:.0f} minutes"
            return entry.record(UNAVAILABLE, reason=reason)
    record.samples_ms = {stage: [] for stage in (*STAGES, "total", "wall")}
    started = time.perf_counter()
    for i in range(repeats):
        if i > 0 and time.perf_counter() - started > budget_s:
            break
        start = time.perf_counter()
        response = respond(stepper, tokenizer, prompt, new_tokens)
        wall = (time.perf_counter() - start) * 1e3
        say(slowness)
        b = response.breakdown
        values = (b.tokenize_ms, b.prefill_ms, b.decode_ms, b.detokenize_ms, b.total_ms, wall)
        for stage, value in zip((*STAGES, "total", "wall"), values, strict=True):
            record.samples_ms[stage].append(value)
        record.first_ms = record.first_ms or wall
    record.prompt_tokens, record.new_tokens = b.prompt_tokens, b.tokens_generated
    record.kept_tokens = stepper.prefix_tokens
    record.ids, record.text = response.sequences[0, b.prompt_tokens :].tolist(), response.text
    if with_quality:
        _add_quality(record, stepper, tokenizer, folder)
        say(slowness)
        _add_speculation(record, stepper, tokenizer, prompt, new_tokens)
        if name == BASELINE:
            save_twins(stepper.model, tokenizer, folder)
        measure_twins(record, entry.build, stepper, folder)
    return record


def _slowness(stepper: Stepper) -> float:
    """How many times slower this machine is now than the one that the limits were set on, at least 1: by a few steps of
    the baseline, against what so many bytes of weights took there."""
    ids = torch.arange(PROBE_TOKENS[0], device=stepper.device)[None]
    stepper.prefill(ids)
    times = []
    for _ in range(PROBE_STEPS):
        started = time.perf_counter()
        stepper.step(ids[:, :1]).argmax().item()
        times.append(time.perf_counter() - started)
    expected = REFERENCE_STEP_S * max(1.0, (stepper.step_bytes or 0) / REFERENCE_BYTES)
    return max(1.0, median(times) / expected)


def with_room(stepper: Stepper, needed: int) -> Stepper:
    """The stepper, its static cache made large enough for a long answer."""
    if isinstance(stepper, StaticStepper) and stepper.max_positions < needed:
        limit = stepper.model.config.max_position_embeddings
        return type(stepper)(stepper.model, max_tokens=min(-(-needed // SLOT_STEP) * SLOT_STEP, limit))
    return stepper


def prefill_seconds(stepper: Stepper) -> float:
    """About what a prefill of the standard prompt takes, from two short ones: what a further token adds to a pass."""

    def seconds(tokens: int) -> float:
        ids = torch.arange(tokens, device=stepper.device)[None]
        started = time.perf_counter()
        stepper.prefill(ids)
        return time.perf_counter() - started

    few, more = PROBE_TOKENS
    seconds(few)  # the first call of all allocates
    short, longer = (min(seconds(tokens) for _ in range(2)) for tokens in (few, more))
    return short + max(0.0, longer - short) / (more - few) * (PROMPT_TOKENS - few)


def _answer_seconds(response: Response, new_tokens: int) -> float:
    b = response.breakdown
    pace = b.decode_ms / max(1, b.tokens_generated - 1)
    return (b.prefill_ms + pace * (new_tokens - 1)) / 1e3


@torch.inference_mode()
def _add_quality(record: RungRecord, stepper: Stepper, tokenizer, folder: Path) -> None:
    ids = torch.tensor([encode_prompt(tokenizer, quality.reading_text())[:QUALITY_TOKENS]], device=stepper.device)
    logits = stepper.score(ids)[0, :-1].float()  # [n - 1, vocab]
    losses = torch.nn.functional.cross_entropy(logits, ids[0, 1:])
    record.perplexity = float(losses.exp())
    choices = logits.argmax(-1).tolist()
    reference = folder / "baseline_choices.json"
    if record.name == BASELINE:
        files.write_atomically(reference, json.dumps(choices))
    expected = files.read_json(reference, default=None)
    if expected is not None:
        record.agreement = sum(a == b for a, b in zip(choices, expected, strict=True)) / len(choices)


def _add_speculation(record: RungRecord, stepper: Stepper, tokenizer, prompt: str, new_tokens: int) -> None:
    """What a speculative decoder says of itself, from one more answer."""
    if not isinstance(stepper, SpeculativeDecoder):
        return
    output = stepper.generate(torch.tensor([encode_prompt(tokenizer, prompt)]), new_tokens)
    record.tokens_per_pass, record.acceptance = output.tokens_per_cycle, output.alpha
    record.rows_per_pass = 1 + output.proposed / len(output.cycles)
    record.draft_bytes = stepper.draft.step_bytes
    draft, verification = output.stage_ms.get("draft", 0.0), output.stage_ms.get("verify", 0.0)
    if output.proposed and verification:
        record.draft_cost = (draft / output.proposed) / (verification / len(output.cycles))


def main() -> None:
    parent = Parent()
    options = json.loads(sys.argv[1])
    options["folder"] = Path(options["folder"])
    record = measure_rung(**options, say=lambda slowness: parent.answer({"slowness": slowness}))
    parent.answer({"record": asdict(record)})


if __name__ == "__main__":
    main()
