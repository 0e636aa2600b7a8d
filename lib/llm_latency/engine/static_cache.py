"""One layer's keys and values, allocated once and written in place: in the decoder's dtype, or in INT8."""

from __future__ import annotations

import torch
from torch import Tensor

from llm_latency.kv_cache.symmetric import SCALE_DTYPE, dequantize, quantize_finite


class StaticKV:
    """Keys and values [1, kv_heads, slots, head_dim] of one layer.

    One tensor per layer: a single one for all layers is copied whole at every write once compiled.
    """

    def __init__(self, kv_heads: int, slots: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        self.keys, self.values = (torch.zeros(1, kv_heads, slots, head_dim, dtype=dtype, device=device) for _ in "kv")

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    def store(self, keys: Tensor, values: Tensor, positions: Tensor) -> None:
        """Write the keys and values [1, kv_heads, k, head_dim] of k tokens to their slots [k]."""
        self.keys.index_copy_(2, positions, keys)
        self.values.index_copy_(2, positions, values)

    def read(self, span: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the first `span` slots [1, kv_heads, span, head_dim]; a view, not a copy."""
        return self.keys.narrow(2, 0, span), self.values.narrow(2, 0, span)


class StaticInt8KV:
    """The same in INT8, with a scale per token and head: half the bytes of BF16, and a copy of the span at each read.

    At eight bits a scale per token serves keys as well as values (notebook 07); with fewer bits it would not.
    """

    def __init__(self, kv_heads: int, slots: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        # Keys and values side by side: one tensor of codes, one of scales.
        self.codes = torch.zeros(2, kv_heads, slots, head_dim, dtype=torch.int8, device=device)
        self.scales = torch.zeros(2, kv_heads, slots, 1, dtype=SCALE_DTYPE, device=device)

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes

    def store(self, keys: Tensor, values: Tensor, positions: Tensor) -> None:
        """As `StaticKV.store`."""
        codes, scales = quantize_finite(torch.cat((keys, values)), dim=-1)  # [2, kv_heads, k, head_dim]
        self.codes.index_copy_(2, positions, codes.to(torch.int8))
        self.scales.index_copy_(2, positions, scales)

    def read(self, span: int) -> tuple[Tensor, Tensor]:
        """As `StaticKV.read`, but a dequantised copy."""
        both = dequantize(self.codes[:, :, :span], self.scales[:, :, :span], self.dtype)
        return both[:1], both[1:]
