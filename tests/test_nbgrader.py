"""A class can be graded with nbgrader as it stands: generate, three submissions, autograde, feedback."""

from __future__ import annotations

import json
import os
import shutil
import sys
import textwrap
import zipfile
from pathlib import Path

import exercise_sets
import nbformat
import pytest
from exercise_sets import ROOT, replace_region, role
from nbgrader.api import Gradebook
from nbgrader.apps import NbGraderAPI, ZipCollectApp
from nbgrader.coursedir import CourseDirectory
from traitlets.config import Config, PyFileConfigLoader

sys.path.insert(0, str(ROOT / "tools"))
import preflight

pytestmark = [
    pytest.mark.long,  # real kernels, six submissions: half a minute
    pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SAWarning"),  # nbgrader's own
]

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


def solved_with_a_warning() -> dict[str, str]:
    """All solved, by a function that makes PyTorch warn, logs, and writes to stderr in all ways."""
    answers = solved()
    noise = """
        import logging, os, sys, warnings
        logging.getLogger("torch").warning("a logger's warning")
        warnings.warn("a warning", stacklevel=1)
        print("to stderr", file=sys.stderr)
        os.write(2, b"to descriptor 2\\n")
        m, l = torch.tensor(m), torch.tensor(l)
    """
    right = textwrap.dedent(exercise_sets.REGION.search(answers["update"])[2])
    answers["update"] = replace_region(answers["update"], textwrap.dedent(noise).strip() + "\n" + right)
    return answers


def copied(released):
    """A notebook in which the student copied and pasted a solution cell and its check, to try again."""
    notebook = submission(released, solved())
    place = next(i for i, cell in enumerate(notebook.cells) if cell.id == "check_update")
    for cell in notebook.cells[place - 1 : place + 1][::-1]:
        twin = nbformat.from_dict(cell)
        twin.id = f"{cell.id}-2"
        notebook.cells.insert(place + 1, twin)
    return notebook


@pytest.fixture(scope="module")
def course(tmp_path_factory):
    """A course folder in which students have handed in, graded; returns its API."""
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
        "half": half_solved(),
        "loud": solved_with_a_warning(),
        "solved": solved(),
        "unsolved": {cell.id: "pass" for cell in released.cells if role(cell) == "check"},
    }
    notebooks = {student: submission(released, answers) for student, answers in students.items()}
    for student, notebook in {"copied": copied(released), **notebooks}.items():
        hand_in(root, student).parent.mkdir(parents=True)
        hand_in(root, student).write_text(json.dumps(notebook), encoding="utf-8")
    hand_in(root, "broken").parent.mkdir(parents=True)
    hand_in(root, "broken").write_text("this is no notebook")
    assert preflight.main([SET], root) == 1
    assert preflight.main([SET, "--mend"], root) == 0
    assert preflight.main([SET], root) == 0
    result = api.autograde(SET, "*")
    assert result["success"], result.get("log")
    assert api.generate_feedback(SET)["success"]


def hand_in(root: Path, student: str) -> Path:
    return root / "submitted" / student / SET / f"{SET}.ipynb"


def score(course, student: str) -> dict[str, float]:
    """Points per graded cell, as the grade book holds them."""
    with Gradebook(course.coursedir.db_url) as book:
        (notebook,) = book.find_submission(SET, student).notebooks
        return {grade.name: grade.score for grade in notebook.grades}


def test_each_submission_gets_the_points_it_earns(course):
    """Points for planted mistakes, none for solved exercises (kind 34: one that warns), or any for an emptied check."""
    points = {cell.id: cell.metadata.nbgrader.points for cell in exercise_sets.cells(SET) if role(cell) == "check"}
    nothing = dict.fromkeys(points, 0)
    wrong = {"check_blocked": 0, "check_masked_update": 0}
    for student, expected in [
        ("solved", points),
        ("copied", points),
        ("loud", points),
        ("unsolved", nothing),
        ("half", points | wrong),
    ]:
        found = score(course, student)
        assert {name: found[name] for name in points} == expected, student


def test_one_bad_submission_stops_nobody(course):
    """A copied graded cell or a file that is no notebook aborts the grading of all students after it."""
    root = Path(course.coursedir.root)
    assert {path.name for path in (root / "autograded").iterdir()} == {"copied", "half", "loud", "solved", "unsolved"}
    assert hand_in(root, "copied").with_name(f"{SET}.ipynb.as-submitted").exists()
    assert (root / "set_aside" / "broken" / SET / f"{SET}.ipynb").read_text() == "this is no notebook"


def test_a_submission_is_mended_whole_or_not_at_all(tmp_path, monkeypatch):
    """Mending that was cut short left half a notebook, which the next call set aside as unreadable."""
    path = hand_in(tmp_path, "anna")
    path.parent.mkdir(parents=True)
    released = nbformat.read(ROOT / "exercises" / SET / f"{SET}.ipynb", as_version=4)
    path.write_text(before := json.dumps(copied(released)), encoding="utf-8")
    monkeypatch.delattr(os, "replace")
    with pytest.raises(AttributeError):
        preflight.examine(path, mend=True)
    assert path.read_text(encoding="utf-8") == before


def test_zip_collect_takes_what_students_send(tmp_path):
    """Without a regular expression `nbgrader zip_collect` collects nothing."""
    archive = tmp_path / "downloaded" / SET / "archive"
    archive.mkdir(parents=True)
    (tmp_path / "exercises" / SET).mkdir(parents=True)
    shutil.copy(ROOT / "exercises" / SET / f"{SET}.ipynb", tmp_path / "exercises" / SET)
    text = (ROOT / "exercises" / SET / f"{SET}.ipynb").read_text(encoding="utf-8")
    (archive / f"anna_{SET}.ipynb").write_text(text, encoding="utf-8")
    for name, inside in (
        ("bert.zip", f"{SET}.ipynb"),
        ("moodle.zip", f"Cara Dahl_4711_assignsubmission_file_/{SET}.ipynb"),
        ("emil.zip", f"emil/{SET}/{SET}.ipynb"),
    ):
        with zipfile.ZipFile(archive / name, "w") as file:
            file.writestr(inside, text)
    config = PyFileConfigLoader("nbgrader_config.py", path=str(ROOT)).load_config()
    config.merge(Config({"CourseDirectory": {"root": str(tmp_path), "assignment_id": SET}}))
    app = ZipCollectApp(config=config, coursedir=CourseDirectory(config=config), parent=None)
    app.init_plugins()
    app.extract_archive_files()
    app.process_extracted_files()
    found = {path.parents[1].name for path in (tmp_path / "submitted").glob(f"*/{SET}/{SET}.ipynb")}
    assert found == {"anna", "bert", "Cara Dahl", "emil"}


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
