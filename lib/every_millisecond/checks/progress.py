"""Which checks a learner has passed: a small JSON file in the cache folder, on this machine only."""

from __future__ import annotations

import datetime
import json
import os
from pathlib import Path

from llm_latency import files


def _path() -> Path:
    """LLM_LATENCY_PROGRESS lets tests and classes keep it elsewhere."""
    chosen = os.environ.get("LLM_LATENCY_PROGRESS")
    return Path(chosen) if chosen else files.cache_folder() / "progress.json"


def passed() -> dict[str, dict[str, str]]:
    """Chapter -> name of the check -> the day it first passed. ValueError names a file that is broken."""
    return files.read_json(_path(), default={})


def record(chapter: str, check: str) -> None:
    """Note that a check passed. Where nothing can be written (a grading container) it has passed all the same."""
    try:
        days = passed()
        if check not in days.setdefault(chapter, {}):
            days[chapter][check] = datetime.date.today().isoformat()
            files.write_atomically(_path(), json.dumps(days, indent=1))
    except (OSError, RuntimeError, ValueError):
        pass


def report(exercises: dict[str, dict[str, str]]) -> list[str]:
    """Lines for the terminal. exercises: chapter -> name of the check -> title, as `exercise.registered` gives them."""
    days, lines, total = passed(), [], 0
    for chapter, checks in exercises.items():
        done = days.get(chapter, {})
        count = sum(name in done for name in checks)
        total += count
        lines.append(f"{chapter}: {count} of {len(checks)}")
        lines += [f"  [{'x' if name in done else ' '}] {title}" for name, title in checks.items()]
    return [*lines, f"{total} of {sum(map(len, exercises.values()))} checks passed"]
