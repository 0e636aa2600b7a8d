"""Symmetric integer quantisation: plain functions on tensors, no classes, no state.

A group of numbers shares one scale, chosen so that its largest magnitude lands on the largest code:

    scale = max|x| / (2^(bits - 1) - 1),    code = round(x / scale),    x is read back as code * scale

so the error is at most half a scale. Zero is always exact, because there is no offset. A group of 8-bit codes runs from
-127 to 127: the code -128 would have no mirror image.

Scales are BF16. It has the exponents of FP32, so the scale of a tiny group cannot underflow to zero as it can in FP16
(there a group whose largest value is 1e-6 has a scale of 8e-9, below the smallest FP16 number), and it takes half the
bytes of FP32. Its 8 bits of precision cost nothing: codes are computed from the scale as it is stored.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

SCALE_DTYPE = torch.bfloat16
_SMALLEST_SCALE = torch.finfo(SCALE_DTYPE).tiny  # a group of zeros gets this scale, and so codes of zero, not 0 / 0


def largest_code(bits: int) -> int:
    """The largest code of a symmetric format: 127 for 8 bits, 7 for 4, 1 for 2.

    Raises TypeError for anything but an int, ValueError outside 2 to 8 (the codes are stored as int8).
    """
    if isinstance(bits, bool) or not isinstance(bits, int):
        raise TypeError(f"bits={bits!r}; expected an int")
    if not 2 <= bits <= 8:
        raise ValueError(f"bits={bits}; expected 2 to 8")
    return 2 ** (bits - 1) - 1


def quantize(x: Tensor, *, dim: int, bits: int = 8) -> tuple[Tensor, Tensor]:
    """Quantise x with one scale for all numbers along `dim`.

    For keys or values [batch, heads, seq, head_dim], dim=-1 is one scale per token, dim=-2 one scale per channel.

    Returns (codes, scales): codes int8 in x's shape, scales BF16 in x's shape with 1 at `dim`.

    Raises TypeError if x is not floating point, ValueError for NaN or infinity, an empty `dim`, or `bits` out of range.
    """
    largest_code(bits)
    if not x.is_floating_point():
        raise TypeError(f"x is {x.dtype}; expected a floating-point tensor")
    if x.shape[dim] == 0:
        raise ValueError(f"x has shape {list(x.shape)}; dimension {dim} is empty, so there is nothing to scale by")
    check_finite(x, "x")
    codes, scales = quantize_finite(x, dim=dim, bits=bits)
    return codes.to(torch.int8), scales


def check_finite(x: Tensor, name: str) -> None:
    """Raise ValueError if x holds NaN or infinity. On CUDA the answer is waited for."""
    # A sum is one operation where isfinite and all are five, and a NaN or an infinity cannot leave a sum finite.
    if not math.isfinite(x.sum(dtype=torch.float32)) and not bool(torch.isfinite(x).all()):
        raise ValueError(f"{name} holds NaN or infinity; expected finite numbers")


def quantize_finite(x: Tensor, *, dim: int, bits: int = 8) -> tuple[Tensor, Tensor]:
    """`quantize` without its checks, for a caller that has made them. The codes are whole numbers, but still FP32."""
    top = largest_code(bits)
    largest = x.abs().amax(dim=dim, keepdim=True)
    if x.dtype == torch.float16:
        largest = largest.float()  # dividing in FP16 would underflow
    scales = (largest / top).to(SCALE_DTYPE).clamp_(min=_SMALLEST_SCALE)
    # Rounding a scale to BF16 can make it smaller by 1 part in 512: 127 then becomes 127.25, which still rounds to 127.
    return torch.div(x, scales.float()).round_(), scales


def dequantize(codes: Tensor, scales: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Read codes back: codes * scales, computed in FP32 and rounded once to `dtype`. scales broadcast to the codes."""
    out = torch.empty(codes.shape, dtype=dtype, device=codes.device)
    dequantize_into(out, codes, scales)
    return out


def dequantize_into(out: Tensor, codes: Tensor, scales: Tensor) -> None:
    """`dequantize` into a tensor that is there already, of the codes' shape."""
    x = codes.to(torch.float32).mul_(scales.float())  # converting first is much faster than a product of mixed types
    if out.dtype == torch.float16:
        # A scale rounded up can lift the largest number of a group just beyond FP16's 65504.
        x.clamp_(-65504.0, 65504.0)
    out.copy_(x)


def split_groups(x: Tensor, group_size: int, *, dim: int) -> Tensor:
    """View x [..., n, ...] as [..., n / group_size, group_size, ...] at `dim`, so that each group can have its scale.

    Raises ValueError if the size of `dim` is no multiple of `group_size`.
    """
    if isinstance(group_size, bool) or not isinstance(group_size, int):
        raise TypeError(f"group_size={group_size!r}; expected an int")
    if group_size < 1 or x.shape[dim] % group_size:
        raise ValueError(
            f"group_size={group_size} does not divide the {x.shape[dim]} of dimension {dim} in shape {list(x.shape)}"
        )
    return x.unflatten(dim, (x.shape[dim] // group_size, group_size))
