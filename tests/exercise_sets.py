"""The exercise sets as the tests see them: master, exercise and proofs of each, run cell by cell in one namespace."""

from __future__ import annotations

import importlib.util
import linecache
import re
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType

import nbformat

ROOT = Path(__file__).resolve().parents[1]
REGION = re.compile(r"^( *)### BEGIN SOLUTION\n(.*?)^ *### END SOLUTION", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Exercise:
    """One check with the solution cells above it."""

    chapter: str
    check: str  # ids of cells
    solutions: tuple[str, ...]


def names() -> list[str]:
    return sorted(path.parent.name for path in ROOT.glob("solutions/*/*.ipynb"))


@cache
def cells(chapter: str, folder: str = "solutions") -> list:
    return nbformat.read(ROOT / folder / chapter / f"{chapter}.ipynb", as_version=4).cells


def role(cell) -> str:
    """text, given, solution, check or manual."""
    mark = cell.metadata.get("nbgrader", {})
    if mark.get("solution"):
        return "manual" if mark["grade"] else "solution"
    if mark.get("grade"):
        return "check"
    return "given" if cell.cell_type == "code" else "text"


def exercises(chapter: str) -> list[Exercise]:
    found, above = [], []
    for cell in cells(chapter):
        if role(cell) == "solution":
            above.append(cell.id)
        elif role(cell) == "check":
            found.append(Exercise(chapter, cell.id, tuple(above)))
            above = []
    return found


@cache
def proofs(chapter: str) -> ModuleType:
    """tests/exercise_cases/<chapter>.py: WRONG and RIGHT answers by the id of the solution cell."""
    path = ROOT / "tests" / "exercise_cases" / f"{chapter}.py"
    spec = importlib.util.spec_from_file_location(f"exercise_cases_{chapter}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def replace_region(source: str, answer: str) -> str:
    """The cell with `answer` between its markers, indented as they are."""
    match = REGION.search(source)
    assert match, "a solution cell needs ### BEGIN SOLUTION and ### END SOLUTION"
    answer = textwrap.indent(textwrap.dedent(answer).strip("\n"), match[1])
    return source[: match.start()] + answer + source[match.end() :]


def run(source: str, namespace: dict, name: str) -> None:
    """Run one cell, as a kernel would: errors can show its lines."""
    file = f"<{name}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    exec(compile(source, file, "exec"), namespace)


def check_of(exercise: Exercise, answers: dict[str, str], folder: str = "solutions") -> Callable[[int], None]:
    """Run the cells above the exercise's check, with `answers` in place of solution regions.

    Returns what runs the check with a seed. Checks of other exercises are left out. Raises what a cell raises.
    """
    namespace: dict = {"__name__": "__main__"}
    for cell in cells(exercise.chapter, folder):
        if cell.id == exercise.check:
            break
        if cell.cell_type == "code" and role(cell) != "check":
            source = replace_region(cell.source, answers[cell.id]) if cell.id in answers else cell.source
            run(source, namespace, f"{exercise.chapter}:{cell.id}")
    check, learners = re.fullmatch(r"(checks\.check_\w+)\(([\w, ]+)\)", cell.source).groups()
    return lambda seed: exec(f"{check}({learners}, seed={seed})", namespace)
