"""The tool that stores what the notebooks print: an edition comes from one machine, whole or not at all."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).resolve().parents[1]
spec = importlib.util.spec_from_file_location("execute_notebooks", ROOT / "tools" / "execute_notebooks.py")
tool = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tool)


def executed(machine: str) -> nbformat.NotebookNode:
    text = f"on this machine: {machine}, 2 threads, torch 2.13.0\n"
    output = nbformat.v4.new_output("stream", name="stdout", text=text)
    return nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("show.machine()", outputs=[output])])


def play(monkeypatch, machines: list[str]) -> list[Path]:
    """Run an edition of so many notebooks, each on the machine given for it; returns those that were stored."""
    stored, left = [], list(machines)
    monkeypatch.setattr(tool, "run", lambda path: (executed(left.pop(0)), 1.0))
    monkeypatch.setattr(tool, "store", lambda notebook, path: stored.append(path))
    try:
        tool.execute_edition(Path(f"{i:02}.ipynb") for i in range(len(machines)))
    except RuntimeError as error:
        assert "02.ipynb" in str(error) and "Xeon" in str(error) and "EPYC" in str(error)
    return stored


def test_an_edition_of_one_machine_is_stored_whole(monkeypatch):
    assert len(play(monkeypatch, ["EPYC", "EPYC", "EPYC"])) == 3


def test_a_machine_that_changes_on_the_way_stores_nothing(monkeypatch):
    """Half an edition from another machine put bars side by side that no run had measured (K12)."""
    assert play(monkeypatch, ["EPYC", "EPYC", "Xeon"]) == []


def test_the_machine_line_is_that_of_the_set_up():
    assert tool.machine_line(executed("EPYC (AVX2)")) == "EPYC (AVX2), 2 threads, torch 2.13.0"
    assert tool.machine_line(nbformat.v4.new_notebook()) is None


@pytest.mark.parametrize("arguments", [["--all", "notebooks/00_start_here.ipynb"]])
def test_all_and_some_at_once_is_refused(monkeypatch, arguments):
    monkeypatch.setattr("sys.argv", ["execute_notebooks.py", *arguments])
    with pytest.raises(SystemExit):
        tool.main()
