"""What works on this machine, what does not, and the remedy: behind `llm-latency doctor`."""

from __future__ import annotations

import datetime
import functools
import importlib.metadata
import json
import os
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

import torch
from rich.markup import escape
from rich.table import Table

from every_millisecond import gpu_card, openmp
from every_millisecond.machine_check import Check, Row
from llm_latency import files, hardware, models
from llm_latency.engine import kernel_library
from llm_latency.host import memory_bytes, usable_cores

QUIET = 0.8  # of the cores that this process may use must be free


# What torch.compile's generated code asks of a compiler on the CPU: C++17, a shared library, Python's headers.
PROGRAM = """#include <Python.h>
#include <cmath>
extern "C" double answer(double x) { if constexpr (true) return std::sqrt(x); }
"""


def compiler() -> str | None:
    """The C++ compiler that torch.compile would use on the CPU, or None."""
    candidates = (os.environ.get("CXX"), "g++", "clang++", "cl")
    return next((found for name in candidates if name and (found := shutil.which(name))), None)


@functools.cache
def _compiler_fails(found: str) -> str | None:
    """Why a compiler cannot build a small library with Python's headers, or None: it is tried, not believed."""
    if Path(found).stem == "cl":
        return None  # MSVC must be called from its own prompt, where torch finds it
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "answer.cpp"
        source.write_text(PROGRAM)
        flags = ["-std=c++17", "-shared", "-fPIC", f"-I{sysconfig.get_paths()['include']}"]
        flags += ["-undefined", "dynamic_lookup"] if sys.platform == "darwin" else []
        command = [found, *flags, str(source), "-o", str(source.with_suffix(".so"))]
        try:
            done = subprocess.run(command, capture_output=True, timeout=120, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"{found} does not run: {error}"
        if done.returncode == 0:
            return None
    said = done.stderr.decode("utf-8", "replace")
    if "Python.h" in said:
        return f"{found} works, but Python's headers are missing"
    lines = [line for line in said.splitlines() if line.strip()] or [f"it ends with code {done.returncode}"]
    return f"{found} cannot compile: {next((line for line in lines if 'error' in line), lines[-1])}"


def compile_unavailable() -> str | None:
    """Why torch.compile cannot work here, or None."""
    if torch.cuda.is_available():
        return None if _version("triton") else "no triton"
    if " " in torch.__file__:
        return (
            "PyTorch lies below a folder with a blank in its name, and torch.compile calls the compiler without quotes"
        )
    found = compiler()
    return _compiler_fails(found) if found else "no C++ compiler"


def checks() -> list[Check]:
    """Everything the course may use, asked of this machine itself and never guessed from a name."""
    return [*(row.check() for row in ROWS), *gpu_card.checks()]


def class_checks() -> list[Check]:
    """What a teacher wants to know of each seat before the class begins: space, memory, cores, port."""
    return [row.check() for row in CLASS_ROWS]


def ceilings(*, refresh: bool = False) -> tuple[hardware.Ceilings | None, Check]:
    """This machine's ceilings, and whether they could be had."""
    try:
        found = hardware.ceilings(refresh=refresh)
    except Exception as error:
        remedy = "llm-latency doctor --refresh measures them anew"
        return None, Check("ceilings", False, f"{type(error).__name__}: {error}", remedy, needed=True)
    return found, Check("ceilings", True, f"measured with {found.threads} threads")


def table(found: list[Check]) -> Table:
    """The answers as a rich table."""
    shown = Table(title="What works here", title_justify="left")
    for header in ("what", "works", "found", "remedy"):
        shown.add_column(header, overflow="fold")
    for check in found:
        works = "yes" if check.works else "NO" if check.needed else "no"
        shown.add_row(check.name, works, escape(check.found), "" if check.works else escape(check.remedy))
    return shown


def limits_table(c: hardware.Ceilings) -> Table:
    """The measured ceilings as a rich table."""
    shown = Table(title=escape(f"Measured ceilings of {c.name}, {c.threads} threads"), title_justify="left")
    for header in ("what", "float32", *[name for name in c.gemv_gbps if name != "float32"]):
        shown.add_column(header, justify="right")
    shown.add_row("memory read / copy (GB/s)", f"{c.read_gbps:.1f} / {c.copy_gbps:.1f}")
    shown.add_row("matrix x vector (GB/s)", *(f"{v:.1f}" for v in c.gemv_gbps.values()))
    rates = [c.matmul_gflops.get(name) for name in c.gemv_gbps]
    shown.add_row("matrix x matrix (GFLOP/s)", *("-" if rate is None else f"{rate:.0f}" for rate in rates))
    return shown


def report(found: list[Check], limits: hardware.Ceilings | None) -> dict:
    """All of it for JSON, to be attached to an issue: the home folder's name is left out."""
    try:
        facts = hardware.machine_facts()
    except Exception as error:
        facts = {"error": f"{type(error).__name__}: {error}"}
    whole = {"date": datetime.date.today().isoformat(), "machine": facts, "checks": [asdict(check) for check in found]}
    whole["ceilings"] = None if limits is None else asdict(limits)
    home = os.path.expanduser("~")
    return json.loads(json.dumps(whole).replace(json.dumps(home)[1:-1], "~")) if len(home) > 1 else whole


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _python() -> Check:
    version = ".".join(map(str, sys.version_info[:3]))
    found = f"Python {version}, torch {torch.__version__}, transformers {_version('transformers')}"
    return Check("python", sys.version_info >= (3, 10), found, "install Python 3.10 or newer", needed=True)


def _model() -> Check:
    profile, reason = models.choose_profile()
    found = f"{profile.name} ({reason})"
    if profile.target.kind == "bundled":
        folder = models.prepared_folder()
        found += f"; {'ready in ' + str(folder) if folder else 'not fetched yet'}"
        return Check("model", folder is not None, found, "llm-latency fetch", needed=True)
    return Check("model", True, f"{found}; {profile.note}")


def _cache() -> Check:
    folder = files.cache_folder()
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        return Check("cache folder", False, f"{folder}: {error.strerror}", "set LLM_LATENCY_CACHE to a folder of yours")
    return Check("cache folder", True, f"{folder}, {shutil.disk_usage(folder).free / 1e9:.0f} GB free")


def _sdpa() -> Check:
    q = torch.ones(1, 1, 2, 8)
    torch.nn.functional.scaled_dot_product_attention(q, q, q)
    if not torch.cuda.is_available():
        return Check("SDPA", True, "CPU kernel")
    on = [name for name in ("flash", "mem_efficient", "cudnn") if getattr(torch.backends.cuda, f"{name}_sdp_enabled")()]
    return Check("SDPA", True, f"CUDA kernels enabled: {', '.join(on)}")


def _triton() -> Check:
    version = _version("triton")
    if version is None:
        return Check(
            "Triton", False, "not installed", "pip install triton (Linux on x86-64); its cells are skipped here"
        )
    how = "compiles for the GPU" if torch.cuda.is_available() else "runs in its interpreter on the CPU (slow, exact)"
    return Check("Triton", True, f"{version}, {how}")


def _flash_attn() -> Check:
    for package in ("flash-attn", "flash-attn-4"):
        version = _version(package)
        if version and torch.cuda.is_available():
            return Check("flash-attn", True, f"{package} {version}")
    remedy = "on a CUDA machine with nvcc: pip install --no-build-isolation -e '.[gpu]'; SDPA serves in its place"
    return Check("flash-attn", False, "not usable here; attention falls back to SDPA", remedy)


def _compile() -> Check:
    reason = compile_unavailable()
    if reason:
        remedy = (
            "install a C++ compiler and Python's headers (Debian: apt install g++ python3-dev; macOS: xcode-select)"
        )
        if " " in torch.__file__:
            remedy = "move the course to a folder whose path has no blank, and set it up there"
        return Check("torch.compile", False, reason, remedy)
    return Check("torch.compile", True, "Triton" if torch.cuda.is_available() else f"C++ through {compiler()}")


def _kernel() -> Check:
    """The decoder that is one C++ function, proved by building it; the reason that it gives names the remedy."""
    reason = kernel_library.problem()
    if reason:
        found, _, remedy = reason.rpartition("; ")
        return Check("one kernel", False, found, f"{remedy}; until then FastDecoder serves")
    lanes = kernel_library.load().kernel_lanes()
    return Check("one kernel", True, f"built for this processor, which adds {lanes} numbers at once")


def _quiet() -> Check:
    """Whether something else computes here: then every time measured is its, too."""
    cores, busy = usable_cores(), _busy_cores()
    if busy is None:
        return Check("quiet", True, "this system does not say what else it computes")
    free = (os.cpu_count() or cores) - busy
    found = f"{busy:.1f} of {os.cpu_count()} cores busy with something else"
    remedy = "close other programs, browsers and notebooks among them, or expect slower and noisier figures"
    return Check("quiet", free >= QUIET * cores, found, remedy)


def _busy_cores(seconds: float = 0.5) -> float | None:
    """Cores that other processes, or other guests of the host, keep busy, sampled; None where it cannot be told."""

    def sample() -> tuple[float, float]:
        words = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
        user, nice, system, _idle, _waiting, *others = map(int, words)
        own = os.times()
        return (user + nice + system + sum(others)) / os.sysconf("SC_CLK_TCK"), own.user + own.system

    try:
        all_before, own_before = sample()
        began = time.monotonic()
        time.sleep(seconds)
        all_after, own_after = sample()
    except (OSError, ValueError, AttributeError):
        return os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    return max(0.0, all_after - all_before - (own_after - own_before)) / (time.monotonic() - began)


def _preload() -> Check:
    if openmp.torch_libgomp() is None or openmp.preloadable() is not None:
        return Check("one OpenMP", True, "compiled code and torch share one pool of threads")
    remedy = "install into a folder without a space, or set LLM_LATENCY_CACHE to one; else compiled steps are slower"
    return Check("one OpenMP", False, f"{openmp.torch_libgomp()} cannot be preloaded", remedy)


def _disk() -> Check:
    free = shutil.disk_usage(files.cache_folder()).free / 1e9
    return Check("disk", free > 3, f"{free:.0f} GB free", "free at least 3 GB", needed=True)


def _memory() -> Check:
    memory = (memory_bytes() or 0) / 1e9
    return Check("memory", memory >= 6, f"{memory:.0f} GB", "at least 6 GB; close other programs", needed=True)


def _cores() -> Check:
    cores = usable_cores()
    return Check("cores", cores >= 2, f"{cores}", "timings on one core are noisy; share fewer seats per machine")


def _port(first: int = 8888, tries: int = 20) -> Check:
    """JupyterLab takes the first free port from 8888 on."""
    for port in range(first, first + tries):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        own = (Path.home() / ".jupyter" / "jupyter_server_config.py").exists()
        return Check("port", True, f"{port}{'; an own jupyter_server_config.py may choose another' if own else ''}")
    return Check("port", False, f"none free from {first} on", "close other Jupyter servers, or --port=...", needed=True)


def _writable() -> Check:
    """Learners save their notebooks where they lie."""
    here = Path.cwd()
    try:
        with tempfile.TemporaryFile(dir=here):
            return Check("write", True, str(here))
    except OSError as error:
        return Check("write", False, f"{here}: {error.strerror}", "copy the course to a folder of yours", needed=True)


CACHE_REMEDY = "set LLM_LATENCY_CACHE to a folder of yours"
ROWS = (
    Row("python", _python, "pip install --upgrade --force-reinstall transformers", needed=True),
    Row("model", _model, "unset LLM_LATENCY_PROFILE or set it to a known profile; llm-latency fetch", needed=True),
    Row("cache folder", _cache, CACHE_REMEDY, needed=True),
    Row("SDPA", _sdpa, "pip install --upgrade torch", needed=True),
    Row("Triton", _triton, "pip install --force-reinstall triton; its cells are skipped here"),
    Row("flash-attn", _flash_attn, "SDPA serves in its place"),
    Row("torch.compile", _compile, "install a C++ compiler and Python's headers"),
    Row("one kernel", _kernel, "install a C++ compiler; until then FastDecoder serves"),
    Row("one OpenMP", _preload, CACHE_REMEDY),
    Row("quiet", _quiet, "nothing to do; expect noisier figures"),
)
CLASS_ROWS = (
    Row("disk", _disk, CACHE_REMEDY, needed=True),
    Row("memory", _memory, "at least 6 GB", needed=True),
    Row("cores", _cores, "share fewer seats per machine"),
    Row("port", _port, "jupyter lab --port=...", needed=True),
    Row("write", _writable, "copy the course to a folder of yours", needed=True),
)
