"""Which attention backends work on this machine, and if one does not, why. Asked of the machine, not guessed."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
from collections.abc import Callable

import torch

BACKENDS = ("reference", "flash", "triton", "sdpa", "flash_attn")


@functools.lru_cache
def flash_attn_function() -> tuple[Callable | None, str]:
    """The installed flash-attn's function, with a name for it, or None and the reason why there is none.

    Release 2.x is the package `flash_attn`; 4.x, written in CuTe, is `flash_attn.cute`.
    """
    if not torch.cuda.is_available():
        return None, "flash-attn runs on CUDA only, and torch sees no CUDA device here"
    if importlib.util.find_spec("flash_attn") is None:
        return None, "flash-attn is not installed; on a CUDA machine: pip install --no-build-isolation -e '.[gpu]'"
    reasons = []
    for module, name in (("flash_attn", "flash-attn 2"), ("flash_attn.cute", "flash-attn 4 (CuTe)")):
        try:
            return importlib.import_module(module).flash_attn_func, name
        except (ImportError, AttributeError, OSError, RuntimeError) as error:  # built for another torch or GPU
            reasons.append(f"{module}: {error}")
    return None, "flash-attn is installed but does not load: " + "; ".join(reasons)


def triton_problem(device: torch.device | None = None) -> str | None:
    """Why the Triton kernels cannot run on tensors of this device (None: this machine's default), or None."""
    if importlib.util.find_spec("triton") is None:
        return (
            "Triton is not installed. It comes with torch for Linux on x86; on macOS, Windows and most Arm machines "
            "there is none, and the other backends do the same work"
        )
    cuda = torch.cuda.is_available()
    device = device or torch.device("cuda" if cuda else "cpu")
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        if major < 7:
            return f"Triton needs CUDA capability 7.0 or more; this device has {major}.{minor}"
    elif device.type != "cpu":
        return f"the Triton kernels run on CUDA, or interpreted on the CPU; the tensors are on {device}"
    elif cuda and os.environ.get("TRITON_INTERPRET", "0") in ("", "0"):
        return (
            "the tensors are on the CPU, but Triton compiles for this machine's GPU; move them there, or set "
            "TRITON_INTERPRET=1 before starting Python"
        )
    return None


def backends() -> dict[str, str | None]:
    """Every backend's name, with None if it works on this machine's default device, else the reason why not."""
    missing = flash_attn_function()
    return {
        "reference": None,
        "flash": None,
        "triton": triton_problem(),
        "sdpa": None,
        "flash_attn": None if missing[0] else missing[1],
    }
