"""A maintainer's execution of one notebook, stored where it stood."""

from __future__ import annotations

import sys
from pathlib import Path

import nbformat

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
import execute_notebooks


def main(folder: Path) -> None:
    path = folder / "notebook.ipynb"
    if not path.exists():
        cell = nbformat.v4.new_code_cell("print(2)", id="a")
        execute_notebooks.store(nbformat.v4.new_notebook(cells=[cell]), path)
    notebook = nbformat.read(path, as_version=4)
    for text in ("2\n" * 20_000, "3\n" * 20_000):
        notebook.cells[0].outputs = [nbformat.v4.new_output("stream", text=text)]
        execute_notebooks.store(notebook, path)
        assert nbformat.read(path, as_version=4).cells[0].outputs[0].text == text
