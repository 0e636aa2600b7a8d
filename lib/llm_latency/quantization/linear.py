"""Linear layers with INT8 or INT4 weights over PyTorch's packed kernels.

They compute in BF16, as the kernels do, and answer in the dtype of their input. Their `state_dict` holds the plain
codes, never a processor's own layout, so a file saved on one machine loads on another.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from llm_latency.quantization import kernels
from llm_latency.quantization.rounding import Blocks, check_weight, dequantize_int8, quantize_int4, quantize_int8


class QuantizedLinear(nn.Module):
    """What both have in common: sizes, bias, the optional BF16 copy for prefill, and the bytes.

    keep_bfloat16 keeps a copy of the dequantised weight for inputs of kernels.MANY_ROWS rows and more: a faster prefill
    for more memory. The copy is not part of the state_dict.
    """

    bits: int

    def __init__(self, in_features: int, out_features: int, *, bias: bool = False, keep_bfloat16: bool = False) -> None:
        super().__init__()
        if in_features < 1 or out_features < 1:
            raise ValueError(f"in_features and out_features must be positive, got {in_features} and {out_features}")
        self.in_features, self.out_features, self.keep_bfloat16 = in_features, out_features, keep_bfloat16
        self.register_buffer("bias", torch.zeros(out_features, dtype=torch.bfloat16) if bias else None)
        self.copy: kernels.PrepackedWeight | None = None

    @classmethod
    def from_linear(cls, linear: nn.Module, **options) -> QuantizedLinear:
        """Quantise an nn.Linear (or transformers' Conv1D). Raises TypeError for any other layer."""
        if isinstance(linear, Conv1D):
            weight = linear.weight.t()
        elif isinstance(linear, nn.Linear):
            weight = linear.weight
        else:
            raise TypeError(f"expected an nn.Linear, got {type(linear).__name__}")
        return cls.from_weight(weight, linear.bias, **options)

    @classmethod
    def from_weight(cls, weight: Tensor, bias: Tensor | None = None, **options) -> QuantizedLinear:
        """Quantise a weight [out, in] with an optional bias [out]."""
        check_weight(weight)
        out, width = weight.shape
        if bias is not None and bias.shape != (out,):
            raise ValueError(f"expected a bias of shape [{out}], got {list(bias.shape)}")
        self = cls(width, out, bias=bias is not None, **options).to(weight.device)
        if bias is not None:
            self.bias.copy_(bias.detach())
        self._set_codes(*self._round(weight))
        return self

    def dequantize(self) -> Tensor:
        """The FP32 weight [out, in] that the codes stand for."""
        return self._dense(*self._codes())

    @property
    def nbytes(self) -> int:
        """Bytes that one decode step reads: codes, scales, zeros, bias, padding; without the BF16 copy."""
        return sum(buffer.nbytes for buffer in self.buffers())

    @property
    def copy_nbytes(self) -> int:
        """Bytes of the BF16 copy kept for prefill."""
        return self.copy.nbytes if self.copy is not None else 0

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] to [..., out], in x's dtype."""
        if not x.is_floating_point():
            raise TypeError(f"expected a floating-point input, got {x.dtype}")
        if x.shape[-1] != self.in_features:
            raise ValueError(f"expected an input of width {self.in_features}, got {x.shape[-1]}")
        y = self.product(x.reshape(-1, self.in_features).to(torch.bfloat16).contiguous())
        return y.view(*x.shape[:-1], self.out_features).to(x.dtype)

    def product(self, rows: Tensor) -> Tensor:
        """The same without checks or conversions: contiguous BF16 rows [rows, in] to [rows, out]."""
        if self.copy is not None and rows.shape[0] >= kernels.MANY_ROWS:
            return self.copy.matmul(rows, self.bias)
        y = self._matmul(rows)
        return y if self.bias is None else y + self.bias

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"kernel={self.kernel!r}"
        )

    # The codes in their plain form, whatever the layout in use; the subclasses fill these in.
    def _round(self, weight: Tensor) -> tuple[Tensor, ...]:
        raise NotImplementedError

    def _dense(self, *codes: Tensor) -> Tensor:
        raise NotImplementedError

    def _codes(self) -> tuple[Tensor, ...]:
        raise NotImplementedError

    def _install(self, *codes: Tensor) -> None:
        raise NotImplementedError

    def _matmul(self, rows: Tensor) -> Tensor:
        raise NotImplementedError

    def _set_codes(self, *codes: Tensor) -> None:
        self._install(*codes)
        self.copy = kernels.PrepackedWeight(self._dense(*codes)) if self.keep_bfloat16 else None

    def _apply(self, fn, recurse: bool = True):
        """Move between devices by way of the plain codes; a change of dtype leaves the quantised weight as it is."""
        device = fn(torch.empty(0, dtype=torch.uint8, device=self.device)).device
        if device != self.device:
            if device.type not in ("cpu", "cuda"):
                raise ValueError(f"cannot move a quantised layer to {device}; expected cpu or cuda")
            codes = [code.to(device) for code in self._codes()]
            if self.bias is not None:
                self.bias = self.bias.to(device)
            self._set_codes(*codes)
        return self

    @property
    def device(self) -> torch.device:
        return next(self.buffers()).device

    def _save_to_state_dict(self, destination, prefix, keep_vars) -> None:
        for name, code in zip(self.code_names, self._codes(), strict=True):
            destination[prefix + name] = code
        if self.bias is not None:
            destination[prefix + "bias"] = self.bias

    def _load_from_state_dict(self, state, prefix, metadata, strict, missing, unexpected, errors) -> None:
        names = [*self.code_names, *(["bias"] if self.bias is not None else [])]
        absent = [prefix + name for name in names if prefix + name not in state]
        known = {prefix + name for name in names}
        if strict:
            unexpected.extend(key for key in state if key.startswith(prefix) and key not in known)
        missing.extend(absent)
        if any(prefix + name in absent for name in self.code_names):
            return
        bias = state.get(prefix + "bias") if self.bias is not None else None
        if bias is not None and bias.shape != self.bias.shape:
            errors.append(f"{prefix}bias: expected {list(self.bias.shape)}, got {list(bias.shape)}")
            return
        present = self._codes()
        for name, code in zip(self.code_names, present, strict=True):
            given = state[prefix + name]
            if given.shape != code.shape or given.dtype != code.dtype:
                errors.append(
                    f"{prefix}{name}: expected {list(code.shape)} {code.dtype}, got {list(given.shape)} {given.dtype}"
                )
                return
        self._set_codes(*(state[prefix + name].to(self.device) for name in self.code_names))
        if bias is not None:
            self.bias.copy_(bias)


class Int8Linear(QuantizedLinear):
    """A linear layer with INT8 weights, one scale per output channel.

    Buffers: q [out, in padded] int8, scales [out] BF16. Rows are padded with zeros to what the kernel reads at once.
    """

    bits = 8
    code_names = ("q", "scales")

    def __init__(self, in_features: int, out_features: int, **options) -> None:
        super().__init__(in_features, out_features, **options)
        self.kernel = kernels.int8_kernel("cpu")
        width = kernels.ceil_to(in_features, kernels.INT8_WIDTH)
        self.register_buffer("q", torch.zeros(out_features, width, dtype=torch.int8))
        self.register_buffer("scales", torch.zeros(out_features, dtype=torch.bfloat16))

    def _round(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        return quantize_int8(weight)

    def _dense(self, q: Tensor, scales: Tensor) -> Tensor:
        return dequantize_int8(q, scales)

    def _codes(self) -> tuple[Tensor, Tensor]:
        return self.q[:, : self.in_features].contiguous(), self.scales

    def _install(self, q: Tensor, scales: Tensor) -> None:
        self.kernel = kernels.int8_kernel(q.device.type)
        self.q = F.pad(q, (0, kernels.ceil_to(self.in_features, kernels.INT8_WIDTH) - self.in_features)).contiguous()
        self.scales = scales.clone()

    def _matmul(self, rows: Tensor) -> Tensor:
        padding = self.q.shape[1] - self.in_features
        rows = F.pad(rows, (0, padding)) if padding else rows
        return kernels.int8_matmul(rows, self.q, self.scales, self.kernel)


class Int4Linear(QuantizedLinear):
    """A linear layer with INT4 weights in blocks of group_size along the row, a scale and a zero per block.

    Buffers: packed (two codes per byte, in the kernel's layout), scales_and_zeros [in / group, out padded, 2] BF16.
    Output channels are padded to the multiple that the kernel wants. Raises ValueError where group_size does not
    divide in_features.
    """

    bits = 4
    code_names = ("codes", "scales", "zeros")

    def __init__(self, in_features: int, out_features: int, *, group_size: int = 32, **options) -> None:
        super().__init__(in_features, out_features, **options)
        if group_size < 2 or group_size % 2 or in_features % group_size:
            raise ValueError(
                f"group_size must be even and divide the row width, got group_size {group_size} and width {in_features}"
            )
        self.group_size = group_size
        blocks = torch.zeros(out_features, in_features // group_size, dtype=torch.bfloat16)
        self._install(torch.zeros(out_features, in_features // 2, dtype=torch.uint8), blocks, blocks)

    def _round(self, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        blocks = quantize_int4(weight, self.group_size)
        return kernels.nibbles(blocks.q), blocks.scales, blocks.zeros

    def _dense(self, codes: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
        return Blocks(kernels.from_nibbles(codes), scales, zeros, bits=4).dequantize()

    def _codes(self) -> tuple[Tensor, Tensor, Tensor]:
        out = self.out_features
        rows = self.scales_and_zeros.shape[1]
        q = kernels.int4_unpack(self.packed, self.in_features, rows, self.kernel)[:out]
        scales, zeros = self.scales_and_zeros[:, :out].permute(2, 1, 0).contiguous()
        return kernels.nibbles(q), scales, zeros

    def _install(self, codes: Tensor, scales: Tensor, zeros: Tensor) -> None:
        self.kernel = kernels.int4_kernel(codes.device.type, self.in_features, self.group_size)
        padding = kernels.ceil_to(self.out_features, kernels.INT4_ROWS) - self.out_features
        q = F.pad(kernels.from_nibbles(codes), (0, 0, 0, padding))
        table = F.pad(torch.stack((scales, zeros), dim=2), (0, 0, 0, 0, 0, padding))  # [out padded, blocks, 2]
        self.register_buffer("packed", kernels.int4_pack(q, self.kernel))
        self.register_buffer("scales_and_zeros", table.transpose(0, 1).contiguous())

    def _matmul(self, rows: Tensor) -> Tensor:
        y = kernels.int4_matmul(rows, self.packed, self.scales_and_zeros, self.group_size, self.kernel)
        return y if y.shape[1] == self.out_features else y[:, : self.out_features].contiguous()
