"""Attention over a static KV cache, without copying heads for grouped queries."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def rotary_tables(model, positions: int) -> tuple[Tensor, Tensor]:
    """cos and signed sin [positions, head_dim] FP32 from the model's own rotary embedding.

    The sine's first half carries the minus of the rotation, so that rotating is x * cos + roll(x) * sin.
    """
    device = model.device
    ids = torch.arange(positions, device=device)[None]
    with torch.inference_mode(False), torch.no_grad():
        cos, sin = model.model.rotary_emb(torch.zeros(1, device=device), ids)  # each [1, positions, head_dim]
    cos, sin = cos[0].float(), sin[0].float()
    half = sin.shape[-1] // 2
    return cos, torch.cat((-sin[..., :half], sin[..., half:]), dim=-1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE on x [1, heads, k, head_dim] with rows of the tables, [k, head_dim] or [heads, k, head_dim].

    In FP32 with the roundings of transformers, so that the results are equal to the bit; else with one rounding less.
    """
    if x.dtype == torch.float32:
        return x * cos + x.roll(x.shape[-1] // 2, -1) * sin
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


def causal_mask(positions: Tensor, span: int) -> Tensor:
    """Which of `span` cache slots each of k tokens may see: bool [1, 1, k, span], from their positions [k]."""
    slots = torch.arange(span, device=positions.device)
    return (slots <= positions[:, None])[None, None]


def attend_grouped(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool = False) -> Tensor:
    """Attention of q [1, heads, k, head_dim] over k, v [1, kv_heads, span, head_dim]: [1, heads, k, head_dim].

    mask: bool [1, 1, k, span], or None where every token may see every slot; causal: q and k are the same tokens.
    Query head i reads KV head i // (heads / kv_heads), and no KV head is copied: the queries of one group become rows
    of one problem. On a CPU in FP32 SDPA is quicker with the groups as they are; in BF16 four times slower.
    """
    group = q.shape[1] // k.shape[1]
    if group == 1 or causal or (q.device.type == "cpu" and q.dtype == torch.float32):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=group > 1)
    _, heads, tokens, dim = q.shape
    rows = q.reshape(1, k.shape[1], group * tokens, dim)  # the heads of a group are neighbours
    if mask is not None:
        mask = mask.repeat(1, 1, group, 1)
    return F.scaled_dot_product_attention(rows, k, v, attn_mask=mask).reshape(1, heads, tokens, dim)
