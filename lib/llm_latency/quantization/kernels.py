"""Weights in the layout of the packed matrix kernels that PyTorch brings, checked before they are trusted.

A kernel is used only if a small product with it, on this very device, equals the product with the plain weight.
Otherwise the plain path takes over: it dequantises the weight at every call, right everywhere and fast nowhere.

`PackedInt8`, `PackedInt4` and `PrepackedWeight` (BF16) have the same face: shape, kernel, nbytes, matmul(x, bias).
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from llm_latency.hardware import bf16_is_native
from llm_latency.quantization.rounding import Blocks, dequantize, quantize_blocks, quantize_rows

INT4_GROUPS = (32, 64, 128, 256)  # what the packed INT4 kernels take
INT8_WIDTH = 32  # the INT8 kernel reads rows in steps of 16 and gives wrong sums, unannounced, for other widths
INT4_ROWS = 16  # output channels come in sixteens in the CPU's INT4 layout, in eights in CUDA's
CUDA_INNER_TILES = 8  # of the CUDA layout: a row must be a multiple of 16 * 8
MANY_ROWS = 16  # from here on a product in a wider format beats the packed kernels on the CPUs we measured
PLAIN = "dequantise at every call"


def agrees(product: Callable[[Tensor], Tensor], weight: Tensor) -> bool:
    """Whether product(x) runs here at all and equals x times the weight [out, in], for one row and for five."""
    for rows in (1, 5):
        x = torch.linspace(-1, 1, rows * weight.shape[1], device=weight.device).view(rows, -1).to(torch.bfloat16)
        expected = F.linear(x.float(), weight.float())
        try:
            got = product(x).float()
        except (RuntimeError, NotImplementedError, AttributeError):
            return False
        if not torch.allclose(got, expected, rtol=0.02, atol=0.02 * float(expected.abs().max())):
            return False
    return True


# -- INT8 ---------------------------------------------------------------------------------------------------------


def int8_matmul(x: Tensor, q: Tensor, scales: Tensor, kernel: str) -> Tensor:
    """x [rows, in] BF16 times INT8 codes [out, in] with scales [out]: [rows, out] BF16."""
    if kernel == "packed":
        return torch._weight_int8pack_mm(x, q, scales)
    if kernel == "fused by torch.compile":  # the conversion disappears into the matrix kernel once compiled
        return F.linear(x, q.to(x.dtype)) * scales
    return F.linear(x, dequantize(q, scales[:, None]).to(x.dtype))


@functools.cache
def int8_kernel(device_type: str) -> str:
    """Which INT8 path this device takes: "packed", "fused by torch.compile" (CUDA), or PLAIN."""
    if device_type == "cuda":
        return "fused by torch.compile"
    q = (torch.arange(3 * INT8_WIDTH) * 7 % 255 - 127).to(torch.int8).view(3, INT8_WIDTH)
    scales = torch.ones(3, dtype=torch.bfloat16)
    return "packed" if agrees(lambda x: int8_matmul(x, q, scales, "packed"), q) else PLAIN


class PackedInt8:
    """A weight [out, in] in INT8 with a BF16 scale per output channel.

    Args:
        q: int8 [out, in]. scales: BF16 [out]. Rows are filled up with zeros to what the kernel reads at once.
    """

    __slots__ = ("kernel", "q", "scales", "shape")

    def __init__(self, q: Tensor, scales: Tensor) -> None:
        self.shape = tuple(q.shape)
        self.kernel = int8_kernel(q.device.type)
        self.q = F.pad(q, (0, -q.shape[1] % INT8_WIDTH)).contiguous()
        self.scales = scales.clone()

    @classmethod
    def from_weight(cls, weight: Tensor) -> PackedInt8:
        """Round a weight [out, in]; errors as `rounding.check_weight`."""
        return cls(*quantize_rows(weight))

    @property
    def device(self) -> torch.device:
        return self.q.device

    @property
    def nbytes(self) -> int:
        """Bytes that one product reads, padding included."""
        return self.q.nbytes + self.scales.nbytes

    def codes(self) -> dict[str, Tensor]:
        """What `PackedInt8(**codes)` makes the same weight of, on any device."""
        return {"q": self.q[:, : self.shape[1]].contiguous(), "scales": self.scales}

    def dequantize(self) -> Tensor:
        """The FP32 weight [out, in] that the codes stand for."""
        return dequantize(self.q[:, : self.shape[1]], self.scales[:, None])

    def matmul(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [rows, in] BF16 to [rows, out] BF16."""
        padding = self.q.shape[1] - self.shape[1]
        y = int8_matmul(F.pad(x, (0, padding)) if padding else x, self.q, self.scales, self.kernel)
        return y if bias is None else y + bias


# -- INT4 ---------------------------------------------------------------------------------------------------------


def _nibbles(q: Tensor) -> Tensor:
    """Two codes per byte: q [out, in] of 0..15 to [out, in / 2] uint8, the even column in the high half."""
    q = q.to(torch.uint8)
    return (q[:, ::2] << 4) | q[:, 1::2]


def _from_nibbles(packed: Tensor) -> Tensor:
    """Codes [out, in] uint8 from [out, in / 2] bytes; the inverse of `_nibbles`."""
    return torch.stack((packed >> 4, packed & 15), dim=2).flatten(1)


def int4_matmul(x: Tensor, packed: Tensor, scales_and_zeros: Tensor, group_size: int, kernel: str) -> Tensor:
    """x [rows, in] BF16 times packed INT4 with scales_and_zeros [in / group, out, 2]: [rows, out] BF16."""
    if kernel == "packed":
        if x.device.type == "cuda":
            return torch.ops.aten._weight_int4pack_mm(x, packed, group_size, scales_and_zeros)
        return torch.ops.aten._weight_int4pack_mm_for_cpu(x, packed, group_size, scales_and_zeros)
    return F.linear(x, _int4_blocks(_from_nibbles(packed), scales_and_zeros).dequantize().to(x.dtype))


def _int4_blocks(q: Tensor, scales_and_zeros: Tensor) -> Blocks:
    """Codes q [out, in] of 0..15 with their table [in / group, out, 2]."""
    scales, zeros = scales_and_zeros.permute(2, 1, 0)  # each [out, in / group]
    return Blocks(q, scales, zeros, bits=4)


def _int4_pack(q: Tensor, kernel: str) -> Tensor:
    """Codes q [out, in] of 0..15 in the layout that the kernel wants."""
    if kernel != "packed":
        return _nibbles(q)
    if q.device.type == "cuda":
        return torch.ops.aten._convert_weight_to_int4pack(_nibbles(q), CUDA_INNER_TILES)
    return torch.ops.aten._convert_weight_to_int4pack_for_cpu(q.int(), 1)


def _int4_unpack(packed: Tensor, width: int, out: int, kernel: str) -> Tensor:
    """The codes [out, in] back from the kernel's layout.

    The layout differs between processors, so the kernel itself is asked: times the identity, with scale 1 and zero 0,
    it answers q - 8 exactly.
    """
    if kernel != "packed":
        return _from_nibbles(packed)
    identity = torch.eye(width, dtype=torch.bfloat16, device=packed.device)
    unit = torch.zeros(width // 32, out, 2, dtype=torch.bfloat16, device=packed.device)
    unit[..., 0] = 1
    return (int4_matmul(identity, packed, unit, 32, kernel).t() + 8).to(torch.uint8).contiguous()


@functools.cache
def _int4_kernel_works(device_type: str) -> bool:
    width, out = 16 * CUDA_INNER_TILES, 32
    q = (torch.arange(out * width, device=device_type) * 7 % 16).view(out, width)
    table = torch.ones(width // 32, out, 2, dtype=torch.bfloat16, device=device_type)
    table[..., 1] = 0.5
    packed_product = functools.partial(int4_matmul, scales_and_zeros=table, group_size=32, kernel="packed")
    return agrees(lambda x: packed_product(x, _int4_pack(q, "packed")), _int4_blocks(q, table).dequantize())


def int4_kernel(device_type: str, width: int, group_size: int) -> str:
    """Which INT4 path a row of this width takes on this device: "packed" or PLAIN."""
    fits = group_size in INT4_GROUPS and (device_type == "cpu" or width % (16 * CUDA_INNER_TILES) == 0)
    return "packed" if fits and _int4_kernel_works(device_type) else PLAIN


class PackedInt4:
    """A weight [out, in] in INT4, in blocks along the row with a BF16 scale and zero each.

    Args:
        codes: uint8 [out, in / 2], two of 0..15 per byte. scales, zeros: BF16 [out, in / group_size].

    packed: the codes in the kernel's layout. scales_and_zeros: [in / group_size, out padded, 2], output channels filled
    up to the multiple that the kernel wants.
    """

    __slots__ = ("group_size", "kernel", "packed", "scales_and_zeros", "shape")

    def __init__(self, codes: Tensor, scales: Tensor, zeros: Tensor) -> None:
        q = _from_nibbles(codes)
        self.shape = tuple(q.shape)
        self.group_size = q.shape[1] // scales.shape[1]
        self.kernel = int4_kernel(q.device.type, q.shape[1], self.group_size)
        padding = -q.shape[0] % INT4_ROWS
        table = F.pad(torch.stack((scales, zeros), dim=2), (0, 0, 0, 0, 0, padding))  # [out padded, blocks, 2]
        self.scales_and_zeros = table.transpose(0, 1).contiguous()
        self.packed = _int4_pack(F.pad(q, (0, 0, 0, padding)), self.kernel)

    @classmethod
    def from_weight(cls, weight: Tensor, group_size: int = 32) -> PackedInt4:
        """Round a weight [out, in]. Raises ValueError for a group_size that is odd or does not divide the row."""
        blocks = quantize_blocks(weight, group_size=group_size)
        if group_size % 2:
            raise ValueError(f"group_size={group_size}; expected an even number, since two codes share a byte")
        return cls(_nibbles(blocks.q), blocks.scales, blocks.zeros)

    @property
    def device(self) -> torch.device:
        return self.packed.device

    @property
    def nbytes(self) -> int:
        """Bytes that one product reads, padding included."""
        return self.packed.nbytes + self.scales_and_zeros.nbytes

    def codes(self) -> dict[str, Tensor]:
        """What `PackedInt4(**codes)` makes the same weight of, on any device."""
        blocks = self._blocks()
        return {
            "codes": _nibbles(blocks.q),
            "scales": blocks.scales.contiguous(),
            "zeros": blocks.zeros.contiguous(),
        }

    def dequantize(self) -> Tensor:
        """The FP32 weight [out, in] that the codes stand for."""
        return self._blocks().dequantize()

    def matmul(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [rows, in] BF16 to [rows, out] BF16."""
        y = int4_matmul(x, self.packed, self.scales_and_zeros, self.group_size, self.kernel)
        if y.shape[1] != self.shape[0]:
            y = y[:, : self.shape[0]].contiguous()
        return y if bias is None else y + bias

    def _blocks(self) -> Blocks:
        out, width = self.shape
        q = _int4_unpack(self.packed, width, self.scales_and_zeros.shape[1], self.kernel)[:out]
        return _int4_blocks(q, self.scales_and_zeros[:, :out])


# -- BF16 ---------------------------------------------------------------------------------------------------------


class PrepackedWeight:
    """A BF16 weight [out, in] kept in the layout that oneDNN's matrix kernel wants, so no call has to rearrange it.

    On processors or builds without that kernel, and on CUDA, the weight stays as it is and `matmul` is F.linear; a CPU
    that cannot multiply BF16 widens the whole weight first where many rows make that pay.
    """

    __slots__ = ("_plain", "_widen", "packed", "shape")

    def __init__(self, weight: Tensor) -> None:
        weight = weight.detach().to(torch.bfloat16).contiguous()
        self.shape = tuple(weight.shape)
        self._plain = None if weight.device.type == "cpu" and _prepacking_works() else weight
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight) if self._plain is None else None
        self._widen = weight.device.type == "cpu" and not bf16_is_native("cpu")

    @property
    def kernel(self) -> str:
        return "prepacked" if self._plain is None else "F.linear"

    @property
    def nbytes(self) -> int:
        return 2 * self.shape[0] * self.shape[1]

    def dense(self) -> Tensor:
        """The weight [out, in] BF16 in its plain layout."""
        return self.packed.to_dense() if self._plain is None else self._plain

    def matmul(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [..., in] BF16 to [..., out] BF16."""
        if self._plain is None:
            return torch.ops.mkldnn._linear_pointwise(x, self.packed, bias, "none", [], "")
        if self._widen and x.numel() >= MANY_ROWS * x.shape[-1]:
            y = F.linear(x.float(), self._plain.float(), None if bias is None else bias.float())
            return y.to(torch.bfloat16)
        return F.linear(x, self._plain, bias)

    def __reduce__(self) -> tuple:  # oneDNN's layout can be neither copied nor stored
        return PrepackedWeight, (self.dense(),)


@functools.cache
def _prepacking_works() -> bool:
    weight = torch.linspace(-1, 1, 37 * 53).view(37, 53).to(torch.bfloat16)

    def product(x: Tensor) -> Tensor:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight)
        return torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")

    return bool(torch.backends.mkldnn.is_available()) and agrees(product, weight)
