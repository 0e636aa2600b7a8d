"""The soak's dealing of seeds: what it promises to try, it tries, and what it cuts short it says."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def soak(monkeypatch):
    spec = importlib.util.spec_from_file_location("soak", ROOT / "tools" / "soak.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    names = ["unsolved", "the solution", "another right answer", "a mistake"]
    monkeypatch.setattr(module, "cases", lambda exercise: [(name, None, {}, name) for name in names])
    return module


def met_by(soak, monkeypatch, run=lambda name, seed: None, **options):
    """(seeds that each case met, what `soak` returns) for twelve seeds."""
    met: dict[str, list[int]] = {}

    def check_of(exercise, answers, folder):
        def check(seed):
            met.setdefault(folder, []).append(seed)
            run(folder, seed)

        return check

    monkeypatch.setattr(soak.exercise_sets, "check_of", check_of)
    return met, soak.soak(SimpleNamespace(check="check_x"), 12, **options)


def test_the_solution_meets_every_seed_and_each_seed_one_other_case(soak, monkeypatch):
    met, (cases, runs, short, faults) = met_by(soak, monkeypatch)
    assert met.pop("the solution") == list(range(12))
    assert sorted(seed for seeds in met.values() for seed in seeds) == list(range(12))
    assert {len(seeds) for seeds in met.values()} == {4}
    assert (cases, runs, short, faults) == (4, 24, 0, [])
    met, (_, runs, _, _) = met_by(soak, monkeypatch, every=True)
    assert runs == 48 and {len(seeds) for seeds in met.values()} == {12}


def test_a_slow_case_is_cut_short_and_counted(soak, monkeypatch):
    """Guards against a slow run in the middle, a busy minute's, that ends a case without a word."""
    now = [0.0]
    monkeypatch.setattr(soak, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def run(name, seed):
        busy = name == "the solution" and seed == 7
        now[0] += 2 * soak.SLOW_S * (name == "a mistake" or busy)

    _, (_, runs, short, _) = met_by(soak, monkeypatch, run)
    assert (runs, short) == (12 + 4 + 4 + soak.SLOW_SEEDS, 1)


def test_a_fault_names_its_case_and_seed(soak, monkeypatch):
    def run(name, seed):
        if name == "the solution" and seed == 7:
            raise ArithmeticError("by chance")

    *_, faults = met_by(soak, monkeypatch, run)[1]
    assert faults == ["check_x: the solution: 1 of 12 seeds, the first 7: the check broke: ArithmeticError: by chance"]
