# ruff: noqa: E501
"""What is shipped, and the model card: every figure in it comes from the run's own records."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

LICENCE = "Apache-2.0"
TARGET = "SmolLM2-135M-Instruct"


def ship(source: Path, into: Path, facts: dict) -> int:
    """Write a trained draft's own layers in BF16, with its `head_ids` and what it is; return the file's bytes."""
    tensors: dict[str, Tensor] = load_file(source)
    stored = {k: v.contiguous() if k == "head_ids" else v.bfloat16().contiguous() for k, v in tensors.items()}
    into.parent.mkdir(parents=True, exist_ok=True)
    about = {
        "layers": str(facts["layers"]),
        "kind": facts["kind"],
        "target": TARGET,
        "licence": LICENCE,
        "derived_from": f"the layers of {TARGET} (Hugging Face TB, {LICENCE})",
    }
    save_file(stored, into, metadata=about)
    into.chmod(0o644)
    return into.stat().st_size


def percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}%"


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def card(data: dict, runs: list[dict], shipped: dict[str, str], sizes: dict[str, int]) -> str:
    """The model card as Markdown.

    data: facts of the generation. runs: the record of each training run. shipped: kind -> name of the run that ships.
    sizes: kind -> bytes of the shipped file.
    """
    by_name = {run["name"]: run for run in runs}
    rows = []
    for run in runs:
        greedy, sampled = run["final"]["greedy"], run["final"]["sampled"]
        rows.append(
            [
                f"**{run['name']}**" if run["name"] in shipped.values() else run["name"],
                f"{run['parameters'] / 1e6:.1f} M",
                f"{run['seen_tokens'] / 1e3:.0f}k",
                f"{run['seconds'] / 60:.0f} min",
                *(percent(greedy["acceptance"][g]) for g in ("1", "2", "3", "4")),
                f"{greedy['tokens_per_cycle']['4']:.2f}",
                percent(sampled["acceptance"]["4"]),
                " / ".join(
                    percent(run[head]["greedy"]["acceptance"]["1"])
                    for head in ("same_texts_restricted_head", "full_head")
                ),
            ]
        )
    header = ["draft", "own parameters", "tokens seen", "CPU time"]
    header += [f"greedy, γ {g}" for g in (1, 2, 3, 4)] + [
        "tokens per cycle, γ 4",
        "sampled, γ 4",
        "restricted / full head",
    ]
    acceptance = table(header, rows)

    positions = table(
        ["draft", "text", "1st", "2nd", "3rd", "4th"],
        [
            [run["name"], label, *(percent(value) for value in run["final"][label]["by_position"])]
            for run in runs
            for label in ("greedy", "sampled")
        ],
    )
    kinds = sorted({kind for run in runs for kind in run["final"]["greedy"]["by_kind"]["1"]})
    by_kind = table(
        ["draft", *kinds],
        [[run["name"], *(percent(run["final"]["greedy"]["by_kind"]["1"].get(k)) for k in kinds)] for run in runs],
    )
    shares = ["1/8", "1/4", "1/2", "3/4", "all"]
    curve = table(
        ["draft", *shares],
        [
            [run["name"], *(f"{percent(p['acceptance'])} ({p['tokens'] / 1e3:.0f}k)" for p in run["curve"])]
            for run in runs
        ],
    )
    files = "\n".join(
        f"- `{kind}.safetensors`, {sizes[kind] / 1e6:.1f} MB: {by_name[name]['parameters'] / 1e6:.2f} million parameters "
        f"in BF16 ({_what(by_name[name])}) and the {by_name[name]['head']} token ids it can name."
        for kind, name in shipped.items()
    )
    goals = []
    for kind, goal in (("plain", 0.55), ("conditioned", 0.65)):
        found = by_name[shipped[kind]]["final"]["greedy"]["by_kind"]["1"]["exercise"]
        verdict = "reached" if found >= goal else "**missed**"
        goals.append(f"{kind} {percent(found)} against a goal of {percent(goal)}, {verdict}")
    if len({run["options"]["batch"] for run in runs}) > 1:
        raise ValueError("runs of different batch sizes; the card states one for all")
    any_run = runs[0]
    passes = ", ".join(f"{run['name']} {run['seen_tokens'] / data['train_tokens']:.1f}" for run in runs)
    cut = [run for run in runs if run["options"]["minutes"]]
    if cut:
        passes += "; ended by the clock: " + ", ".join(
            f"{run['name']} after {run['options']['minutes']:g} minutes" for run in cut
        )
    return f"""# The shipped drafts for SmolLM2-135M-Instruct

<!-- Written by tools/distil_draft.py from the records of its run. Do not edit: run it again. -->

Two small models that guess tokens for the course's default target in speculative decoding (notebook 10). They are of no
use alone. What they guess changes how fast the target answers, never what it answers.

{files}

Embedding and head are the target's own, frozen, and not stored. `llm_latency.models.load_draft()` puts the plain draft
together as an ordinary `LlamaForCausalLM`; `llm_latency.speculative.feature_layer.load_feature_layer()` returns the
conditioned one, a `FeatureLayer` after EAGLE (arXiv 2401.15077).

**Licence: {LICENCE}**, as the model they derive from: their layers began as layers of {TARGET} by Hugging Face TB
({LICENCE}), and they learned from its answers alone. No other text was used.

## Data

{data["train_answers"]} answers of the target with {data["train_tokens"]} tokens (up to {data["new_tokens"]} each), half
of them greedy, half sampled at temperature 1, to questions built from templates about programming exercises, pieces of
code and general chat, in the target's chat template. Held out: {data["held_out_answers"]} answers with
{data["held_out_tokens"]} tokens to questions about other topics; no topic and no code stands on both sides, and the
course's standard request is among those held out. Seed {data["seed"]}. {data["timed"]} of
{data["chunks"]} chunks of answers were timed: {data["minutes"]:.0f} minutes of CPU time (one process a core, FP32).

## Acceptance on the held-out answers

Accepted over proposed draft tokens, against the FP32 target; "greedy" on its greedy answers, "sampled" on its answers
at temperature 1. With γ 1 that is the chance that a single guess is right, the α of Leviathan et al. (arXiv 2211.17192);
with a longer draft every token behind a refused one counts as refused, so the share falls though the guesses are as
good. Shipped drafts in bold. Goals for α on held-out exercises, greedy: {"; ".join(goals)}.

The head holds {any_run["head"]} of the target's 49152 tokens, the most frequent ones of the training answers, which cover
{percent(any_run["coverage"])} of them. "Restricted / full head" compares the greedy acceptance at γ 1 with this head and with all
tokens, on the first chunk of held-out answers.

{acceptance}

How often each token of a draft of four is accepted, if those before it were:

{positions}

Greedy acceptance of a single guess (γ 1) by kind of question:

{by_kind}

## By training length

Greedy acceptance of a single guess along each run on the first chunk of held-out answers, with the answer tokens seen until then,
repetitions included. One run with one cosine schedule: the early points would be better had the schedule ended there.

{curve}

## Training

Forward KL from the target's distribution over the restricted head at every answer token. A plain draft starts as the
target's first layers with `o_proj` and `down_proj` damped, the conditioned one as a least-squares guess at the next
feature under the target's last layer with those two at zero. Muon for matrices, AdamW for norms, cosine schedule, batches of
{any_run["options"]["batch"]} answers, seed {any_run["options"]["seed"]}; passes over the data: {passes}. The conditioned draft
adds the error of the predicted feature, and in the later part of its training reads its own predictions for
{max(run["options"]["steps"] for run in runs)} steps. Every stage is seeded; another processor or another version of PyTorch rounds
otherwise, so weights and figures come out close, not equal. Learning rate, batch and start were chosen in trials on the
first chunk of the held-out answers, a quarter of them.

## Limits

- English, short answers, this target only. Acceptance is lower on subjects unlike the training questions, and at high
  temperature.
- A token outside the restricted head is never drafted, only supplied by the target.
- Trained on texts of some {data["longest"]} tokens at most: longer ones are drafted for, but were not tested here.
"""


def _what(run: dict) -> str:
    layers = run["layers"]
    if run["kind"] == "plain":
        return f"{layers} Llama layer{'s' if layers > 1 else ''} and a norm"
    return "one layer, the matrix that joins embedding and feature, and norms"


def parameter_count(tensors: dict[str, torch.Tensor]) -> int:
    """Trained numbers: everything but the ids."""
    return sum(t.numel() for name, t in tensors.items() if name != "head_ids")
