"""Distil the shipped drafts from the bundled target, on a CPU, from nothing else. For maintainers.

    python tools/distil_draft.py all        # everything below, one process of one thread on each of two cores

    python tools/distil_draft.py generate --worker 0 --workers 2    # the target answers; a process a core
    python tools/distil_draft.py train conditioned                  # one of RUNS
    python tools/distil_draft.py ship                               # weights into the package, docs/draft_model_card.md

What has been done is kept in a folder of the course's cache and not done again: an interrupted run continues with the
next chunk of answers, or with the training run that was cut. Delete the folder to begin anew.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import draft_card
import draft_data
import draft_eval
import draft_prompts
import draft_train
import torch
from draft_train import TrainOptions
from safetensors.torch import save_file

from llm_latency import files, models
from llm_latency.models import drafts

ROOT = Path(__file__).resolve().parents[1]
CARD = ROOT / "docs" / "draft_model_card.md"

SEED = 20
ROWS = 64  # answers side by side
ROUNDS = 2  # each question greedily and sampled
NEW_TOKENS = 160
HELD_OUT = 128  # held-out questions, each answered greedily and by sampling
ANSWER_MINUTES = 37.0
HEAD = 4096  # ids of the restricted head

# What is trained: layers of a plain draft (0: the conditioned one), and how. The clock ends each run, well before 20
# passes over the answers, so that everything together takes less than 90 minutes.
RUNS = {
    "plain-1": (1, TrainOptions(epochs=20, minutes=19)),
    "plain-2": (2, TrainOptions(epochs=20, minutes=12)),
    "conditioned": (0, TrainOptions(epochs=20, minutes=38, steps=3)),
}
LANES = (("conditioned",), ("plain-1", "plain-2"))  # side by side, a core each
SHIPPED = {drafts.PLAIN: "plain-1", drafts.CONDITIONED: "conditioned"}


def load_target():
    return models.load_target("smollm2-135m", dtype=torch.float32, device="cpu").requires_grad_(False)


def generate(folder: Path, worker: int, workers: int, minutes: float) -> None:
    """Answer the held-out questions, then those for training, into folder/held_out and folder/train."""
    tokenizer = models.load_tokenizer("smollm2-135m")

    def make() -> draft_data.BatchGenerator:
        return draft_data.BatchGenerator(load_target(), NEW_TOKENS, tokenizer.eos_token_id)

    def mine(index: int) -> bool:
        return index % workers == worker

    held_out = draft_data.plan(tokenizer, draft_prompts.questions(held_out=True)[:HELD_OUT], ROWS, ROUNDS, SEED)
    train = draft_data.plan(tokenizer, draft_prompts.questions(held_out=False), ROWS, ROUNDS, SEED)
    start, total = time.monotonic(), 0
    for new in itertools.chain(
        draft_data.generate(make, held_out, folder / "held_out", SEED, mine),
        draft_data.generate(make, train, folder / "train", SEED, mine),
    ):
        total += new
        spent = time.monotonic() - start
        print(f"{total} tokens in {spent:.0f} s, {total / spent:.0f} tok/s", flush=True)
        if spent > 60 * minutes:
            break


def train(folder: Path, name: str, limits: dict) -> None:
    """One training run: folder/<name>.safetensors and the record folder/<name>.json."""
    layers, options = RUNS[name]
    options = replace(options, **limits)
    chunks, held_out = draft_data.read_chunks(folder / "train"), draft_data.read_chunks(folder / "held_out")
    if not chunks or not held_out:
        raise SystemExit(f"no answers in {folder}: run `generate` first")
    target = load_target()
    head = target.lm_head.weight.detach()
    head_ids, coverage = draft_train.frequent_ids(chunks, HEAD, target.config.eos_token_id)
    head_rows = head[head_ids]
    if layers:
        student = draft_train.PlainStudent(target, layers)
    else:
        student = draft_train.ConditionedStudent(target, head_ids, chunks)
    curve = []

    def report(tokens: int, seconds: float, loss: float) -> None:
        greedy = draft_eval.evaluate(student, held_out[:1], head_ids, head_rows, gammas=(1,))["greedy"]
        curve.append({"tokens": tokens, "seconds": seconds, "loss": loss, "acceptance": greedy["acceptance"]["1"]})
        print(f"{name}: {json.dumps(curve[-1])}", flush=True)

    draft_train.train(student, chunks, head_rows, options, report)
    # What ships is BF16: measure that.
    with torch.no_grad():
        for parameter in student.parameters():
            parameter.copy_(parameter.bfloat16())
    chances = draft_eval.target_chances(held_out, head)
    final = draft_eval.evaluate(student, held_out, head_ids, head_rows, chances=chances)
    everything = torch.arange(len(head))
    full = draft_eval.evaluate(student, held_out[:1], everything, head, gammas=(1,))
    narrow = draft_eval.evaluate(student, held_out[:1], head_ids, head_rows, gammas=(1,))
    tensors = own_tensors(student, head_ids)
    record = {
        "name": name,
        "kind": drafts.PLAIN if layers else drafts.CONDITIONED,
        "layers": layers or 1,
        "head": len(head_ids),
        "coverage": coverage,
        "parameters": draft_card.parameter_count(tensors),
        "answers": sum(len(chunk["lengths"]) for chunk in chunks),
        "seen_tokens": curve[-1]["tokens"],
        "seconds": curve[-1]["seconds"],
        "options": asdict(options),
        "curve": curve,
        "final": final,
        "full_head": full,
        "same_texts_restricted_head": narrow,
    }
    part = folder / f"{name}.part"
    save_file(tensors, part)
    os.replace(part, folder / f"{name}.safetensors")
    files.write_atomically(folder / f"{name}.json", json.dumps(record, indent=1))
    print(json.dumps(final, indent=1), flush=True)


def own_tensors(student, head_ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """A student's weights under the names that the package loads them by, and `head_ids`."""
    if isinstance(student, draft_train.PlainStudent):
        tensors = {f"model.{name}": value for name, value in student.model.state_dict().items()}
    else:
        tensors = dict(student.layer.state_dict())
    return {**{k: v.detach().clone().contiguous() for k, v in tensors.items()}, "head_ids": head_ids}


def data_facts(folder: Path) -> dict:
    """Counts and times of the answers in a folder."""
    facts: dict = {"seed": SEED, "new_tokens": NEW_TOKENS, "minutes": 0.0, "timed": 0, "chunks": 0, "longest": 0}
    for part in ("train", "held_out"):
        chunks = draft_data.read_chunks(folder / part)
        facts[f"{part}_answers"] = sum(len(chunk["lengths"]) for chunk in chunks)
        facts[f"{part}_tokens"] = sum(int((chunk["lengths"] - chunk["prompt_lengths"]).sum()) for chunk in chunks)
        times = [chunk["seconds"] for chunk in chunks if not math.isnan(chunk["seconds"])]
        facts["chunks"], facts["timed"] = facts["chunks"] + len(chunks), facts["timed"] + len(times)
        facts["minutes"] += sum(times) / 60
        facts["longest"] = max(facts["longest"], *(int(chunk["lengths"].max()) for chunk in chunks))
    return facts


def ship(folder: Path) -> None:
    """Put the drafts of SHIPPED into the package and write the model card from the records of all runs."""
    records = [json.loads((folder / f"{name}.json").read_text()) for name in RUNS if (folder / f"{name}.json").exists()]
    by_name = {record["name"]: record for record in records}
    sizes = {}
    for kind, name in SHIPPED.items():
        into = drafts.FOLDER / f"{kind}.safetensors"
        sizes[kind] = draft_card.ship(folder / f"{name}.safetensors", into, by_name[name])
    text = draft_card.card(data_facts(folder), records, SHIPPED, sizes)
    files.write_atomically(CARD, text)
    CARD.chmod(0o644)
    print(f"{sum(sizes.values()) / 1e6:.1f} MB in {drafts.FOLDER}, {CARD}")


def run_all(folder: Path, minutes: float) -> None:
    """Every stage, two processes at a time."""

    def side_by_side(*commands: list[str]) -> None:
        base = [sys.executable, __file__]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        running = [subprocess.Popen([*base, *c, "--folder", str(folder)], env=environment) for c in commands]
        if any([process.wait() for process in running]):
            raise SystemExit("a stage failed; its message stands above")

    side_by_side(*(["generate", "--worker", str(w), "--workers", "2", "--minutes", str(minutes)] for w in range(2)))
    waiting = [[name for name in lane if not (folder / f"{name}.json").exists()] for lane in LANES]
    side_by_side(*(["train", *names] for names in waiting if names))
    ship(folder)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=["all", "generate", "train", "ship"])
    parser.add_argument("runs", nargs="*", metavar="run", help=f"what to train: {', '.join(RUNS)}")
    parser.add_argument("--folder", type=Path, default=None, help="default: distil/ in the course's cache folder")
    parser.add_argument("--worker", type=int, default=0)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument(
        "--minutes", type=float, default=None, help=f"of answers (default {ANSWER_MINUTES:g}) or of a training run"
    )
    parser.add_argument("--epochs", type=float, default=None, help="passes over the data, instead of the run's own")
    options = parser.parse_args()
    folder = options.folder or files.cache_folder() / "distil"
    torch.set_num_threads(1)
    if options.step == "train":
        if not options.runs or not set(options.runs) <= set(RUNS):
            parser.error(f"train needs some of {', '.join(RUNS)}; got {' '.join(options.runs) or 'none'}")
        limits = {"epochs": options.epochs, "minutes": options.minutes}
        for name in options.runs:
            train(folder, name, {key: value for key, value in limits.items() if value is not None})
    elif options.step == "generate":
        generate(folder, options.worker, options.workers, options.minutes or ANSWER_MINUTES)
    elif options.step == "ship":
        ship(folder)
    else:
        run_all(folder, options.minutes or ANSWER_MINUTES)
    return 0


if __name__ == "__main__":
    sys.exit(main())
