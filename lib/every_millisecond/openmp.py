"""One OpenMP runtime per process.

PyTorch's CPU wheel brings its own libgomp, and code that torch.compile builds links the system's. Each keeps a pool of
threads that spin while they wait, so on few cores a compiled step then takes several times longer than an eager one.
A process that is started with torch's own libgomp preloaded has only that one.

And threads that soon wait asleep. By default one that waits for another spins for long, and on a core that a browser
wants, too, it keeps the very thread from working for which it waits. Measured on two cores with one of them taken by
another process, medians of two runs: a step of the transformers model 143 ms, and 63 ms after GOMP_SPINCOUNT=1000; of
the fast decoder 135 and 53; with both cores free 66 and 64, 57 and 55 (2026-11-30, EPYC, AVX2). Not to spin at all
(OMP_WAIT_POLICY=PASSIVE) gives torch the same and costs whoever meets at a barrier after every operator: a step of
llama.cpp took 31 to 46 ms instead of 10 to 12 on the free cores, and 10 to 16 with a thousand spins.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from llm_latency import files
from llm_latency.host import usable_cores

WAITING = {"GOMP_SPINCOUNT": "1000"}  # the Makefile says the same; it counts only before torch is imported
_SEPARATORS = {" ", ":"}  # of names in LD_PRELOAD


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


def preloadable() -> str | None:
    """torch's libgomp as LD_PRELOAD can name it: where its path has a blank or a colon, which separate names there, by
    a link in the cache folder. None if there is no such library, or no such name either."""
    library = torch_libgomp()
    if library is None or not _SEPARATORS & set(str(library)):
        return None if library is None else str(library)
    try:
        link = files.cache_folder() / library.name
        if not link.exists() or not link.samefile(library):
            fresh = link.with_name(f"{link.name}.{os.getpid()}")
            fresh.symlink_to(library)
            os.replace(fresh, link)
    except (OSError, RuntimeError):
        return None
    return None if _SEPARATORS & set(str(link)) else str(link)


def process_environment(base: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment in which to start a fresh Python process that uses torch: `base` (None: this process's own) with
    torch's own libgomp preloaded, and as many threads as a container grants where that is fewer than it shows; its
    threads do not spin for long. What was preloaded or chosen before stays; called twice, it changes nothing more."""
    environment = WAITING | dict(os.environ if base is None else base)
    if usable_cores() < (os.cpu_count() or 1):
        environment.setdefault("OMP_NUM_THREADS", str(usable_cores()))
    library = preloadable()
    if library is not None:
        preloaded = environment.get("LD_PRELOAD", "").replace(":", " ").split()
        if library not in preloaded:
            environment["LD_PRELOAD"] = " ".join([library, *preloaded])
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
