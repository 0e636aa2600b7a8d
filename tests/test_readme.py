"""What the README promises a reader, run as it stands there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))

import try_take_home  # noqa: E402

# Whoever takes the package home has none of these: an import fails, and find_spec finds nothing.
ABSENT = ["accelerate", "every_millisecond", "gguf", "IPython", "ipywidgets", "jupyterlab", "matplotlib", "nbformat"]
ABSENT += ["nbgrader", "pytest", "scipy", "typer"]


def test_the_take_home_examples_run_without_the_course(tiny_directory, tmp_path):
    """Guards against examples that rot, and a library that needs the course. In an empty environment: try_take_home."""
    program = tmp_path / "examples.py"
    without = f"import sys\nsys.modules.update(dict.fromkeys({ABSENT}))\nfolder = {tiny_directory!r}\n"
    program.write_text(without + try_take_home.examples())
    done = subprocess.run([sys.executable, str(program)], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "bytes of keys and values" in done.stdout and "tokens a pass" in done.stdout
