"""Install the course into the Python that runs this, and fetch its model; `make lab` and `make test` begin with it.

    python tools/set_up.py                        # what the two commands do
    python tools/set_up.py --torch-index URL      # PyTorch from another index: see "A smaller set-up" in the README

Each step says what it brings and how large it is. A second call finds most of it done; an interrupted one goes on.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OLDEST = (3, 10)  # what pyproject.toml asks for
LIMITS = ("-c", "requirements.lock")  # exact versions, for every Python from OLDEST on


def pip(*arguments: str) -> None:
    """Run pip quietly; its errors are shown, and end the set-up."""
    done = subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", *arguments], cwd=ROOT)
    if done.returncode:
        sys.exit(f"pip could not install {' '.join(arguments)}: its reason stands above. Repeat the command to go on.")


def torch_size() -> str:
    """What PyTorch's default wheel weighs here, and the way round it where it brings a GPU's libraries for nothing."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return "about 200 MB to download"
    if shutil.which("nvidia-smi"):
        return "with CUDA about 3 GB to download"
    return (
        "about 3 GB to download with CUDA, which this machine does not seem to have a use for; "
        '"A smaller set-up" in the README needs 200 MB'
    )


def has_torch() -> bool:
    try:
        importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def step(text: str) -> float:
    print(text, flush=True)
    return time.monotonic()


def done(begin: float) -> None:
    print(f"    done in {time.monotonic() - begin:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch-index", metavar="URL", help="index that PyTorch alone is taken from")
    args = parser.parse_args()
    if sys.version_info < OLDEST:
        sys.exit(f"this is Python {platform.python_version()}; the course needs 3.10 or newer")
    if args.torch_index:
        begin = step("2/3 PyTorch, from the index given")
        # Without what it needs: such an index holds few other packages, and rarely in the versions of the lock.
        pip(*LIMITS, "--no-deps", "--index-url", args.torch_index, "torch")
        done(begin)
    size = "PyTorch is there" if has_torch() else torch_size()
    begin = step(f"2/3 JupyterLab, PyTorch, transformers and the course itself ({size}; some minutes)")
    pip(*LIMITS, "-e", ".[dev,export,serve]")
    done(begin)
    begin = step("3/3 the course's model, SmolLM2-135M (94 MB to download, once; 650 MB on disk)")
    if subprocess.run([sys.executable, "-m", "every_millisecond.cli", "fetch"], cwd=ROOT).returncode:
        sys.exit("the model could not be fetched: the reason stands above. Repeat the command to go on.")
    done(begin)


if __name__ == "__main__":
    main()
