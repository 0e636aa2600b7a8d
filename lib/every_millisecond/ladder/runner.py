"""Runs the ladder: each rung in fresh processes, order alternated between rounds, everything kept as JSON."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from every_millisecond.ladder.prediction import add_predictions
from every_millisecond.ladder.record import FAILED, FINISHED, RungRecord
from every_millisecond.ladder.resume import alone, fingerprint, take
from every_millisecond.ladder.rungs import BASELINE, Rung, choose
from every_millisecond.processes import Worker, WorkerFailed, ended_by_sigterm
from every_millisecond.request import NEW_TOKENS, PROMPT_TOKENS, standard_prompt
from llm_latency import files, hardware, models, roofline

BUDGET_S = 4.0  # seconds of measured answers in one process
# Until a rung's process is heard of for the first time, which loads a model and may fetch it; and between two signs of
# life afterwards, each at most one answer or one compilation apart, on a machine of the usual speed.
LOAD_LIMIT_S, STEP_LIMIT_S = 1800.0, 600.0


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

    Each round starts one process per rung of the path, the second round in reverse order, so that a machine that warms
    up or slows down does so for all. A rung beside the path runs in one process, with the time of all rounds. A rung
    that fails is recorded with its error and the others go on. `progress` is called before each process with the
    rung's title, the number done and the number in all.

    What a finished process measured stands in `folder` at once: called again with the same folder, model, machine,
    versions and options, the run continues where it was interrupted.

    Raises ValueError for counts below 1, an unknown rung or profile, a model that the ladder cannot serve, and a folder
    that holds another run or in which one is being measured; OSError for a folder that cannot be written.
    """
    options = dict(rounds=rounds, warmup=warmup, repeats=repeats, budget_s=budget_s, new_tokens=new_tokens)
    wanted = settings_of(names, profile, **options)
    rungs, profile = choose(names), wanted["profile"]
    folder.mkdir(parents=True, exist_ok=True)
    with alone(folder), ended_by_sigterm():
        take(folder, wanted)
        ceilings = hardware.ceilings()
        records = _measure(rungs, profile, folder, progress, **options)
    ordered = [records[entry.name] for entry in rungs]
    add_predictions([record for record in ordered if record.measured], profile, ceilings)
    run = {
        "date": datetime.date.today().isoformat(),
        "profile": profile,
        "machine": hardware.machine_facts(),
        "ceilings": asdict(ceilings),
        "settings": options,
        "baseline": BASELINE,
        "rungs": [asdict(record) for record in ordered],
    }
    files.write_atomically(folder / FINISHED, json.dumps(run, indent=1))
    return run


def _measure(
    rungs: list[Rung],
    profile: str,
    folder: Path,
    progress: Callable[[str, int, int], None],
    *,
    rounds: int,
    warmup: int,
    repeats: int,
    budget_s: float,
    new_tokens: int,
) -> dict[str, RungRecord]:
    """One record per rung: the samples of all its processes."""
    records: dict[str, RungRecord] = {}
    steps = plan(rungs, rounds)
    for done, (i, entry) in enumerate(steps):
        known = records.get(entry.name)
        if known and not known.measured:
            continue  # it failed or is unavailable: once is enough
        progress(entry.title, done, len(steps))
        share = 1 if entry.on_path or entry.name == BASELINE else rounds  # of the rounds that this process stands for
        record = _run_one(
            entry, profile, i, folder,
            slowness=records[BASELINE].slowness if BASELINE in records else 1.0, quality=known is None,
            warmup=warmup, repeats=share * repeats, budget_s=share * budget_s, new_tokens=new_tokens,
        )  # fmt: skip
        if known and record.measured:
            known.extend(record)
        elif known:
            known.status, known.reason = record.status, record.reason
        else:
            records[entry.name] = record
    progress("done", len(steps), len(steps))
    return records


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
    """What makes a run the same run, checked: see `fingerprint`. Raises ValueError as `run_ladder` does."""
    for name, value in (("rounds", rounds), ("repeats", repeats), ("new_tokens", new_tokens)):
        least = 2 if name == "new_tokens" else 1
        if value < least:
            raise ValueError(f"{name}={value}; expected at least {least}")
    if warmup < 0:
        raise ValueError(f"warmup={warmup}; expected 0 or more")
    options = dict(rounds=rounds, warmup=warmup, repeats=repeats, budget_s=budget_s, new_tokens=new_tokens)
    chosen = [entry.name for entry in choose(names)]
    return fingerprint(check_model(profile, new_tokens), options | {"rungs": chosen})


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
    beside the path take turns: each runs in one round.
    """
    beside = [entry.name for entry in rungs if not entry.on_path and entry.name != BASELINE]
    own_round = {name: position % rounds for position, name in enumerate(beside)}
    steps = []
    for i in range(rounds):
        order = sorted(rungs, key=lambda entry: entry.name != BASELINE) if i == 0 else rungs[:: -1 if i % 2 else 1]
        steps += [(i, entry) for entry in order if own_round.get(entry.name, i) == i]
    return steps


def _run_one(
    entry: Rung, profile: str, i: int, folder: Path, *, slowness: float, quality: bool, **counts: float
) -> RungRecord:
    """What round i's process measured of a rung, now or before the run was interrupted; or why it did not."""
    out = folder / f"{entry.name}.{i}.json"
    if out.exists():
        finished = RungRecord.read(out)
        if finished.measured:  # what was not there may have been installed since
            return finished
    options = dict(name=entry.name, profile=profile, folder=str(folder), slowness=slowness, with_quality=quality)
    try:
        with Worker("every_millisecond.ladder.worker", [json.dumps(options | counts)]) as worker:
            said = worker.read(LOAD_LIMIT_S)
            while "record" not in said:  # else it has got on: so far, and on so slow a machine
                slowness = max(slowness, said["slowness"])
                said = worker.read(STEP_LIMIT_S * slowness)
    except WorkerFailed as error:
        return entry.record(FAILED, reason=str(error))  # not kept on disk: a run that is continued tries again
    record = RungRecord(**said["record"])
    record.write(out)
    return record
