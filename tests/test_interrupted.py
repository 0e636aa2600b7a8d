"""A learner closes the lid: killed at any file operation, what was begun goes on or starts clean the next time."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent / "interrupted"
MOMENTS = 20  # kills of each program, drawn one from each part of its file operations
GRADINGS = 5  # of the one that grades with nbgrader and a kernel, which takes seconds

pytestmark = pytest.mark.skipif(os.name == "nt", reason="Windows cannot fork, nor send a signal at a file operation")


def kill_and_start_again(program: str, folder: Path, moments: int = MOMENTS) -> None:
    command = [sys.executable, str(HERE / "killed.py"), program, str(folder), str(moments)]
    done = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("killed, then well") == min(moments, int(done.stdout.split()[0]))


@pytest.mark.parametrize(
    "program",
    [*(pytest.param(name, marks=pytest.mark.long) for name in ("prepare_model", "keep_score")), "store_notebook"],
)
def test_killed_at_any_moment_the_next_start_ends_well(program, tmp_path):
    """Guards against half-written files, locks that outlive their holder, and leftovers taken for results."""
    kill_and_start_again(program, tmp_path)


@pytest.mark.long
def test_a_killed_ladder_is_continued_to_its_report(tmp_path):
    """Killed between figures and report, a run counted as finished: measured anew, and its report never written."""
    kill_and_start_again("run_ladder", tmp_path)


@pytest.mark.long
def test_killed_grading_leaves_no_student_ungraded(tmp_path):
    """nbgrader passes over a student it was killed over, whose points are then missing."""
    kill_and_start_again("autograde", tmp_path, GRADINGS)


@pytest.mark.long
@pytest.mark.skipif(not shutil.which("make"), reason="needs make")
def test_a_killed_set_up_goes_on(tmp_path):
    """Half an environment, with Python and without pip, was taken for a whole one: no set-up ever worked in it."""
    kill_and_start_again("set_up", tmp_path)
