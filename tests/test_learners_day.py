"""A learner's day: a full disk, a clock set back, leftovers of a killed process, a notebook opened elsewhere.

Kills at any moment are in test_interrupted.py, broken and read-only caches in test_files.py, test_hardware.py and
test_models.py.
"""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import nbformat
import pytest

from every_millisecond.notebook import scorecard
from llm_latency import files
from llm_latency.timing import LatencyTimer

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def card(monkeypatch, tmp_path):
    monkeypatch.setenv("LLM_LATENCY_SCORECARD", str(tmp_path / "card.json"))
    scorecard.guess("00-answer", 3.0, "s", "How long?")
    return tmp_path / "card.json"


@pytest.mark.skipif(os.name != "posix", reason="limits of a file's size are POSIX's")
def test_a_full_disk_loses_no_guess(card):
    """The card as it was before must survive a write that finds no room, and no part of a new one may stay. A limit of
    the file's size stands for the full disk: the system writes what fits and refuses the rest."""
    import resource

    before = card.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20, hard))
    try:
        with pytest.raises(OSError, match="too large"):
            scorecard.measured("00-answer", 2.4)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert card.read_bytes() == before
    assert [path.name for path in card.parent.iterdir() if path.name.startswith(f".{card.name}.")] == []
    scorecard.measured("00-answer", 2.4)


def test_what_a_killed_writer_left_goes_after_a_day(tmp_path):
    """Unfinished files gathered in the cache for ever; a neighbour that is writing now must not lose its own."""
    path = tmp_path / "card[1].json"  # brackets are no pattern
    names = {
        "old": f".{path.name}.{'0' * 16}",
        "young": f".{path.name}.{'1' * 16}",
        "future": f".{path.name}.{'2' * 16}",
    }
    other = tmp_path / f".another.json.{'0' * 16}"
    for name in (*names.values(), other.name, f".{path.name}.notes"):
        (tmp_path / name).write_text("part")
    now = time.time()
    for name, age in (("old", 2 * files.LEFTOVER_S), ("young", 60), ("future", -2 * files.LEFTOVER_S)):
        os.utime(tmp_path / names[name], (now - age, now - age))
    os.utime(other, (now - 2 * files.LEFTOVER_S,) * 2)
    files.write_atomically(path, "whole")
    left = {entry.name for entry in tmp_path.iterdir()}
    assert left == {path.name, names["young"], names["future"], other.name, f".{path.name}.notes"}


def test_a_clock_set_back_changes_no_time(monkeypatch):
    """Durations come from a clock that only goes forward: the time of day may be corrected meanwhile."""
    days = iter(range(10**6, 0, -86400))
    monkeypatch.setattr(time, "time", lambda: float(next(days)))
    timer = LatencyTimer(device="cpu")
    with timer.stage("work"):
        sum(range(1000))
    assert 0 < timer.get_elapsed_ms("work") < 60_000


@pytest.mark.parametrize("path", sorted(ROOT.glob("notebooks/*.ipynb")), ids=lambda path: path.stem)
def test_a_notebook_does_not_care_where_it_was_opened(path):
    """JupyterLab started in another folder, or a read-only checkout: no cell reads or writes beside the notebook."""
    for cell in nbformat.read(path, as_version=4).cells:
        if cell.cell_type == "code":
            found = re.findall(
                r"""["']\.{1,2}/[^"']*["']|(?<![.\w])open\(|\.write_text\(|\.savefig\(|\bos\.chdir""", cell.source
            )
            assert found == [], f"cell {cell.id}"
