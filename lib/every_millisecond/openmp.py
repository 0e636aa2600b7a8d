"""One OpenMP runtime per process.

PyTorch's CPU wheel brings its own libgomp, and code that torch.compile builds links the system's. Each keeps a pool of
threads that spin while they wait, so on few cores a compiled step then takes several times longer than an eager one.
A process that is started with torch's own libgomp preloaded has only that one.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path


def torch_libgomp() -> Path | None:
    """The libgomp that the installed torch brings along, or None: not Linux, or a build that uses the system's."""
    if platform.system() != "Linux":
        return None
    torch = find_spec("torch")
    if torch is None or torch.origin is None:
        return None
    package = Path(torch.origin).parent
    # The CPU wheel keeps it in torch/lib; the Arm and CUDA wheels, repaired by auditwheel, in torch.libs beside it.
    found = sorted([*(package / "lib").glob("libgomp*.so*"), *package.with_name("torch.libs").glob("libgomp*.so*")])
    return found[0] if found else None


def process_environment(base: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment in which to start a fresh Python process that uses torch: `base` (None: this process's own) with
    torch's own libgomp preloaded. What was preloaded before stays; called twice, it changes nothing more."""
    environment = dict(os.environ if base is None else base)
    library = torch_libgomp()
    if library is not None:
        preloaded = environment.get("LD_PRELOAD", "").replace(":", " ").split()
        if str(library) not in preloaded:
            environment["LD_PRELOAD"] = " ".join([str(library), *preloaded])
    return environment


def loaded_runtimes() -> list[str]:
    """File names of the OpenMP runtimes in this process's memory (Linux; elsewhere empty). More than one is a fault."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    paths = {line.split(maxsplit=5)[5] for line in lines if len(line.split(maxsplit=5)) == 6}
    names = ("libgomp", "libomp", "libiomp5")
    return sorted(path for path in paths if Path(path).name.startswith(names))


def run_python(*arguments: str, **options) -> subprocess.CompletedProcess:
    """`subprocess.run` of this Python with `arguments`, in `process_environment()`; options as subprocess.run takes."""
    return subprocess.run([sys.executable, *arguments], env=process_environment(options.pop("env", None)), **options)
