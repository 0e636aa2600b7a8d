"""One layer's keys and values, allocated once and written in place: in the decoder's dtype, or in INT8."""

from __future__ import annotations

import torch
from torch import Tensor

from llm_latency.kv_cache.symmetric import SCALE_DTYPE, dequantize, quantize_finite


class StaticKV:
    """Keys and values of one layer, side by side: [1, 2 * kv_heads, slots, head_dim], written by one operator.

    One tensor per layer: a single one for all layers is copied whole at every write once compiled.
    """

    def __init__(self, kv_heads: int, slots: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        self.kv_heads = kv_heads
        self.both = torch.zeros(1, 2 * kv_heads, slots, head_dim, dtype=dtype, device=device)

    @property
    def nbytes(self) -> int:
        return self.both.nbytes

    def store(self, both: Tensor, positions: Tensor) -> None:
        """Write the keys and values [1, 2 * kv_heads, k, head_dim] of k tokens to their slots [k]."""
        self.both.index_copy_(2, positions, both)

    def read(self, span: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the first `span` slots, each [1, kv_heads, span, head_dim]; views, not copies."""
        return self.both.narrow(2, 0, span).split(self.kv_heads, dim=1)


class StaticInt8KV:
    """The same in INT8, with a scale per token and head: half the bytes of BF16, and a copy of the span at each read.

    At eight bits a scale per token serves keys as well as values (notebook 07); with fewer bits it would not.
    """

    def __init__(self, kv_heads: int, slots: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        self.kv_heads, self.dtype = kv_heads, dtype
        self.codes = torch.zeros(1, 2 * kv_heads, slots, head_dim, dtype=torch.int8, device=device)
        self.scales = torch.zeros(1, 2 * kv_heads, slots, 1, dtype=SCALE_DTYPE, device=device)

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes

    def store(self, both: Tensor, positions: Tensor) -> None:
        """As `StaticKV.store`."""
        codes, scales = quantize_finite(both, dim=-1)  # [1, 2 * kv_heads, k, head_dim] and [.., 1]
        self.codes.index_copy_(2, positions, codes.to(torch.int8))
        self.scales.index_copy_(2, positions, scales)

    def read(self, span: int) -> tuple[Tensor, Tensor]:
        """As `StaticKV.read`, but a dequantised copy."""
        both = dequantize(self.codes[:, :, :span], self.scales[:, :, :span], self.dtype)
        return both.split(self.kv_heads, dim=1)
