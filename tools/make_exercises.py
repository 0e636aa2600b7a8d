"""Write exercises/ from solutions/ with nbgrader, as `make exercises` does. Never edit exercises/ by hand.

python tools/make_exercises.py                     # all sets
python tools/make_exercises.py 01_correct_timing   # one
"""

from __future__ import annotations

import argparse
import logging
import shutil
import sys
import tempfile
from pathlib import Path

from nbgrader.converters import GenerateAssignment
from nbgrader.coursedir import CourseDirectory
from traitlets.config import Config, PyFileConfigLoader

ROOT = Path(__file__).resolve().parents[1]


def sets() -> list[str]:
    """The names of all exercise sets."""
    return sorted(path.parent.name for path in ROOT.glob("solutions/*/*.ipynb"))


def generate(names: list[str], destination: Path) -> None:
    """Write the named sets under `destination`, replacing what is there. Raises nbgrader's NbGraderException."""
    config = PyFileConfigLoader("nbgrader_config.py", path=str(ROOT)).load_config()
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        config.merge(
            Config({"SaveCells": {"enabled": False}, "CourseDirectory": {"root": scratch}})  # no grade book needed
        )
        for name in names:
            shutil.copytree(ROOT / "solutions" / name, root / "solutions" / name, ignore=shutil.ignore_patterns(".*"))
            course = CourseDirectory(config=config, assignment_id=name)
            converter = GenerateAssignment(coursedir=course, config=config, no_database=True)
            converter.log.setLevel(logging.ERROR)
            converter.start()
            shutil.rmtree(destination / name, ignore_errors=True)
            shutil.copytree(root / "exercises" / name, destination / name)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="sets; default all")
    names = parser.parse_args().names or sets()
    generate(names, ROOT / "exercises")
    print(f"exercises/: {', '.join(names)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
