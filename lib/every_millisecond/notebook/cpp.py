"""A few lines of C++ from a notebook's cell, compiled and loaded, so that a learner can time them beside Python."""

from __future__ import annotations

import atexit
import ctypes
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

from llm_latency.engine import kernel_library
from llm_latency.engine.kernel_library import KernelUnavailable


def build(source: str) -> ctypes.CDLL:
    """The library that a C++17 source makes, optimised for this processor; call its `extern "C"` functions.

    It is built by the compiler that builds the kernel, in a folder of this process alone. Raises KernelUnavailable
    where there is none, or none that works, and ValueError with the compiler's first complaint for a source that does
    not compile.
    """
    reason = kernel_library.problem()
    if reason:
        raise KernelUnavailable(reason)
    folder = Path(tempfile.mkdtemp(prefix="every-millisecond-cpp-"))  # mode 0700
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    written, made = folder / "cell.cpp", folder / "cell.so"
    written.write_text(source, encoding="utf-8")
    native = f"-m{'arch' if platform.machine() in ('x86_64', 'AMD64') else 'cpu'}=native"
    # Not -O3: GCC then unrolls a loop over the 16 bytes of a group before it thinks of vectors: four times slower.
    flags = ["-std=c++17", "-O2", "-ftree-vectorize", native, "-fPIC", "-shared", "-pthread"]
    command = [*kernel_library.compiler(), *flags, str(written), "-o", str(made)]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode:
        complaints = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
        raise ValueError(f"the C++ does not compile: {(complaints or ['no message'])[0].replace(str(folder), '')}")
    return ctypes.CDLL(str(made))
