"""A class can be graded with nbgrader as it stands: generate, three submissions, autograde, feedback."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import exercise_sets
import nbformat
import pytest
from exercise_sets import ROOT, replace_region, role
from nbgrader.api import Gradebook
from nbgrader.apps import NbGraderAPI
from traitlets.config import Config, PyFileConfigLoader

pytestmark = pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SAWarning")  # nbgrader's own

SET = "06_flash_attention"
PLANTED = {"blocked": "off by one", "masked_update": "a large negative number"}


def submission(released, answers: dict[str, str]):
    """The released notebook with cells filled in: id -> source."""
    notebook = nbformat.from_dict(released)
    for cell in notebook.cells:
        cell.source = answers.get(cell.id, cell.source)
    return notebook


def solved() -> dict[str, str]:
    return {cell.id: cell.source for cell in exercise_sets.cells(SET) if role(cell) in ("solution", "manual")}


def half_solved() -> dict[str, str]:
    """All solved but for two mistakes of the proofs."""
    answers = solved()
    for cell, mistake in PLANTED.items():
        (answer,) = [lines for name, _, lines in exercise_sets.proofs(SET).WRONG[cell] if name == mistake]
        answers[cell] = replace_region(answers[cell], answer)
    return answers


@pytest.fixture(scope="module")
def course(tmp_path_factory):
    """A course folder in which three students have handed in, graded; returns its API."""
    root = tmp_path_factory.mktemp("course")
    shutil.copytree(ROOT / "solutions" / SET, root / "solutions" / SET)
    config = PyFileConfigLoader("nbgrader_config.py", path=str(ROOT)).load_config()
    config.merge(Config({"CourseDirectory": {"root": str(root)}, "Exchange": {"root": str(root / "exchange")}}))
    (root / "exchange").mkdir()
    (root / "exchange").chmod(0o777)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LLM_LATENCY_PROGRESS", str(root / "progress.json"))
        patch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)  # nbgrader calls alembic by name
        grade_all(root, api := NbGraderAPI(config=config))
    return api


def grade_all(root: Path, api: NbGraderAPI) -> None:
    """What a teacher does: generate, collect, autograde, feedback."""
    assert api.generate_assignment(SET)["success"]
    released = nbformat.read(root / "exercises" / SET / f"{SET}.ipynb", as_version=4)
    students = {
        "solved": solved(),
        "unsolved": {cell.id: "pass" for cell in released.cells if role(cell) == "check"},
        "half": half_solved(),
    }
    for student, answers in students.items():
        folder = root / "submitted" / student / SET
        folder.mkdir(parents=True)
        nbformat.write(submission(released, answers), folder / f"{SET}.ipynb")
        result = api.autograde(SET, student)
        assert result["success"], result.get("log")
    assert api.generate_feedback(SET)["success"]


def score(course, student: str) -> dict[str, float]:
    """Points per graded cell, as the grade book holds them."""
    with Gradebook(course.coursedir.db_url) as book:
        (notebook,) = book.find_submission(SET, student).notebooks
        return {grade.name: grade.score for grade in notebook.grades}


def test_each_submission_gets_the_points_it_earns(course):
    """Points for planted mistakes, or none for solved exercises; or points for checks that the student had emptied."""
    points = {cell.id: cell.metadata.nbgrader.points for cell in exercise_sets.cells(SET) if role(cell) == "check"}
    nothing = dict.fromkeys(points, 0)
    wrong = {"check_blocked": 0, "check_masked_update": 0}
    for student, expected in [
        ("solved", points),
        ("unsolved", nothing),
        ("half", points | wrong),
    ]:
        found = score(course, student)
        assert {name: found[name] for name in points} == expected, student


def test_a_written_answer_waits_for_the_teacher(course):
    """A text that was written must be marked for grading by hand; one left empty needs nobody."""
    with Gradebook(course.coursedir.db_url) as book:
        waits = {
            student: any(grade.needs_manual_grade for grade in book.find_submission(SET, student).notebooks[0].grades)
            for student in ("solved", "unsolved")
        }
        assert book.find_assignment(SET).max_score == 13
    assert waits == {"solved": True, "unsolved": False}


def test_feedback_names_the_mistakes(course):
    """Feedback that only says 0 points teaches nothing."""

    def page(student: str) -> str:
        folder = Path(course.coursedir.root) / "feedback" / student / SET
        return (folder / f"{SET}.html").read_text(encoding="utf-8")

    assert "Off by one: a query also sees its own key" in page("half")
    assert "they weigh exp(0) = 1" in page("half")
    assert page("unsolved").count("not solved yet: ") == 3
    assert "most recent call last" not in page("half") + page("unsolved")
