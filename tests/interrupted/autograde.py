"""A teacher's evening: the submissions looked through and mended, and graded by nbgrader as it is.

One student copied a graded cell, another handed in what is no notebook. The kernel's cells import nothing: that the
file of passed exercises survives is `keep_score`'s to show.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import nbformat
from nbgrader.api import Gradebook
from nbgrader.apps import NbGraderAPI
from traitlets.config import Config, PyFileConfigLoader

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import preflight  # noqa: E402

os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])  # nbgrader calls alembic
SET = "tiny"
ANSWER = "def double(x):\n    {}\n    return 2 * x\n    {}"
SCRATCH = tempfile.TemporaryDirectory()


def api(course: Path) -> NbGraderAPI:
    config = PyFileConfigLoader("nbgrader_config.py", path=str(ROOT)).load_config()
    config.merge(Config({"CourseDirectory": {"root": str(course)}, "Exchange": {"root": str(course / "exchange")}}))
    return NbGraderAPI(config=config)


def cell(name: str, source: str, **marks) -> nbformat.NotebookNode:
    marks = dict(grade=False, locked=False, solution=False, task=False) | marks
    marks |= dict(schema_version=3, grade_id=name)
    return nbformat.v4.new_code_cell(source, id=name, metadata={"nbgrader": marks})


def write(course: Path, *path: str, twice: bool = False) -> None:
    """A notebook with an answer and its check, the answer pasted once more if `twice`."""
    answer = cell("double", ANSWER.format("### BEGIN SOLUTION", "### END SOLUTION"), solution=True)
    check = cell("check", "assert double(3) == 6", grade=True, locked=True, points=2)
    cells = [answer, *([nbformat.from_dict(answer | {"id": "pasted"})] if twice else []), check]
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    place = course.joinpath(*path, SET, f"{SET}.ipynb")
    place.parent.mkdir(parents=True)
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=kernel), place)


COLLECTED = Path(SCRATCH.name) / "course"
write(COLLECTED, "solutions")
write(COLLECTED, "submitted", "anna", twice=True)
write(COLLECTED, "submitted", "broken")
(COLLECTED / "submitted" / "broken" / SET / f"{SET}.ipynb").write_text("this is no notebook")
assert api(COLLECTED).generate_assignment(SET)["success"]


def main(folder: Path) -> None:
    course = folder / "course"
    if not course.exists():
        subprocess.run(["cp", "-r", COLLECTED, course], check=True)
    assert preflight.main([SET, "--mend"], course) == 0
    teacher = api(course)
    graded = teacher.autograde(SET, "*", force=False)  # as the command does it
    assert graded["success"], graded
    with Gradebook(teacher.coursedir.db_url) as book:
        assert [(entry.student.id, entry.score) for entry in book.assignment_submissions(SET)] == [("anna", 2)]
    handed_in = course / "submitted" / "anna" / SET / f"{SET}.ipynb"
    original = COLLECTED / handed_in.relative_to(course)
    assert handed_in.with_name(f"{SET}.ipynb.as-submitted").read_bytes() == original.read_bytes()
    assert [path.name for path in (course / "set_aside").iterdir()] == ["broken"]
