"""What `make test` runs, stage by stage, with the time of each. Works without make, too: python tools/run_tests.py

    python tools/run_tests.py                       # every stage but "long"
    python tools/run_tests.py --only lint,library   # some stages
    python tools/run_tests.py --only long           # sanitizers, every prompt, interpreted kernels at their largest
    python tools/run_tests.py --busy                # beside a process that keeps one core busy

No stage uses the network: tests/offline refuses every connection that leaves this machine, in notebook kernels too. Two
processes share the cores, a thread each: no test depends on a clock. Notebooks do measure, but here they are run for
what they say and not for their figures: two at a time, and one sample a measurement (tests/offline/few_samples.py).
Every stage runs even if one before it failed; the exit status is 1 if any did.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NBVAL = ["-m", "pytest", "--nbval", "--nbval-sanitize-with", "tests/nbval_sanitize.cfg", "--nbval-cell-timeout=1200"]
NBVAL += ["-p", "no:cacheprovider", "-n", "2", "--dist", "loadscope"]  # a notebook's cells stay together
TESTS = ["-m", "pytest", "tests", "-n", "2", "--dist", "loadfile"]


@dataclass(frozen=True)
class Stage:
    """One stage: what it is, and its commands (arguments of Python)."""

    name: str
    title: str
    commands: tuple[tuple[str, ...], ...]
    usual: bool = True  # part of `make test`


STAGES = [
    Stage("model", "the course's model is there", (("-m", "every_millisecond.cli", "fetch"),)),
    Stage("lint", "ruff", (("-m", "ruff", "check", "."), ("-m", "ruff", "format", "--check", "."))),
    Stage("library", "tests/, those marked long aside", ((*TESTS, "-m", "not long"),)),
    Stage("solutions", "solved exercises", ((*NBVAL, "solutions"),)),
    Stage("notebooks", "notebooks against their stored outputs", ((*NBVAL, "notebooks"),)),
    Stage("long", "the tests marked long: `make test-long`, CI", ((*TESTS, "-m", "long"),), usual=False),
]


@contextlib.contextmanager
def company(busy: bool) -> Iterator[None]:
    """A process that keeps one core busy meanwhile, if asked for."""
    if not busy:
        yield
        return
    neighbour = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        neighbour.kill()
        neighbour.wait()


def environment(stage: Stage) -> dict[str, str]:
    """The environment of a stage's processes: no network, and a scorecard and progress that are not the reader's."""
    own = os.environ | {
        "PYTHONPATH": str(ROOT / "tests" / "offline"),
        "LLM_LATENCY_SCORECARD": str(ROOT / "run" / "test-scorecard.json"),
        "LLM_LATENCY_PROGRESS": str(ROOT / "run" / "test-progress.json"),
        "OMP_NUM_THREADS": "1",
    }
    if stage.name == "model":
        del own["PYTHONPATH"]  # this one may download, once
    if stage.name == "notebooks":
        own["LLM_LATENCY_TEST_SAMPLES"] = "1"
    return own


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [stage.name for stage in STAGES]
    parser.add_argument("--only", help=f"stages, separated by commas: {', '.join(names)}")
    parser.add_argument("--busy", action="store_true", help="beside a process that keeps one core busy")
    parser.add_argument("pytest", nargs="*", help="further arguments of the library stage's pytest, after --")
    args = parser.parse_args()
    chosen = args.only.split(",") if args.only else [stage.name for stage in STAGES if stage.usual]
    if unknown := [name for name in chosen if name not in names]:
        parser.error(f"no stage {', '.join(unknown)}; expected some of {', '.join(names)}")
    results: list[tuple[Stage, float, bool]] = []
    with company(args.busy):
        for stage in (stage for stage in STAGES if stage.name in chosen):
            print(f"\n=== {stage.name}: {stage.title}", flush=True)
            begin = time.monotonic()
            extra = args.pytest if stage.name == "library" else []
            passed = all(
                subprocess.run([sys.executable, *command, *extra], cwd=ROOT, env=environment(stage)).returncode == 0
                for command in stage.commands
            )
            results.append((stage, time.monotonic() - begin, passed))
    print(
        "\n" + "\n".join(f"{s.name:10} {seconds:6.0f} s  {'passed' if ok else 'FAILED'}" for s, seconds, ok in results)
    )
    print(f"{'together':10} {sum(seconds for _, seconds, _ in results):6.0f} s")
    return 0 if all(ok for *_, ok in results) else 1


if __name__ == "__main__":
    sys.exit(main())
