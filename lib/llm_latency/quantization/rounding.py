"""Rounding weights to a few bits, and back: plain functions, no kernels.

INT8 keeps one scale per output channel. INT4 cuts each row into blocks and keeps a scale and a zero per block:

    weight = (q - 2 ** (bits - 1)) * scale + zero

That is the grid of PyTorch's packed INT4 kernels; the blocks with a scale and a minimum are those of GGUF's Q4_1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check_weight(weight: Tensor) -> None:
    """Raise for anything that is not a finite floating-point matrix [out, in] with real memory behind it."""
    if not isinstance(weight, Tensor):
        raise TypeError(f"expected a weight tensor [out, in], got {type(weight).__name__}")
    if weight.dtype not in WEIGHT_DTYPES:
        raise TypeError(f"cannot quantise a weight of {weight.dtype}; expected float32, bfloat16 or float16")
    if weight.ndim != 2 or weight.numel() == 0:
        raise ValueError(f"expected a weight of shape [out, in] with at least one element, got {list(weight.shape)}")
    if weight.device.type not in ("cpu", "cuda"):
        raise ValueError(f"cannot quantise a weight on device {weight.device}; expected cpu or cuda")
    if not torch.isfinite(weight).all():
        raise ValueError("cannot quantise a weight that holds NaN or infinity")


def quantize_int8(weight: Tensor, scale_dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    """Round a weight [out, in] to INT8, symmetric, one scale per output channel.

    Returns q [out, in] int8 in -127..127 and scales [out] in scale_dtype; weight is about q * scales[:, None].
    The codes are chosen with the scale as it is stored, so rounding the scale adds no error of its own.
    Raises TypeError or ValueError for a weight that is no finite float matrix.
    """
    check_weight(weight)
    weight = weight.detach().float()
    scales = (weight.abs().amax(dim=1) / 127).to(scale_dtype)
    divisor = scales.float()
    divisor = torch.where(divisor > 0, divisor, 1.0)  # an all-zero channel: any scale will do, the codes are 0
    q = (weight / divisor[:, None]).round_().clamp_(-127, 127).to(torch.int8)
    return q, scales


def dequantize_int8(q: Tensor, scales: Tensor) -> Tensor:
    """The FP32 weight [out, in] that INT8 codes [out, in] and scales [out] stand for."""
    return q.float() * scales.float()[:, None]


@dataclass(frozen=True, slots=True)
class Blocks:
    """Weights in blocks along the row: q [out, in] uint8, scales and zeros [out, in / group_size]."""

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
        return self.bits + 16 * self.scales.element_size() / self.group_size

    def dequantize(self) -> Tensor:
        """The FP32 weight [out, in] that these codes stand for."""
        out, width = self.q.shape
        q = self.q.view(out, -1, self.group_size).float() - 2 ** (self.bits - 1)
        return (q * self.scales.float()[..., None] + self.zeros.float()[..., None]).view(out, width)


def quantize_blocks(
    weight: Tensor, *, bits: int = 4, group_size: int = 32, scale_dtype: torch.dtype = torch.bfloat16
) -> Blocks:
    """Round a weight [out, in] to `bits` bits in blocks of group_size along the row, with a scale and a zero each.

    Scale and zero are rounded to scale_dtype first, and the codes chosen on that grid.
    Raises ValueError if group_size does not divide the row, or bits is not in 2..8.
    """
    check_weight(weight)
    if not 2 <= bits <= 8:
        raise ValueError(f"bits must be in 2..8, got {bits}")
    out, width = weight.shape
    if group_size < 1 or width % group_size:
        raise ValueError(f"group_size {group_size} does not divide the row width {width}")
    blocks = weight.detach().float().view(out, -1, group_size)  # [out, blocks, group_size]
    low, high = blocks.amin(dim=2), blocks.amax(dim=2)
    scales = ((high - low) / (2**bits - 1)).to(scale_dtype)
    scales = torch.where(scales > 0, scales, 1.0)  # a constant block: zero holds its value
    half = 2 ** (bits - 1)
    zeros = torch.where(high > low, low + half * scales.float(), low).to(scale_dtype)
    q = (blocks - zeros.float()[..., None]) / scales.float()[..., None]
    q = q.round_().add_(half).clamp_(0, 2**bits - 1).to(torch.uint8)
    return Blocks(q.view(out, width), scales, zeros, bits)


def quantize_int4(weight: Tensor, group_size: int = 32) -> Blocks:
    """Round a weight [out, in] to INT4 in blocks of group_size; see `quantize_blocks`."""
    return quantize_blocks(weight, bits=4, group_size=group_size)


def dequantize_int4(blocks: Blocks) -> Tensor:
    """The FP32 weight [out, in] that INT4 blocks stand for."""
    return blocks.dequantize()
