"""Plays the notebooks' code cells on the pretend GPU, with tiny models that have the awkward numbers of the real ones.

    python tests/pretend_gpu/notebooks.py                          every notebook on every profile
    python tests/pretend_gpu/notebooks.py --profile qwen2.5-7b 07 08

A cell that raises is listed, and the next ones run on. Nothing is compared: what a cell prints is another model's.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROFILES = ("smollm2-135m", "smollm2-1.7b", "qwen2.5-7b", "llama-7b-shape")


@dataclass(frozen=True, slots=True)
class Break:
    """A cell that raised. cell: its index in the notebook."""

    notebook: str
    profile: str
    cell: int
    error: str

    def __str__(self) -> str:
        return f"{self.notebook}[{self.cell}] on {self.profile}: {self.error}"


def notebook_paths(numbers: list[str] | None = None) -> list[Path]:
    """The notebooks, or those whose names begin with one of the numbers."""
    paths = sorted((ROOT / "notebooks").glob("[0-9]*.ipynb"))
    return [path for path in paths if not numbers or path.name.startswith(tuple(numbers))]


def play(notebook: Path, profile: str, *, seconds: float = 900) -> tuple[list[Break], float]:
    """Run a notebook's code cells in a process of its own. Returns the cells that raised, and the seconds it took."""
    sys.path.insert(0, str(ROOT / "tests"))
    from pretend_gpu.stage import child_environment

    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "breaks.json"
        environment = os.environ | child_environment(profile)
        environment |= {f"LLM_LATENCY_{name.upper()}": f"{folder}/{name}.json" for name in ("scorecard", "progress")}
        environment |= {"MPLBACKEND": "agg", "TQDM_DISABLE": "1"}
        start = time.monotonic()
        try:
            done = subprocess.run(
                [sys.executable, str(Path(__file__)), "--cells", str(notebook), str(result)],
                env=environment, cwd=notebook.parent, capture_output=True, text=True, timeout=seconds, check=False,
            )  # fmt: skip
            problem = f"the process ended with {done.returncode}: {done.stderr[-500:]}"
        except subprocess.TimeoutExpired:
            problem = f"not done after {seconds:g} s"
        took = time.monotonic() - start
        found = json.loads(result.read_text()) if result.exists() else {"breaks": [], "done": False, "cell": -1}
    breaks = [Break(notebook.stem, profile, cell, error) for cell, error in found["breaks"]]
    if not found["done"]:
        breaks.append(Break(notebook.stem, profile, found["cell"], problem))
    return breaks, took


def play_cells(notebook: Path, result: Path) -> None:
    """In the process of one notebook: run the cells one by one, and write down what raised."""
    from IPython.core.interactiveshell import InteractiveShell

    shell = InteractiveShell.instance()
    found: dict = {"breaks": [], "done": False, "cell": -1, "seconds": []}
    for index, cell in enumerate(json.loads(notebook.read_text())["cells"]):
        if cell["cell_type"] != "code":
            continue
        found["cell"] = index
        result.write_text(json.dumps(found))
        start = time.monotonic()
        outcome = shell.run_cell("".join(cell["source"]), store_history=False)
        error = outcome.error_before_exec or outcome.error_in_exec
        if error is not None:
            found["breaks"].append((index, f"{type(error).__name__}: {str(error)[:300]}"))
        found["seconds"].append((index, round(time.monotonic() - start, 1)))
    found["done"] = True
    result.write_text(json.dumps(found))
    slow = sorted(found["seconds"], key=lambda pair: -pair[1])[:5]
    print("slowest cells:", ", ".join(f"[{index}] {seconds} s" for index, seconds in slow))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("numbers", nargs="*", help="of notebooks: 07 08; none means all")
    parser.add_argument("--profile", action="append", choices=PROFILES, help="may be given more than once")
    parser.add_argument("--cells", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.cells:
        play_cells(*map(Path, arguments.numbers))
        return 0
    count = 0
    for notebook in notebook_paths(arguments.numbers):
        for profile in arguments.profile or PROFILES:
            breaks, took = play(notebook, profile)
            print(f"{notebook.stem} on {profile}: {len(breaks)} breaks, {took:.0f} s", flush=True)
            for found in breaks:
                print(f"  [{found.cell}] {found.error}", flush=True)
            count += len(breaks)
    print(f"{count} breaks")
    return int(count > 0)


if __name__ == "__main__":
    sys.exit(main())
