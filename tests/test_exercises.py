"""Every exercise proves itself: unsolved fails readably, solved passes, mistakes are named, another way passes."""

from __future__ import annotations

import re
import sys

import exercise_sets
import pytest
from exercise_sets import ROOT, Exercise, role

from every_millisecond.checks import STUB, CheckFailed, registered

NAMES = exercise_sets.names()
SEEDS = (0, 1, 2)  # `make soak` runs thousands
EXERCISES = [exercise for name in NAMES for exercise in exercise_sets.exercises(name)]


@pytest.fixture(autouse=True)
def own_progress(tmp_path, monkeypatch):
    """A learner's own progress is not the tests' to change."""
    monkeypatch.setenv("LLM_LATENCY_PROGRESS", str(tmp_path / "progress.json"))


@pytest.fixture(params=NAMES)
def name(request) -> str:
    return request.param


@pytest.fixture(params=EXERCISES, ids=lambda exercise: f"{exercise.chapter}-{exercise.check}")
def exercise(request) -> Exercise:
    return request.param


def answers_of(kind: str, exercise: Exercise) -> list[tuple[str, object]]:
    found = getattr(exercise_sets.proofs(exercise.chapter), kind)
    return [(cell, answer) for cell in exercise.solutions for answer in found.get(cell, [])]


def test_unsolved_fails_readably_and_crashes_nothing(name):
    """Exercises that ship solved, that pass unsolved, or whose first cell ends in a traceback."""
    namespace: dict = {"__name__": "__main__"}
    checked = 0
    for cell in exercise_sets.cells(name, "exercises"):
        if cell.cell_type != "code":
            continue
        assert "BEGIN SOLUTION" not in cell.source and not cell.outputs
        if role(cell) != "check":
            exercise_sets.run(cell.source, namespace, cell.id)
            continue
        with pytest.raises(CheckFailed, match=f"^{STUB}: "):
            exercise_sets.run(cell.source, namespace, cell.id)
        checked += 1
    assert checked == len(exercise_sets.exercises(name))


def verdict(check, seed: int) -> CheckFailed | None:
    try:
        check(seed)
    except CheckFailed as failure:
        return failure
    return None


def test_solved_passes(exercise, capsys):
    """A check that its own solution does not pass."""
    check = exercise_sets.check_of(exercise, {})
    for seed in SEEDS:
        assert verdict(check, seed) is None, f"seed {seed}"
        assert capsys.readouterr().out.splitlines()[-1].startswith("passed: ")


def test_planted_mistakes_are_caught_and_named(exercise, record_property):
    """Wrong answers that pass on trivial input, or fail without saying why."""
    planted = answers_of("WRONG", exercise)
    assert len(planted) >= 3, "plant at least three mistakes that people make"
    for number, (cell, (mistake, fragment, answer)) in enumerate(planted):
        seed = SEEDS[number % len(SEEDS)]
        failure = verdict(exercise_sets.check_of(exercise, {cell: answer}), seed)
        assert failure is not None, f"{cell}, seed {seed}: the wrong answer passed: {mistake}"
        message = str(failure)
        assert fragment in message, f"{cell}, {mistake}, seed {seed}: the message does not name it: {message}"
        assert failure.seed == seed
        assert len(message) < 600 and "\n" not in message.strip(), f"{cell}, {mistake}, seed {seed}"
    record_property("planted", [exercise.chapter, len(planted)])


def test_another_right_answer_passes(exercise, record_property):
    """A check that knows only its author's way."""
    others = answers_of("RIGHT", exercise)
    assert others, "give at least one answer that is right in another way"
    for cell, answer in others:
        check = exercise_sets.check_of(exercise, {cell: answer})
        for seed in SEEDS:
            failure = verdict(check, seed)
            assert failure is None, f"{cell}, seed {seed}: a right answer failed: {failure}: {answer}"
    record_property("accepted", [exercise.chapter, len(others)])


def test_proofs_belong_to_cells(name):
    """A proof whose cell was renamed would never run again."""
    cells = {cell for exercise in exercise_sets.exercises(name) for cell in exercise.solutions}
    proofs = exercise_sets.proofs(name)
    assert set(proofs.WRONG) | set(proofs.RIGHT) <= cells


def test_every_check_is_used_once():
    """A check that no exercise calls counts for ever as not passed in `llm-latency progress`."""
    used = {name: set() for name in NAMES}
    for exercise in EXERCISES:
        source = next(cell.source for cell in exercise_sets.cells(exercise.chapter) if cell.id == exercise.check)
        (call,) = re.findall(r"^checks\.(check_\w+)\([\w, ]+\)$", source, re.MULTILINE)
        assert call not in used[exercise.chapter]
        used[exercise.chapter].add(call)
    assert used == {chapter: set(checks) for chapter, checks in registered().items()}


def test_a_set_reads_as_the_others_do(name):
    """Links to the notebook, minutes, difficulty, size, hints; a folded why that only the solution holds."""
    cells = exercise_sets.cells(name)
    assert f"solutions/{name}" in cells[0].source and "../../notebooks/" in cells[0].source
    notebook = ROOT / "notebooks" / f"{name}.ipynb"
    if notebook.exists():  # the bug zoo belongs to several
        assert f"](../exercises/{name}/{name}.ipynb)" in notebook.read_text(), "the notebook must link to its exercises"
    place = {cell.id: number for number, cell in enumerate(cells)}
    for cell in cells:
        if role(cell) in ("solution", "check", "manual"):
            assert cell.id == cell.metadata.nbgrader.grade_id
            assert role(cell) == "solution" or cell.metadata.nbgrader.points > 0
    for exercise in exercise_sets.exercises(name):
        why = cells[place[exercise.check] + 1]
        assert why.metadata.get("tags") == ["why"] and why.source.startswith("<details><summary>Why</summary>\n\n")
        above = [cell for cell in cells[: place[exercise.solutions[0]]] if role(cell) == "text"]
        text = above[-1].source
        head = re.match(r"## \d+ · .+\n\n\d+ minutes · (?:easy|medium|hard) · \(roughly (\d+) lines?\)\n", text)
        assert head, f"{exercise.check}: its text begins with title, minutes, difficulty, (roughly N lines)"
        regions = [exercise_sets.REGION.search(cells[place[cell]].source)[2] for cell in exercise.solutions]
        size = sum(line.strip() != "" for region in regions for line in region.split("\n"))
        assert abs(int(head[1]) - size) <= max(2, 0.4 * size), f"{exercise.check} has {size} lines"
        assert text.count("<details><summary>Hint") >= 1
    assert not any("why" in cell.metadata.get("tags", []) for cell in exercise_sets.cells(name, "exercises"))


def test_the_classroom_guide_lists_the_set(name):
    """A teacher plans by the table of points."""
    marks = [(role(cell), cell.metadata.nbgrader.get("points")) for cell in exercise_sets.cells(name)
             if role(cell) in ("check", "manual")]  # fmt: skip
    checks = [points for kind, points in marks if kind == "check"]
    by_hand = sum(points for kind, points in marks if kind == "manual") or "-"
    row = f"| {name.replace('_', ' ')} | {len(checks)} | {sum(checks)} | {by_hand} |"
    assert row in (ROOT / "docs" / "classroom.md").read_text(), row


@pytest.fixture(scope="module")
def generated(tmp_path_factory):
    sys.path.insert(0, str(ROOT / "tools"))
    import make_exercises

    folder = tmp_path_factory.mktemp("exercises")
    make_exercises.generate(NAMES, folder)
    return folder


def test_exercises_are_what_make_exercises_writes(generated, name):
    """Skeletons that drifted from their solutions ."""
    written = {path.relative_to(generated): path.read_text() for path in (generated / name).rglob("*.ipynb")}
    kept = {path.relative_to(ROOT / "exercises"): path for path in (ROOT / "exercises" / name).rglob("*.ipynb")}
    assert set(written) == set(kept)
    for path, text in written.items():
        assert text == kept[path].read_text(), f"exercises/{path} is out of date: run `make exercises`"


def test_no_exercise_is_left_without_its_solution():
    """A renamed set would leave its former exercise behind."""
    assert sorted(path.name for path in (ROOT / "exercises").iterdir() if path.is_dir()) == NAMES
