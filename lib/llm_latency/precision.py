"""Which 16-bit format this machine computes in, asked of the device and never guessed from its name."""

from __future__ import annotations

import torch

from llm_latency import hardware


def bf16_is_native(device: str | torch.device | None = None) -> bool:
    """Whether the device itself multiplies BF16, rather than widening every number to FP32 first.

    A GPU without BF16 units (compute capability below 8.0) still accepts BF16 tensors and emulates them, so that "it
    runs" proves nothing. On a CPU, oneDNN knows: x86 needs AVX512-BF16 or AMX, Arm needs its BF16 extension.
    """
    device = hardware.check_device(device)
    if device.type == "cuda":
        with torch.cuda.device(device):
            return torch.cuda.is_bf16_supported(including_emulation=False)
    return bool(torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def half_dtype(device: str | torch.device | None = None) -> torch.dtype:
    """The 16-bit dtype to load a model in: BF16, or FP16 on a GPU without BF16 units.

    On a CPU it is BF16 even where that is widened to FP32 in the registers: the bytes read are halved all the same, and
    FP16 would be widened too.
    """
    device = hardware.check_device(device)
    return torch.float16 if device.type == "cuda" and not bf16_is_native(device) else torch.bfloat16


def dtype_name(dtype: torch.dtype) -> str:
    """The name by which `hardware` and `roofline` know a dtype. Raises ValueError for one they do not know."""
    for name, known in hardware.DTYPES.items():
        if known == dtype:
            return name
    raise ValueError(f"dtype={dtype!r}; expected one of {', '.join(hardware.DTYPES)}")
