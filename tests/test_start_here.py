"""Notebook 00 on machines where the lowest rungs are slow, fail or are not there: it ends well and says why."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import nbformat
import pytest

from every_millisecond import ladder, request
from every_millisecond.ladder.record import FAILED, MEASURED, STAGES, UNAVAILABLE
from every_millisecond.ladder.rungs import rung

ROOT = Path(__file__).resolve().parents[1]
CELLS = {cell.id: cell.source for cell in nbformat.read(ROOT / "notebooks/00_start_here.ipynb", as_version=4).cells}
NAMES = ("no-cache", "kv-cache")


def record(name: str, status: str, ms: float = 0.0, reason: str = ""):
    samples = {stage: [ms] for stage in (*STAGES, "total", "wall")} if status == MEASURED else {}
    return rung(name).record(status, reason=reason, samples_ms=samples, ids=[1, 2, 3], new_tokens=4)


@pytest.fixture
def end_of_00(monkeypatch, capsys):
    """Runs the notebook's cells from the bar to the two rungs on a machine with a given prefill and given records."""

    def play(prefill_ms: float, *records) -> tuple[str, list[int]]:
        wanted = []

        def run_ladder(folder, *, names, new_tokens, **options):
            wanted.append(new_tokens)
            return {"rungs": [asdict(found) for found in records], "baseline": "kv-cache"}

        monkeypatch.setattr(ladder, "run_ladder", run_ladder)
        scope: dict = {}
        exec(CELLS["imports"], scope)
        scope["today"] = scope["bar"].Bar("kv-cache", "KV cache", dict.fromkeys(STAGES, prefill_ms), 1.0, 2.0)
        for name in ("fewer-tokens", "ladder", "two-rungs"):
            exec(CELLS[name], scope)
        return capsys.readouterr().out, wanted

    return play


@pytest.mark.parametrize(
    ("prefill_ms", "tokens", "words"),
    [(150.0, request.NEW_TOKENS, "both rungs write all 50"), (1_300.0, 7, "write 7 tokens instead of 50"),
     (60_000.0, 4, "write 4 tokens instead of 50")],
)  # fmt: skip
def test_a_slow_machine_writes_fewer_tokens_and_says_so(end_of_00, prefill_ms, tokens, words):
    """Fifty passes over the whole text held up a newcomer for minutes, and then the rung was given up."""
    said, wanted = end_of_00(prefill_ms, *(record(name, MEASURED, prefill_ms) for name in NAMES))
    assert wanted == [tokens] and words in said and "choose the same tokens: True" in said


@pytest.mark.parametrize(
    ("records", "words"),
    [
        ((record("no-cache", FAILED, reason="no answer within 600 s"), record("kv-cache", MEASURED, 9.0)),
         "not finished here: no answer within 600 s"),
        ((record("no-cache", UNAVAILABLE, reason="its prefill would take about 99 s here"),
          record("kv-cache", FAILED, reason="killed")), "not available here: its prefill would take about 99 s"),
    ],
)  # fmt: skip
def test_a_rung_that_does_not_finish_says_why(end_of_00, records, words):
    """Notebook 00 ended with `KeyError: rung 'no-cache' has no samples of 'wall'`: the first thing that one saw."""
    said, _ = end_of_00(380.0, *records)
    assert words in said and "no figure: a rung did not finish" in said
