"""Operators that only CUDA has, by their definition, with the shapes and cards that they take.

The packed layout is not CUDA's: what is packed here is read here, and by nothing else.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pretend_gpu.card import Card


def _check(true: bool, what: str) -> None:
    if not true:
        raise RuntimeError(what)


def pack_int4(card: Card, weight: Tensor, inner_tiles: int) -> Tensor:
    """aten::_convert_weight_to_int4pack: uint8 [out, in / 2] to int32 [out / 8, in / (16 * inner), 32, inner / 2]."""
    _check(card.major >= 8, "_convert_weight_to_int4pack_cuda: requires compute capability 8.0")
    _check(weight.dtype == torch.uint8 and weight.is_contiguous(), "expected the weight to be contiguous uint8")
    out, half = weight.shape
    _check(inner_tiles in (2, 4, 8), f"innerKTiles need to be 2, 4, or 8, got {inner_tiles}")
    _check(out % 8 == 0, f"weight rows need to be a multiple of 8, got {out}")
    _check(2 * half % (16 * inner_tiles) == 0, f"in {2 * half} needs to be a multiple of {16 * inner_tiles}")
    return weight.clone().view(torch.int32).view(out // 8, 2 * half // (16 * inner_tiles), 32, inner_tiles // 2)


def int4_product(card: Card, x: Tensor, packed: Tensor, group_size: int, scales_and_zeros: Tensor) -> Tensor:
    """aten::_weight_int4pack_mm: x [rows, in] BF16, scales and zeros [in / group, out, 2] BF16: [rows, out] BF16."""
    _check(card.major >= 8, "_weight_int4pack_mm_cuda: requires compute capability 8.0")
    _check(x.dtype == torch.bfloat16 and x.is_contiguous(), f"expected x to be contiguous BF16, got {x.dtype}")
    _check(scales_and_zeros.dtype == torch.bfloat16, f"expected scales in BF16, got {scales_and_zeros.dtype}")
    _check(group_size in (32, 64, 128, 256), f"qGroupSize must be 32, 64, 128 or 256, got {group_size}")
    out, width = packed.shape[0] * 8, packed.shape[1] * packed.shape[3] * 32
    _check(x.shape[1] == width, f"x has {x.shape[1]} columns, the weight {width}")
    _check(scales_and_zeros.shape == (width // group_size, out, 2), f"scales have shape {list(scales_and_zeros.shape)}")
    weight = _unpacked(packed, group_size, scales_and_zeros)
    return (x.float() @ weight.t()).bfloat16()


def _unpacked(packed: Tensor, group_size: int, scales_and_zeros: Tensor) -> Tensor:
    """The weight [out, in] BF16 as FP32, kept with its codes until either is written to: a step reads it many times."""
    versions = (group_size, packed._version, id(scales_and_zeros), scales_and_zeros._version)
    if getattr(packed, "unpacked", (None, None))[0] != versions:
        out, width = packed.shape[0] * 8, packed.shape[1] * packed.shape[3] * 32
        pairs = packed.contiguous().view(out, width // 8).view(torch.uint8)
        q = torch.stack((pairs >> 4, pairs & 15), dim=2).view(out, -1, group_size).float() - 8
        scales, zeros = scales_and_zeros.float().permute(2, 1, 0)[..., None]
        packed.unpacked = versions, (q * scales + zeros).view(out, width).bfloat16().float()
    return packed.unpacked[1]


def int8_product(card: Card, a: Tensor, b: Tensor) -> Tensor:
    """aten::_int_mm, which cuBLAS gives more than 16 rows and multiples of 8."""
    _check(a.shape[0] > 16, f"self.size(0) needs to be greater than 16, but got {a.shape[0]}")
    _check(a.shape[1] % 8 == 0 and b.shape[1] % 8 == 0, f"widths need to be multiples of 8, got {list(b.shape)}")
    return torch._int_mm(a, b)


CUDA_ONLY = {
    "_convert_weight_to_int4pack": pack_int4,
    "_weight_int4pack_mm": int4_product,
    "_int_mm": int8_product,
}
