"""Run every exercise's cases over many seeds: no verdict and no diagnosis may depend on the draw.

    python tools/soak.py                          # 2,000 seeds
    python tools/soak.py --seeds 100 01 bug_zoo   # fewer, of some sets
    python tools/soak.py --all 04                 # every case under every seed: days for all sets

Unsolved, each must fail as such; the solution and the other right answers of tests/exercise_cases pass; each planted
mistake fails with its name. The solution meets every seed. Each seed also meets one of the other cases, in turn, so
that an exercise of forty cases meets each of them fifty times in 2,000 seeds. Prints a table, and below a set's line
each case that went wrong with its first seed; ends with 1 if any did.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import exercise_sets
from exercise_sets import Exercise

SLOW_S = 0.7  # a case that takes longer, such as one that loops until it is stopped, is run with SLOW_SEEDS only
SLOW_SEEDS = 3


def cases(exercise: Exercise) -> Iterator[tuple[str, str | None, dict[str, str], str]]:
    """Name, the part of the message that is expected (None: it passes), answers by cell, and the folder to take."""
    from every_millisecond.checks import STUB

    proofs = exercise_sets.proofs(exercise.chapter)
    yield "unsolved", f"{STUB}: ", {}, "exercises"
    yield "the solution", None, {}, "solutions"
    for cell in exercise.solutions:
        for number, answer in enumerate(proofs.RIGHT.get(cell, []), 1):
            yield f"{cell}, right in another way ({number})", None, {cell: answer}, "solutions"
        for mistake, part, answer in proofs.WRONG.get(cell, []):
            yield f"{cell}, {mistake}", part, {cell: answer}, "solutions"


def wrong_with(run, seed: int, part: str | None) -> str | None:
    """What is wrong with the check's verdict under this seed, or None."""
    from every_millisecond.checks import CheckFailed

    try:
        run(seed)
    except CheckFailed as failure:
        message = str(failure)
        if part is None:
            return f"a right answer failed: {message}"
        return None if part in message else f"named otherwise: {message}"
    except Exception as error:
        return f"the check broke: {type(error).__name__}: {error}"
    return "a wrong answer passed" if part is not None else None


def soak(exercise: Exercise, seeds: int, every: bool = False) -> tuple[int, int, int, list[str]]:
    """(cases, runs, cases cut short since they are slow, what went wrong). every: all cases meet all seeds."""
    runs, short, faults = 0, 0, []
    planned = sorted(cases(exercise), key=lambda case: case[0] == "the solution")  # last: the others are dealt in turn
    others = len(planned) - 1
    for number, (name, part, answers, folder) in enumerate(planned):
        dealt = list(range(seeds) if every or number == others else range(number, seeds, others))
        with contextlib.redirect_stdout(io.StringIO()):
            run = exercise_sets.check_of(exercise, answers, folder)
            bad, met = {}, 0
            while met < len(dealt):
                began = time.perf_counter()
                fault = wrong_with(run, dealt[met], part)
                if fault is not None:
                    bad[dealt[met]] = fault
                met += 1
                if met == 2 and len(dealt) > SLOW_SEEDS and time.perf_counter() - began > SLOW_S:  # the first warms up
                    dealt, short = dealt[:SLOW_SEEDS], short + 1
        runs += met
        if bad:
            first = min(bad)
            faults.append(f"{exercise.check}: {name}: {len(bad)} of {met} seeds, the first {first}: {bad[first][:300]}")
    return len(planned), runs, short, faults


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="sets, by the beginning of their names; default all")
    parser.add_argument("--seeds", type=int, default=2000)
    parser.add_argument("--all", action="store_true", help="every case under every seed")
    options = parser.parse_args()
    totals, faults = [0, 0, 0], 0
    print(f"{'set':<32}{'cases':>7}{'runs':>10}{'cut short':>11}{'wrong':>7}{'seconds':>9}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["LLM_LATENCY_PROGRESS"] = str(Path(folder) / "progress.json")
        for name in exercise_sets.names():
            if options.names and not name.startswith(tuple(options.names)):
                continue
            began = time.perf_counter()
            results = [soak(exercise, options.seeds, options.all) for exercise in exercise_sets.exercises(name)]
            counts = [sum(column) for column in zip(*(result[:3] for result in results), strict=True)]
            wrong = [fault for *_, found in results for fault in found]
            totals, faults = [a + b for a, b in zip(totals, counts, strict=True)], faults + len(wrong)
            line = "{:>7}{:>10}{:>11}".format(*counts)
            print(f"{name:<32}{line}{len(wrong):>7}{time.perf_counter() - began:>9.0f}", *wrong, sep="\n  ", flush=True)
    print(f"{'all':<32}" + "{:>7}{:>10}{:>11}".format(*totals) + f"{faults:>7}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
