"""Plays the notebooks' code cells on the pretend GPU, with tiny models that have the awkward numbers of the real ones.

    python tests/pretend_gpu/notebooks.py                          every notebook on every profile
    python tests/pretend_gpu/notebooks.py --profile qwen2.5-7b 07 08

A cell that raises is listed, and the next ones run on. Nothing is compared: what a cell prints is another model's.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
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


@dataclass(frozen=True, slots=True)
class Played:
    """What became of a notebook. seconds: of each cell that ended. core_seconds: of a core, children included."""

    notebook: str
    profile: str
    breaks: list[Break]
    seconds: dict[int, float]
    core_seconds: float

    def __str__(self) -> str:
        slowest = sorted(self.seconds, key=self.seconds.get, reverse=True)[:3]
        said = f"{self.notebook} on {self.profile}: {len(self.breaks)} breaks, {len(self.seconds)} cells, "
        said += f"{sum(self.seconds.values()):.0f} s, {self.core_seconds:.0f} s of a core, longest "
        said += ", ".join(f"[{cell}] {self.seconds[cell]:.0f} s" for cell in slowest)
        return "\n".join([said, *(f"  [{found.cell}] {found.error}" for found in self.breaks)])


def notebook_paths(numbers: list[str] | None = None) -> list[Path]:
    """The notebooks, or those whose names begin with one of the numbers."""
    paths = sorted((ROOT / "notebooks").glob("[0-9]*.ipynb"))
    return [path for path in paths if not numbers or path.name.startswith(tuple(numbers))]


def play(notebooks: list[Path], profile: str, *, seconds: float = 900, kept: Path | None = None) -> Iterator[Played]:
    """Run the code cells of notebooks, each in a process of its own.

    The notebooks of one card are forks of one process, which imports torch once. kept: a folder for scorecard and bars,
    so that a notebook opens with the bar that the one before it ended with. seconds: for each notebook.
    """
    sys.path.insert(0, str(ROOT / "tests"))
    from pretend_gpu.stage import card_for, child_environment

    with tempfile.TemporaryDirectory() as folder:
        own = kept or Path(folder)
        files = {f"LLM_LATENCY_{name.upper()}": f"{own}/{name}.json" for name in ("scorecard", "progress")}
        for card, group in itertools.groupby(notebooks, lambda path: card_for(profile, path.name[:2])):
            paths = list(group)
            environment = os.environ | child_environment(profile, card) | files
            environment |= {"MPLBACKEND": "agg", "TQDM_DISABLE": "1", "OMP_NUM_THREADS": "1"}
            said = open(Path(folder) / "stderr", "w+")
            stage = subprocess.Popen(
                [sys.executable, str(Path(__file__)), "--cells", f"--seconds={seconds}", folder, *map(str, paths)],
                env=environment, stdout=subprocess.PIPE, stderr=said, text=True,
            )  # fmt: skip
            for path in paths:
                problem = stage.stdout.readline().strip()  # one line as each ends
                result = Path(folder) / f"{path.stem}.json"
                found = {"breaks": [], "done": False, "cell": -1, "seconds": [], "core_seconds": 0.0}
                found |= json.loads(result.read_text()) if result.exists() else {}
                breaks = [Break(path.stem, profile, cell, error) for cell, error in found["breaks"]]
                if not found["done"]:
                    problem = problem or f"the stage ended: {Path(said.name).read_text()[-500:]}"
                    breaks.append(Break(path.stem, profile, found["cell"], problem))
                yield Played(path.stem, profile, breaks, dict(found["seconds"]), found["core_seconds"])
            stage.communicate()
            said.close()


def fork(notebooks: list[Path], folder: Path, seconds: float) -> None:
    """In the process of a stage: play each notebook in a fork, and print how that ended."""
    from pretend_gpu.stage import use_short_answers

    use_short_answers()
    import matplotlib.pyplot  # noqa: F401  what every notebook imports, once for all
    import transformers.generation  # noqa: F401

    import every_millisecond.notebook.show  # noqa: F401

    for notebook in notebooks:
        child = os.fork()
        if not child:
            os.setsid()
            os.chdir(notebook.parent)
            with open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), 1)
            play_cells(notebook, folder / f"{notebook.stem}.json")
            os._exit(0)
        end, status = time.monotonic() + seconds, None
        while status is None and time.monotonic() < end:
            ended, code, used = os.wait4(child, os.WNOHANG)
            status = code if ended else None
            time.sleep(0.1)
        if status is None:
            os.killpg(child, signal.SIGKILL)
            *_, used = os.wait4(child, 0)
        result = folder / f"{notebook.stem}.json"
        if result.exists():
            core_seconds = round(used.ru_utime + used.ru_stime, 1)
            result.write_text(json.dumps(json.loads(result.read_text()) | {"core_seconds": core_seconds}))
        print(f"not done after {seconds:g} s" if status is None else f"ended with {status}", flush=True)


def play_cells(notebook: Path, result: Path) -> None:
    """In the process of one notebook: run the cells one by one, and write down what raised."""
    from IPython.core.interactiveshell import InteractiveShell

    from every_millisecond.notebook import trace

    trace._is_gpu_kernel = trace._is_cpu_kernel  # the profiler sees the CPU's, which stand for the device's
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("numbers", nargs="*", help="of notebooks: 07 08; none means all")
    parser.add_argument("--profile", action="append", choices=PROFILES, help="may be given more than once")
    parser.add_argument("--cells", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=900, help="for each notebook")
    arguments = parser.parse_args()
    if arguments.cells:
        folder, *paths = map(Path, arguments.numbers)
        fork(paths, folder, arguments.seconds)
        return 0
    count = 0
    for profile in arguments.profile or PROFILES:
        with tempfile.TemporaryDirectory() as kept:
            paths = notebook_paths(arguments.numbers)
            for played in play(paths, profile, seconds=arguments.seconds, kept=Path(kept)):
                print(played, flush=True)
                count += len(played.breaks)
    print(f"{count} breaks")
    return int(count > 0)


if __name__ == "__main__":
    sys.exit(main())
