"""What works on this machine, what does not, and the remedy: behind `llm-latency doctor`."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from llm_latency import files, hardware, models


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was asked: its name, whether it works, what was found, and what to do if it does not."""

    name: str
    works: bool
    found: str
    remedy: str = ""
    needed: bool = False  # the course's default notebooks cannot do without it


def compiler() -> str | None:
    """The C++ compiler that torch.compile would use on the CPU, or None."""
    candidates = (os.environ.get("CXX"), "g++", "clang++", "cl")
    return next((found for name in candidates if name and (found := shutil.which(name))), None)


def compile_unavailable() -> str | None:
    """Why torch.compile cannot work here, or None."""
    if torch.cuda.is_available():
        return None if _version("triton") else "no triton"
    return None if compiler() else "no C++ compiler"


def checks() -> list[Check]:
    """Everything the course may use, asked of this machine itself and never guessed from a name."""
    return [_python(), _model(), _cache(), _cuda(), _sdpa(), _triton(), _flash_attn(), _compile()]


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


def _cuda() -> Check:
    if torch.cuda.is_available():
        return Check("CUDA", True, torch.cuda.get_device_name(0))
    return Check("CUDA", False, "none; the notebooks teach the same on the CPU", "nothing to do without an NVIDIA GPU")


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
    remedy = "on a CUDA machine: pip install --no-build-isolation -e '.[gpu]'; SDPA serves in its place"
    return Check("flash-attn", False, "not usable here; attention falls back to SDPA", remedy)


def _compile() -> Check:
    reason = compile_unavailable()
    if reason:
        return Check(
            "torch.compile", False, reason, "install a C++ compiler (Debian: apt install g++; macOS: xcode-select)"
        )
    return Check("torch.compile", True, "Triton" if torch.cuda.is_available() else f"C++ through {compiler()}")


def class_checks() -> list[Check]:
    """What a teacher wants to know of each seat before the class begins: space, memory, quiet cores, port, sharing."""
    free = shutil.disk_usage(files.cache_folder()).free / 1e9
    memory = (hardware.memory_bytes() or 0) / 1e9
    cores = hardware.usable_cores()
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    return [
        Check("disk", free > 3, f"{free:.0f} GB free", "free at least 3 GB", needed=True),
        Check("memory", memory >= 6, f"{memory:.0f} GB", "at least 6 GB; close other programs", needed=True),
        Check("cores", cores >= 2, f"{cores}", "timings on one core are noisy; share fewer seats per machine"),
        Check("quiet", load < 0.5 * cores, f"load {load:.1f} on {cores} cores", "close other programs before timing"),
        _port(),
        _writable(),
        _gpu_sharing(),
    ]


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


def _gpu_sharing() -> Check:
    """Whether someone else is on the GPU: then every time measured there is theirs, too."""
    if not torch.cuda.is_available():
        return Check("GPU sharing", True, "no GPU: every seat measures its own CPU")
    free, total = torch.cuda.mem_get_info()
    used = (total - free - torch.cuda.memory_reserved()) / 1e9
    modes = _nvidia_smi("compute_mode", "mig.mode.current", "utilization.gpu")
    found = f"{used:.1f} of {total / 1e9:.0f} GB used by others or the driver{'; ' + modes if modes else ''}"
    return Check("GPU sharing", used < 2, found, "one at a time when timing: docs/classroom.md, Sharing one GPU")


def _nvidia_smi(*fields: str) -> str:
    """The named facts of the first GPU as text; empty where nvidia-smi is not there."""
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
    try:
        lines = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return ""
    values = [value.strip() for value in lines[0].split(",")] if lines else []
    return ", ".join(f"{field} {value}" for field, value in zip(fields, values, strict=False))
