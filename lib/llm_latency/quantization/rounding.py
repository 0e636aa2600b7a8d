"""Rounding numbers to a few bits, and back: plain functions, no kernels, no state.

Symmetric, for INT8 weights and for cached keys and values: a group of numbers (a row of a weight, or one token's key)
shares one scale, chosen so that its largest magnitude lands on the largest code:

    scale = max|x| / (2 ** (bits - 1) - 1),    code = round(x / scale),    x is read back as code * scale

so the error is at most half a scale. Zero is always exact, because there is no offset. A group of 8-bit codes runs from
-127 to 127: the code -128 would have no mirror image.

In blocks, for INT4 weights: each block of, say, 32 numbers along a row has a scale and a zero of its own. `zero` is no
code but a number, the one that the middle code stands for, so all codes are used even if the block is not centred on 0:

    x is read back as (code - 2 ** (bits - 1)) * scale + zero

PyTorch's packed INT4 kernels use this grid; GGUF's Q4_1 stores the block's minimum in place of the zero.

Scales are BF16. It has the exponents of FP32, so the scale of a tiny group cannot underflow to zero as it can in FP16
(there a group whose largest value is 1e-6 has a scale of 8e-9, below the smallest FP16 number), and it takes half the
bytes of FP32. Its 8 bits of precision cost little: codes are computed from the scale as it is stored.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from llm_latency.arguments import check_count

SCALE_DTYPE = torch.bfloat16
WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def largest_code(bits: int) -> int:
    """The largest code of a symmetric format: 127 for 8 bits, 7 for 4, 1 for 2.

    Raises TypeError for anything but an int, ValueError outside 2 to 8 (the codes are stored as int8).
    """
    return 2 ** (check_count("bits", bits, 2, 8) - 1) - 1


# -- symmetric ----------------------------------------------------------------------------------------------------


def round_symmetric(
    x: Tensor, *, dim: int, top: int = 127, scale_dtype: torch.dtype = SCALE_DTYPE
) -> tuple[Tensor, Tensor]:
    """Round x to the codes -top..top, with one scale for all numbers along `dim`. Arguments are not checked.

    Returns (codes, scales): codes in x's shape, whole numbers but still FP32; scales in x's shape with 1 at `dim`. A
    group that holds NaN or infinity gets a scale that is NaN or infinite, and all of it is read back as NaN.
    """
    largest = x.abs().amax(dim=dim, keepdim=True)
    if x.dtype == torch.float16:
        largest = largest.float()  # dividing in FP16 would underflow
    # A group of zeros gets the smallest normal scale, so its codes are 0 and not 0 / 0.
    scales = (largest / top).to(scale_dtype).clamp_(min=torch.finfo(scale_dtype).tiny)
    # Rounding a scale to BF16 can make it smaller by 1 part in 512: 127 then becomes 127.25, which still rounds to 127.
    return torch.div(x, scales.float()).round_(), scales


def dequantize(codes: Tensor, scales: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """codes * scales, computed in FP32 and rounded once to `dtype`. scales broadcast to the codes."""
    out = torch.empty(codes.shape, dtype=dtype, device=codes.device)
    dequantize_into(out, codes, scales)
    return out


def dequantize_into(out: Tensor, codes: Tensor, scales: Tensor) -> None:
    """`dequantize` into an existing tensor of the codes' shape."""
    x = codes.to(torch.float32).mul_(scales.float())  # much faster than multiplying mixed dtypes
    if out.dtype == torch.float16:
        # A scale rounded up can lift the largest number of a group just beyond FP16's 65504.
        x.clamp_(-65504.0, 65504.0)
    out.copy_(x)


def quantize_symmetric(x: Tensor, *, dim: int, bits: int = 8) -> tuple[Tensor, Tensor]:
    """`round_symmetric` with its arguments checked: codes int8 in x's shape, scales BF16 with 1 at `dim`.

    For keys or values [batch, heads, seq, head_dim], dim=-1 is one scale per token, dim=-2 one scale per channel.

    Raises TypeError if x is not floating point, ValueError for NaN or infinity, an empty `dim`, or `bits` out of range.
    """
    top = largest_code(bits)
    if not x.is_floating_point():
        raise TypeError(f"x is {x.dtype}; expected a floating-point tensor")
    if x.shape[dim] == 0:
        raise ValueError(f"x has shape {list(x.shape)}; dimension {dim} is empty, so there is nothing to scale by")
    check_finite(x, "x")
    codes, scales = round_symmetric(x, dim=dim, top=top)
    return codes.to(torch.int8), scales


def check_finite(x: Tensor, name: str) -> None:
    """Raise ValueError if x holds NaN or infinity. On CUDA this waits for the device."""
    # A NaN or an infinity always shows in the sum, one fast pass; only a sum that overflowed needs the second look.
    if not math.isfinite(x.detach().sum(dtype=torch.float32)) and not bool(torch.isfinite(x).all()):
        raise ValueError(f"{name} holds NaN or infinity; expected finite numbers")


# -- weights ------------------------------------------------------------------------------------------------------


def check_weight(weight: Tensor) -> None:
    """Raise TypeError or ValueError unless it is a finite FP32, BF16 or FP16 matrix [out, in] on a CPU or CUDA."""
    if not isinstance(weight, Tensor):
        raise TypeError(f"expected a weight tensor [out, in], got {type(weight).__name__}")
    if weight.dtype not in WEIGHT_DTYPES:
        raise TypeError(f"cannot quantise a weight of {weight.dtype}; expected float32, bfloat16 or float16")
    if weight.ndim != 2 or weight.numel() == 0:
        raise ValueError(f"expected a weight of shape [out, in] with at least one element, got {list(weight.shape)}")
    if weight.device.type not in ("cpu", "cuda"):
        raise ValueError(f"cannot quantise a weight on device {weight.device}; expected cpu or cuda")
    check_finite(weight, "the weight")


def quantize_rows(weight: Tensor, *, top: int = 127, scale_dtype: torch.dtype = SCALE_DTYPE) -> tuple[Tensor, Tensor]:
    """Round a weight [out, in] to INT8, symmetric, one scale per output channel.

    Returns codes [out, in] int8 in -top..top and scales [out]; weight is about codes * scales[:, None].
    Raises TypeError or ValueError unless the weight is a finite float matrix.
    """
    check_weight(weight)
    codes, scales = round_symmetric(weight.detach().float(), dim=1, top=top, scale_dtype=scale_dtype)
    return codes.to(torch.int8), scales[:, 0]


@dataclass(frozen=True, slots=True)
class Blocks:
    """A weight in blocks along the row: codes q [out, in] uint8, scales and zeros BF16 [out, in / group_size]."""

    q: Tensor
    scales: Tensor
    zeros: Tensor
    bits: int

    @property
    def group_size(self) -> int:
        return self.q.shape[1] // self.scales.shape[1]

    @property
    def bits_per_weight(self) -> float:
        """Bits that one weight takes, its share of scale and zero included."""
        return self.bits + 2 * 8 * self.scales.element_size() / self.group_size

    def dequantize(self) -> Tensor:
        """The FP32 weight [out, in] that these codes stand for."""
        out, width = self.q.shape
        q = self.q.view(out, -1, self.group_size).float() - 2 ** (self.bits - 1)
        return (q * self.scales.float()[..., None] + self.zeros.float()[..., None]).view(out, width)


def quantize_blocks(weight: Tensor, *, bits: int = 4, group_size: int = 32) -> Blocks:
    """Round a weight [out, in] to `bits` bits in blocks of group_size along the row, with a scale and a zero each.

    The block's smallest number gets code 0, its largest the highest code. Scale and zero are rounded to BF16 first, and
    the codes are chosen with the rounded ones. A weight is read back as (q - 2 ** (bits - 1)) * scale + zero.

    Raises ValueError if group_size does not divide the row, or bits is not in 2..8.
    """
    check_weight(weight)
    half = largest_code(bits) + 1  # 2 ** (bits - 1), the middle code, which stands for `zero` itself
    out, width = weight.shape
    if group_size < 1 or width % group_size:
        raise ValueError(f"group_size {group_size} does not divide the row width {width}")
    blocks = weight.detach().float().view(out, -1, group_size)  # [out, blocks, group_size]
    low, high = blocks.amin(dim=2), blocks.amax(dim=2)
    scales = ((high - low) / (2**bits - 1)).to(SCALE_DTYPE)
    scales = torch.where(scales > 0, scales, 1.0)  # a constant block: `zero` alone holds its value
    zeros = torch.where(high > low, low + half * scales.float(), low).to(SCALE_DTYPE)
    q = (blocks - zeros.float()[..., None]) / scales.float()[..., None]
    q = q.round_().add_(half).clamp_(0, 2**bits - 1).to(torch.uint8)
    return Blocks(q.view(out, width), scales, zeros, bits)
