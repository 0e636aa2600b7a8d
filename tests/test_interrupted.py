"""A learner closes the lid: killed at any file operation, what was begun goes on or starts clean the next time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent / "interrupted"
MOMENTS = 20  # kills of each program, drawn from all its file operations


@pytest.mark.skipif(os.name == "nt", reason="Windows cannot fork, nor send a signal at a file operation")
@pytest.mark.parametrize("program", ["prepare_model", "keep_score", "store_notebook"])
def test_killed_at_any_moment_the_next_start_ends_well(program, tmp_path):
    """Guards against half-written files, locks that outlive their holder, and leftovers taken for results."""
    command = [sys.executable, str(HERE / "killed.py"), program, str(tmp_path), str(MOMENTS)]
    done = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("killed, then well") == min(MOMENTS, int(done.stdout.split()[0]))
