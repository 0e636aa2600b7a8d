"""The kernel, compiled for this very processor at its first use and kept in the cache folder.

It is built by the C++ compiler that is there, without torch's headers, in some seconds, and called through ctypes. Its
threads are those of the OpenMP runtime that torch has loaded already: of two runtimes each has a pool of threads that
spin while they wait, and both are slow.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import torch

from llm_latency import files

SOURCES = ("kernel.cpp", "kernel.h", "kernel_vectors.h")
# Contraction would round a sum differently where the compiler happens to find a fused instruction.
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-ffp-contract=off", "-Wno-psabi")
INSTALL = {
    "Linux": "install one with `sudo apt install g++`, or `conda install -c conda-forge cxx-compiler`",
    "Darwin": "install Apple's with `xcode-select --install`",
}


class KernelUnavailable(RuntimeError):
    """The kernel cannot be built or loaded here; the message is one sentence that names the reason and the remedy."""


class Matrix(ctypes.Structure):
    """As in kernel.h; so are the others."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("codes", "scales", "bias")]
    _fields_ += [(name, ctypes.c_int64) for name in ("rows", "columns", "bits")]


class Layer(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in ("attention_norm", "ffn_norm")]
    _fields_ += [(name, Matrix) for name in ("qkv", "output", "gate_up", "down")]


class Model(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_int64)
        for name in ("layers", "hidden", "heads", "kv_heads", "head_dim", "vocab", "positions", "outputs")
    ]
    _fields_ += [("eps", ctypes.c_double)]
    _fields_ += [
        (name, ctypes.c_void_p)
        for name in ("embedding", "cosines", "sines", "norm", "token_norm", "feature_norm", "layer")
    ]
    _fields_ += [("head", Matrix), ("join", Matrix)]


class Cache(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in ("keys", "values", "key_scales", "value_scales")]
    _fields_ += [("blocks", ctypes.c_int64)]


class Pass(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("rows", "wanted_rows", "table_width", "threads", "two_digits")]
    _fields_ += [
        (name, ctypes.c_void_p)
        for name in ("tokens", "positions", "tables", "wanted", "given", "features", "logits", "scratch")
    ]


def problem() -> str | None:
    """Why the kernel cannot run here, in one sentence with the remedy; None if it can, which building it has proved."""
    try:
        load()
    except KernelUnavailable as error:
        return str(error)
    return None


@functools.cache
def load(*defines: str) -> ctypes.CDLL:
    """The kernel's library, compiled if this processor, compiler and source have not met yet.

    defines: further compiler options, such as "-DLANES=4". Raises KernelUnavailable.
    """
    path = build(*defines)
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise KernelUnavailable(
            f"the kernel was built but not loaded ({error}); delete {path} and try again"
        ) from error
    library.kernel_lanes.restype = library.kernel_scratch.restype = library.kernel_pass.restype = ctypes.c_int64
    library.kernel_scratch.argtypes = [ctypes.POINTER(Model)]
    library.kernel_pass.argtypes = [ctypes.POINTER(Model), ctypes.POINTER(Cache), ctypes.POINTER(Pass)]
    return library


def build(*defines: str) -> Path:
    """Path of the library, built if need be. Raises KernelUnavailable."""
    system = platform.system()
    if system not in INSTALL:
        raise KernelUnavailable(
            f"the kernel is built on Linux and macOS, not on {system}; use WSL or a container there"
        )
    if "musl" in (sysconfig.get_config_var("HOST_GNU_TYPE") or ""):
        raise KernelUnavailable("the kernel needs glibc and this system has musl; use a Debian-based image")
    command = compiler()
    folder = _private_folder()
    version = _version(command)
    compile_flags, link_flags = _openmp(version, system)
    flags = [*FLAGS, f"-m{'arch' if platform.machine() in ('x86_64', 'AMD64') else 'cpu'}=native", *compile_flags]
    source = Path(__file__).parent
    parts = [*command, version, *flags, *link_flags, *defines, _processor()]
    digest = hashlib.sha256("\0".join(parts).encode())
    for name in SOURCES:
        digest.update((source / name).read_bytes())
    library = folder / f"kernel-{digest.hexdigest()[:24]}.so"
    if library.exists():
        _check_owner(library)
        return library
    with tempfile.TemporaryDirectory(dir=folder, prefix=".build-") as work:  # beside it: a rename is atomic
        made, unlinked = Path(work) / library.name, Path(work) / "kernel.o"
        _compile([*command, *flags, *defines, "-c", str(source / SOURCES[0]), "-o", str(unlinked)])
        _compile([*command, "-shared", str(unlinked), "-o", str(made), *link_flags])
        made.chmod(0o700)
        os.replace(made, library)  # of several processes the last one wins; all have built the same
    return library


def compiler() -> list[str]:
    """The command of the C++ compiler: $CXX, g++, clang++, or the one of this conda environment.

    Raises KernelUnavailable without one.
    """
    named = shlex.split(os.environ.get("CXX", ""))
    conda = sorted(str(path) for path in (Path(sys.prefix) / "bin").glob("*-conda-*-g++"))
    for command in (named, *([name] for name in ("g++", *conda, "clang++"))):
        if command and shutil.which(command[0]):
            return command
    raise KernelUnavailable(f"there is no C++ compiler to build the kernel with; {INSTALL[platform.system()]}")


def _compile(command: list[str]) -> None:
    # Messages in English whatever the learner's language; one line of them is shown.
    done = _run(command)
    if done.returncode:
        lines = (
            [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines() or ["no message"]
        )
        raise KernelUnavailable(
            f"{command[0]} does not build the kernel ({lines[0].strip()}); {INSTALL[platform.system()]}"
        )


def _run(command: list[str]) -> subprocess.CompletedProcess:
    try:
        return subprocess.run(
            command, capture_output=True, text=True, errors="replace", check=False, env={**os.environ, "LC_ALL": "C"}
        )
    except OSError as error:
        raise KernelUnavailable(
            f"{command[0]} cannot be run ({error.strerror}); {INSTALL[platform.system()]}"
        ) from error


def _version(command: list[str]) -> str:
    done = _run([*command, "--version"])
    if done.returncode:
        raise KernelUnavailable(f"{command[0]} --version fails, so it is no compiler; {INSTALL[platform.system()]}")
    return done.stdout


def _openmp(version: str, system: str) -> tuple[list[str], list[str]]:
    """Flags for compiling and for linking, such that the runtime that torch has loaded is the only one."""
    if system == "Darwin":
        library = Path(torch.__file__).parent / "lib" / "libomp.dylib"
        if not library.exists():
            raise KernelUnavailable(
                "this torch has no libomp for the kernel's threads; install PyTorch's own wheel (`pip install torch`)"
            )
        return ["-Xpreprocessor", "-fopenmp"], [str(library)]
    gomp = _loaded_libgomp()
    if gomp is None or "clang" in version:  # clang's code needs its own libomp: right, but slower
        return ["-fopenmp"], ["-fopenmp"]
    return ["-fopenmp"], [gomp]  # by its path, hence under its own name, by which the loader knows it again


def _loaded_libgomp() -> str | None:
    """Path of the libgomp in this process's memory, which torch has brought; None without one."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    paths = [line.split(maxsplit=5)[5] for line in lines if len(line.split(maxsplit=5)) == 6]
    return next((path for path in paths if Path(path).name.startswith("libgomp")), None)


def _processor() -> str:
    """What `-march=native` looks at: a library from a processor with other instructions must not be found."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() + platform.platform()
    return "".join(sorted({line for line in lines if line.startswith(("flags", "Features", "model name", "CPU part"))}))


def _private_folder() -> Path:
    """Where libraries are kept: `kernel` in the cache folder, or, if that is not for us to write, a folder that lasts
    as long as this process. Raises KernelUnavailable for one that others may write: a library is code."""
    folder = files.cache_folder() / "kernel"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError:
        pass
    if folder.exists():
        _check_owner(folder)
    if not os.access(folder, os.W_OK):
        folder = _temporary_folder()
    return folder


@functools.cache
def _temporary_folder() -> Path:
    folder = tempfile.mkdtemp(prefix="llm-latency-kernel-")  # mode 0700
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def _check_owner(path: Path) -> None:
    """Raise KernelUnavailable if someone else could put another library there."""
    for place, forbidden in ((path, stat.S_IWGRP | stat.S_IWOTH), (path.parent, stat.S_IWOTH)):
        status = place.stat()
        if status.st_mode & forbidden and not (place != path and status.st_mode & stat.S_ISVTX):
            raise KernelUnavailable(
                f"others may write to {place}, and a library is code; take that away with `chmod go-w {place}`"
            )
    if path.stat().st_uid not in (os.geteuid(), 0):
        raise KernelUnavailable(
            f"{path} belongs to another user, and a library is code; set LLM_LATENCY_CACHE to a folder of your own"
        )


# -- threads ----------------------------------------------------------------------------------------------------------

_forked = False


def _remember_fork() -> None:
    global _forked
    _forked = True


os.register_at_fork(after_in_child=_remember_fork)


def usable_threads(wanted: int) -> int:
    """`wanted`, or 1 in a process made by fork: OpenMP's threads stay behind in the parent, and waiting for them would
    last for ever. The results are the same to the bit."""
    return 1 if _forked else wanted
