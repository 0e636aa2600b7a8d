"""Execute notebooks and store their outputs, for maintainers: run it on a quiet machine after a change of the library.

    python tools/execute_notebooks.py --all                # one edition: all of them, stored only together
    python tools/execute_notebooks.py                      # all of them, each stored when it is done
    python tools/execute_notebooks.py notebooks/03*.ipynb  # some
    python tools/execute_notebooks.py --figures out/       # also write the figures as PNG files

An edition comes from one machine: with --all nothing is stored if a notebook fails, or if the line in which a notebook
names its machine changes from one to the next. Each runs from a fresh kernel in its own folder. Metadata is reduced to
what does not change from run to run. The reader's scorecard and progress are left alone.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

from llm_latency import files

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

ROOT = Path(__file__).resolve().parents[1]
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


@contextlib.contextmanager
def taking_turns() -> Iterator[None]:
    """Wait until no other execution runs on this machine: two at once would spoil each other's timings."""
    if fcntl is None:
        yield
        return
    with (Path(tempfile.gettempdir()) / "llm_latency_notebooks.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def clean(notebook: nbformat.NotebookNode) -> None:
    """Drop what a run leaves behind: timestamps, kernel versions, widget state; merge neighbouring text outputs."""
    notebook.metadata = nbformat.from_dict(METADATA)
    for cell in notebook.cells:
        kept = {key: cell.metadata[key] for key in ("tags", "reason", "nbgrader") if key in cell.metadata}
        cell.metadata = nbformat.from_dict(kept)


def machine_line(notebook: nbformat.NotebookNode) -> str | None:
    """The line in which an executed notebook's set-up names its machine; None where it prints none."""
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            found = re.search(r"^on this machine: (.*\d+ threads?, torch .*)$", output.get("text", ""), re.MULTILINE)
            if found:
                return found[1]
    return None


def run(path: Path) -> tuple[nbformat.NotebookNode, float]:
    """Execute one notebook; return it as it is to be stored, and the seconds it took. Raises CellExecutionError."""
    notebook = nbformat.read(path, as_version=4)
    started = time.perf_counter()
    resources = {"metadata": {"path": str(path.parent)}}
    NotebookClient(notebook, timeout=600, kernel_name="python3", resources=resources, coalesce_streams=True).execute()
    seconds = time.perf_counter() - started
    clean(notebook)
    return notebook, seconds


def execute(path: Path) -> float:
    """Run one notebook in place; return the seconds it took. Raises CellExecutionError."""
    notebook, seconds = run(path)
    store(notebook, path)
    return seconds


def execute_edition(paths: Iterable[Path]) -> None:
    """Run all notebooks and store them together.

    Raises CellExecutionError if one fails, RuntimeError if they do not name the same machine: nothing is stored then.
    """
    done: dict[Path, nbformat.NotebookNode] = {}
    machine: str | None = None
    for path in paths:
        notebook, seconds = run(path)
        print(f"{path.name}: {seconds:.0f} s", flush=True)
        found = machine_line(notebook)
        if found and machine and found != machine:
            raise RuntimeError(f"{path.name} ran on {found!r}, those before it on {machine!r}; nothing is stored")
        machine = machine or found
        done[path] = notebook
    for path, notebook in done.items():
        store(notebook, path)


def store(notebook: nbformat.NotebookNode, path: Path) -> None:
    """Write a notebook whole or not at all. Raises nbformat.ValidationError for one that is none."""
    nbformat.validate(notebook)
    files.write_atomically(path, nbformat.writes(notebook).rstrip("\n") + "\n")


def write_figures(path: Path, folder: Path) -> None:
    """Write a notebook's stored figures as PNG files."""
    folder.mkdir(parents=True, exist_ok=True)
    number = 0
    for cell in nbformat.read(path, as_version=4).cells:
        for output in cell.get("outputs", []):
            if "image/png" in output.get("data", {}):
                number += 1
                (folder / f"{path.stem}_{number}.png").write_bytes(base64.b64decode(output["data"]["image/png"]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("notebooks", nargs="*", type=Path)
    parser.add_argument("--all", action="store_true", help="one edition: every notebook, stored together or not at all")
    parser.add_argument("--figures", type=Path, help="folder for the figures as PNG files")
    args = parser.parse_args()
    failed = 0
    with taking_turns(), tempfile.TemporaryDirectory() as scratch:
        os.environ["LLM_LATENCY_SCORECARD"] = str(Path(scratch) / "scorecard.json")
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # as `make lab` has it
        os.environ["LLM_LATENCY_PROGRESS"] = str(Path(scratch) / "progress.json")
        everything = sorted(ROOT.glob("notebooks/*.ipynb")) + sorted(ROOT.glob("solutions/*/*.ipynb"))
        if args.all:
            if args.notebooks:
                parser.error("--all takes no notebooks: an edition is all of them")
            execute_edition(everything)
            for path in everything if args.figures else []:
                write_figures(path, args.figures)
            return 0
        for path in args.notebooks or everything:
            try:
                print(f"{path.name}: {execute(path.resolve()):.0f} s", flush=True)
            except CellExecutionError as error:
                failed += 1
                print(f"{path.name}: FAILED\n{error}", flush=True)
                continue
            if args.figures:
                write_figures(path, args.figures)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
