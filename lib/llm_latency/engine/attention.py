"""Attention over a static KV cache: rotary positions, the cache written in place, grouped queries without copies."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from llm_latency.quantization.rounding import SCALE_DTYPE, dequantize, round_symmetric


def rotary_tables(frequencies: Tensor, positions: int, scaling: float = 1.0) -> tuple[Tensor, Tensor]:
    """cos and signed sin [positions, head_dim] FP32 of rotary positions, from inverse frequencies [head_dim / 2].

    The sine's first half carries the minus of the rotation, so that rotating is x * cos + roll(x) * sin.
    scaling: some models scale both; transformers calls it `attention_scaling`.
    """
    angles = torch.arange(positions, device=frequencies.device)[:, None] * frequencies.float()
    cos, sin = angles.cos() * scaling, angles.sin() * scaling  # [positions, head_dim / 2]
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE on x [batch, heads, k, head_dim] with rows of the tables, [k, head_dim] or [heads, k, head_dim].

    In FP32 with the roundings of transformers, so that the results are equal to the bit; else with one rounding less.
    """
    if x.dtype == torch.float32:
        return x * cos + x.roll(x.shape[-1] // 2, -1) * sin
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


class StaticKV:
    """Keys and values of one layer, side by side: [1, 2 * kv_heads, slots, head_dim], written by one operator.

    One tensor per layer: a single one for all layers is copied whole at every write once compiled.
    """

    def __init__(self, kv_heads: int, slots: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        self.kv_heads, self.slots = kv_heads, slots
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
        codes, scales = round_symmetric(both, dim=-1)  # [1, 2 * kv_heads, k, head_dim] and [.., 1]
        self.codes.index_copy_(2, positions, codes.to(torch.int8))
        self.scales.index_copy_(2, positions, scales)

    def read(self, span: int) -> tuple[Tensor, Tensor]:
        """As `StaticKV.read`, but a dequantised copy."""
        both = dequantize(self.codes[:, :, :span], self.scales[:, :, :span], self.dtype)
        return both.split(self.kv_heads, dim=1)


def causal_mask(positions: Tensor, span: int) -> Tensor:
    """Which of `span` cache slots each of k tokens may see: bool [1, 1, k, span], from their positions [k]."""
    slots = torch.arange(span, device=positions.device)
    return (slots <= positions[:, None])[None, None]


def attend_grouped(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool = False) -> Tensor:
    """Attention of q [batch, heads, k, head_dim] over k, v [batch, kv_heads, span, head_dim]: like q.

    mask: bool [1, 1, k, span], or None where every token may see every slot; causal: q and k are the same tokens.
    Query head i reads KV head i // (heads / kv_heads), and no KV head is copied: the queries of one group become rows
    of one problem. On a CPU in FP32 SDPA is quicker with the groups as they are; in BF16 four times slower.
    """
    group = q.shape[1] // k.shape[1]
    if group == 1 or causal or (q.device.type == "cpu" and q.dtype == torch.float32):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=group > 1)
    batch, heads, tokens, dim = q.shape
    rows = q.reshape(batch, k.shape[1], group * tokens, dim)  # the heads of a group are neighbours
    if mask is not None:
        mask = mask.repeat(1, 1, group, 1)
    return F.scaled_dot_product_attention(rows, k, v, attn_mask=mask).reshape(batch, heads, tokens, dim)
