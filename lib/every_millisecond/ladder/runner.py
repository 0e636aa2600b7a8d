"""Runs the ladder: each rung in fresh processes, order alternated between rounds, everything kept as JSON."""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from every_millisecond.ladder import prediction, resume
from every_millisecond.ladder.record import RungRecord
from every_millisecond.ladder.rungs import BASELINE, Rung, choose
from every_millisecond.openmp import process_environment
from every_millisecond.request import NEW_TOKENS, PROMPT_TOKENS, standard_prompt
from llm_latency import files, hardware, models, roofline

BUDGET_S = 4.0  # seconds of measured answers in one process


def run_ladder(
    folder: Path,
    *,
    names: list[str] | None = None,
    profile: str | None = None,
    rounds: int = 2,
    warmup: int = 2,
    repeats: int = 5,
    budget_s: float = BUDGET_S,
    new_tokens: int = NEW_TOKENS,
    progress: Callable[[str, int, int], None] = lambda title, done, of: None,
) -> dict:
    """Measure the ladder's rungs and return the run as a dictionary, also written to `folder`/ladder.json.

    Each round starts one process per rung of the way, the second round in reverse order, so that a machine that warms
    up or slows down does so for all. A rung beside the way runs in one process, with the time of all rounds. A rung
    that fails is recorded with its error and the others go on. `progress` is called before each process with the
    rung's title, the number done and the number in all.

    What a finished process measured stands in `folder` at once: called again with the same folder, model, machine,
    versions and options, the run continues where it was interrupted.

    Raises ValueError for counts below 1, an unknown rung or profile, a model that the ladder cannot serve, and a folder
    that holds another run; OSError for a folder that cannot be written.
    """
    options = dict(rounds=rounds, warmup=warmup, repeats=repeats, budget_s=budget_s, new_tokens=new_tokens)
    wanted = settings_of(names, profile, **options)
    rungs, profile = choose(names), wanted["profile"]
    folder.mkdir(parents=True, exist_ok=True)
    resume.take(folder, wanted)
    ceilings = hardware.ceilings()

    records: dict[str, RungRecord] = {}
    steps = plan(rungs, rounds)
    for done, (i, entry) in enumerate(steps):
        known = records.get(entry.name)
        if known and known.status != "measured":
            continue  # it failed or is unavailable: once is enough
        progress(entry.title, done, len(steps))
        share = 1 if entry.on_path or entry.name == BASELINE else rounds  # of the rounds that this process stands for
        record = _run_one(
            entry, profile, i, folder,
            warmup=warmup, repeats=share * repeats, budget_s=share * budget_s, new_tokens=new_tokens,
            quality=known is None,
        )  # fmt: skip
        if known and record.status == "measured":
            known.extend(record)
        elif known:
            known.status, known.reason = record.status, record.reason
        else:
            records[entry.name] = record
    progress("done", len(steps), len(steps))

    ordered = [records[entry.name] for entry in rungs]
    prediction.add_all([record for record in ordered if record.status == "measured"], profile, ceilings)
    run = {
        "date": datetime.date.today().isoformat(),
        "profile": profile,
        "machine": hardware.machine_facts(),
        "ceilings": asdict(ceilings),
        "settings": options,
        "baseline": BASELINE,
        "rungs": [asdict(record) for record in ordered],
    }
    files.write_atomically(folder / resume.FINISHED, json.dumps(run, indent=1))
    return run


def settings_of(
    names: list[str] | None,
    profile: str | None,
    *,
    rounds: int,
    warmup: int,
    repeats: int,
    new_tokens: int,
    budget_s: float = BUDGET_S,
) -> dict:
    """What makes a run the same run, checked: see `resume.fingerprint`. Raises ValueError as `run_ladder` does."""
    for name, value in (("rounds", rounds), ("repeats", repeats), ("new_tokens", new_tokens)):
        least = 2 if name == "new_tokens" else 1
        if value < least:
            raise ValueError(f"{name}={value}; expected at least {least}")
    if warmup < 0:
        raise ValueError(f"warmup={warmup}; expected 0 or more")
    options = dict(rounds=rounds, warmup=warmup, repeats=repeats, budget_s=budget_s, new_tokens=new_tokens)
    chosen = [entry.name for entry in choose(names)]
    return resume.fingerprint(check_model(profile, new_tokens), options | {"rungs": chosen})


def check_model(profile: str | None, new_tokens: int = NEW_TOKENS) -> str:
    """The profile's name, or the folder, if the ladder can serve it; told now, not after each rung has failed on it.

    Raises ValueError for an unknown profile, a folder without a model, weights that are no safetensors, another
    architecture than Llama's, Qwen2's or Mistral's, a tokenizer without a chat template, or too few positions.
    """
    if profile is None or not Path(profile).is_dir():
        profile = models.choose_profile(profile)[0].name
    try:
        config = models.load_config(profile)
        roofline.shape_of(config)
    except OSError as error:
        raise ValueError(f"{profile} holds no model that transformers can read: {error}") from error
    except ValueError as error:
        raise ValueError(f"{profile}: {error}") from error
    if Path(profile).is_dir() and not list(Path(profile).glob("*.safetensors")):
        raise ValueError(f"{profile} holds no .safetensors file; the course loads no pickles, so convert the weights")
    if config.max_position_embeddings < PROMPT_TOKENS + new_tokens:
        raise ValueError(
            f"{PROMPT_TOKENS} tokens and {new_tokens} new ones do not fit the {config.max_position_embeddings} "
            f"positions of {profile}"
        )
    try:
        standard_prompt(models.load_tokenizer(profile))
    except (ValueError, OSError, AttributeError) as error:
        raise ValueError(f"the tokenizer of {profile} cannot make the standard request: {error}") from error
    return profile


def plan(rungs: list[Rung], rounds: int) -> list[tuple[int, Rung]]:
    """(round, rung) in the order in which the processes run.

    The baseline leads the first round, because it writes the choices that the others' quality is compared with. Rungs
    beside the way take turns: each runs in one round.
    """
    beside = [entry.name for entry in rungs if not entry.on_path and entry.name != BASELINE]
    own_round = {name: position % rounds for position, name in enumerate(beside)}
    steps = []
    for i in range(rounds):
        order = sorted(rungs, key=lambda entry: entry.name != BASELINE) if i == 0 else rungs[:: -1 if i % 2 else 1]
        steps += [(i, entry) for entry in order if own_round.get(entry.name, i) == i]
    return steps


def _run_one(
    entry: Rung,
    profile: str,
    i: int,
    folder: Path,
    *,
    warmup: int,
    repeats: int,
    budget_s: float,
    new_tokens: int = NEW_TOKENS,
    quality: bool = True,
) -> RungRecord:
    out = folder / f"{entry.name}.{i}.json"
    if out.exists():
        finished = RungRecord.read(out)
        if finished.status == "measured":  # what was not there may have been installed since
            return finished
    command = [sys.executable, "-m", "every_millisecond.ladder.worker", "--rung", entry.name, "--profile", profile]
    command += ["--warmup", str(warmup), "--repeats", str(repeats), "--budget", str(budget_s)]
    command += ["--new-tokens", str(new_tokens), "--folder", str(folder), "--out", str(out)]
    result = subprocess.run(
        command + (["--quality"] if quality else []),
        env=os.environ | process_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode == 0 and out.exists():
        return RungRecord.read(out)
    lines = result.stderr.strip().splitlines() or [f"the process ended with code {result.returncode} and no message"]
    # A failure is not kept on disk: when the run is continued, the rung is tried again.
    return RungRecord(entry.name, entry.title, entry.notebook, "failed", reason=lines[-1], on_path=entry.on_path)


def finished_parts(folder: Path) -> int:
    """How many processes of an interrupted run have left their measurements in `folder`."""
    return len([path for path in folder.glob("*.json") if path.name.rsplit(".", 2)[-2].isdigit()])


def load_run(path: Path) -> dict:
    """A run written by `run_ladder`: the file itself or its folder. Raises ValueError if there is none."""
    path = path / resume.FINISHED if path.is_dir() else path
    run = files.read_json(path, default=None)
    if run is None:
        raise ValueError(f"no run at {path}; measure one with `llm-latency run`")
    return run


def newest_run(folder: Path, needed: tuple[str, ...] = ()) -> tuple[Path, dict]:
    """The newest recorded ladder of a results folder in which all `needed` rungs were measured: its path, and the run.

    Of one day's, the one with the most rungs. Raises ValueError if there is none.
    """
    found = []
    for path in folder.glob("*ladder*.json"):
        run = load_run(path)
        measured = {entry["name"] for entry in run["rungs"] if entry["status"] == "measured"}
        if {run["baseline"], *needed} <= measured:
            found.append((run["date"], len(measured), path.name, path, run))
    if not found:
        wanted = f" with the rungs {', '.join(needed)}" if needed else ""
        raise ValueError(f"no recorded ladder{wanted} in {folder}; `make run` measures one")
    *_, path, run = max(found, key=lambda entry: entry[:3])
    return path, run


def records_of(run: dict) -> list[RungRecord]:
    """The rungs of a run as records."""
    return [RungRecord(**entry) for entry in run["rungs"]]
