"""A reader's guesses and passed exercises, written one after another into the files that keep them."""

from __future__ import annotations

import json
import os
from pathlib import Path

from every_millisecond.checks import progress
from every_millisecond.notebook import scorecard

KEYS = ("00-first", "01-second", "02-third")


def main(folder: Path) -> None:
    os.environ["LLM_LATENCY_SCORECARD"] = str(folder / "scorecard.json")
    os.environ["LLM_LATENCY_PROGRESS"] = str(folder / "progress.json")
    for key in KEYS:
        scorecard.guess(key, 2, "times", "How many times?")
        scorecard.measured(key, 3)
        progress.record("01_correct_timing", key)
    assert list(json.loads((folder / "scorecard.json").read_text())) == list(KEYS)
    assert set(progress.passed()["01_correct_timing"]) == set(KEYS)
