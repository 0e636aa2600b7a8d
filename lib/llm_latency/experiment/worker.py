"""Measures one rung in a process of its own: `python -m llm_latency.experiment.worker`. Started by `runner`."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch

from llm_latency import files, models, quality
from llm_latency.experiment.record import STAGES, RungRecord
from llm_latency.experiment.rungs import BASELINE, rung
from llm_latency.generation import Stepper, respond
from llm_latency.request import NEW_TOKENS, encode_prompt, standard_prompt

QUALITY_TOKENS = 512
MIN_REPEATS = 2


def measure_rung(
    name: str, profile: str | None, *, warmup: int, repeats: int, budget_s: float, folder: Path, with_quality: bool
) -> RungRecord:
    """Answer the standard request `warmup` + `repeats` times and keep every sample.

    A rung whose answer takes many seconds stops after `budget_s`, but not before two samples, and warms up with fewer
    answers. With quality, a text is
    scored through the rung's own weights and cache, and its top-1 choices compared with the baseline's.
    """
    entry = rung(name)
    facts = dict(name=name, title=entry.title, notebook=entry.notebook, weights=entry.weights, cache=entry.cache)
    facts |= dict(on_path=entry.on_path, exact=entry.exact)
    reason = entry.unavailable()
    if reason:
        return RungRecord(status="unavailable", reason=reason, **facts)
    started = time.perf_counter()
    stepper = entry.build(profile)
    tokenizer = models.load_tokenizer(profile)
    record = RungRecord(status="measured", load_s=time.perf_counter() - started, **facts)
    prompt = standard_prompt(tokenizer)
    record.samples_ms = {stage: [] for stage in (*STAGES, "total", "wall")}
    started = time.perf_counter()
    for i in range(warmup):
        seconds = time.perf_counter() - started
        if i > 0 and seconds > budget_s / 4:
            break  # one slow answer has warmed everything that there is to warm
        response = respond(stepper, tokenizer, prompt, NEW_TOKENS)
        record.first_ms = record.first_ms or response.breakdown.total_ms
    started = time.perf_counter()
    for i in range(repeats):
        if i >= MIN_REPEATS and time.perf_counter() - started > budget_s:
            break
        start = time.perf_counter()
        response = respond(stepper, tokenizer, prompt, NEW_TOKENS)
        wall = (time.perf_counter() - start) * 1e3
        b = response.breakdown
        values = (b.tokenize_ms, b.prefill_ms, b.decode_ms, b.detokenize_ms, b.total_ms, wall)
        for stage, value in zip((*STAGES, "total", "wall"), values, strict=True):
            record.samples_ms[stage].append(value)
        record.first_ms = record.first_ms or wall
    record.prompt_tokens, record.new_tokens = b.prompt_tokens, b.tokens_generated
    record.ids, record.text = response.sequences[0, b.prompt_tokens :].tolist(), response.text
    if with_quality:
        _add_quality(record, stepper, tokenizer, folder)
    return record


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rung", required=True)
    parser.add_argument("--profile")
    parser.add_argument("--warmup", type=int, required=True)
    parser.add_argument("--repeats", type=int, required=True)
    parser.add_argument("--budget", type=float, required=True)
    parser.add_argument("--quality", action="store_true")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    record = measure_rung(
        args.rung,
        args.profile,
        warmup=args.warmup,
        repeats=args.repeats,
        budget_s=args.budget,
        folder=args.folder,
        with_quality=args.quality,
    )
    record.write(args.out)


if __name__ == "__main__":
    main()
