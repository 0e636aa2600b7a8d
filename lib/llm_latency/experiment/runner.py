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

from llm_latency import files, hardware, models
from llm_latency.experiment import prediction
from llm_latency.experiment.record import RungRecord
from llm_latency.experiment.rungs import BASELINE, Rung, choose
from llm_latency.openmp import process_environment


def run_ladder(
    folder: Path,
    *,
    names: list[str] | None = None,
    profile: str | None = None,
    rounds: int = 2,
    warmup: int = 3,
    repeats: int = 5,
    budget_s: float = 20.0,
    progress: Callable[[str, int, int], None] = lambda title, done, of: None,
) -> dict:
    """Measure the ladder's rungs and return the run as a dictionary, also written to `folder`/ladder.json.

    Each round starts one process per rung, the second round in reverse order, so that a machine that warms up or slows
    down does so for all. A rung that fails is recorded with its error and the others go on. `progress` is called
    before each process with the rung's title, the number done and the number in all.

    Raises ValueError for counts below 1, an unknown rung or an unknown profile, and OSError for a folder that cannot be
    written.
    """
    for name, value in (("rounds", rounds), ("repeats", repeats)):
        if value < 1:
            raise ValueError(f"{name}={value}; expected at least 1")
    if warmup < 0:
        raise ValueError(f"warmup={warmup}; expected 0 or more")
    rungs = choose(names)
    if profile is None or not Path(profile).is_dir():
        profile = models.choose_profile(profile)[0].name
    models.load_config(profile)  # a folder without a model is told now, not after each rung has failed on it
    folder.mkdir(parents=True, exist_ok=True)
    ceilings = hardware.ceilings()

    records: dict[str, RungRecord] = {}
    # The baseline leads the first round, because it writes the choices that the others' quality is compared with.
    first = sorted(rungs, key=lambda entry: entry.name != BASELINE)
    steps = [(i, entry) for i in range(rounds) for entry in (first if i == 0 else rungs[:: -1 if i % 2 else 1])]
    for done, (i, entry) in enumerate(steps):
        known = records.get(entry.name)
        if known and known.status != "measured":
            continue  # it failed or is unavailable: once is enough
        progress(entry.title, done, len(steps))
        record = _run_one(entry, profile, i, folder, warmup=warmup, repeats=repeats, budget_s=budget_s)
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
        "settings": {"rounds": rounds, "warmup": warmup, "repeats": repeats, "budget_s": budget_s},
        "baseline": BASELINE,
        "rungs": [asdict(record) for record in ordered],
    }
    files.write_atomically(folder / "ladder.json", json.dumps(run, indent=1))
    return run


def _run_one(
    entry: Rung, profile: str, i: int, folder: Path, *, warmup: int, repeats: int, budget_s: float
) -> RungRecord:
    out = folder / f"{entry.name}.{i}.json"
    out.unlink(missing_ok=True)
    command = [sys.executable, "-m", "llm_latency.experiment.worker", "--rung", entry.name, "--profile", profile]
    command += ["--warmup", str(warmup), "--repeats", str(repeats), "--budget", str(budget_s)]
    command += ["--folder", str(folder), "--out", str(out)] + (["--quality"] if i == 0 else [])
    result = subprocess.run(
        command, env=os.environ | process_environment(), capture_output=True, text=True, check=False
    )
    if result.returncode == 0 and out.exists():
        return RungRecord.read(out)
    lines = result.stderr.strip().splitlines() or [f"the process ended with code {result.returncode} and no message"]
    return RungRecord(entry.name, entry.title, entry.notebook, "failed", reason=lines[-1])


def load_run(path: Path) -> dict:
    """A run written by `run_ladder`: the file itself or its folder. Raises ValueError if there is none."""
    path = path / "ladder.json" if path.is_dir() else path
    run = files.read_json(path, default=None)
    if run is None:
        raise ValueError(f"no run at {path}; measure one with `llm-latency run`")
    return run


def records_of(run: dict) -> list[RungRecord]:
    """The rungs of a run as records."""
    return [RungRecord(**entry) for entry in run["rungs"]]
