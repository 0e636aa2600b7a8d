"""Attention as the paper writes it: the whole score matrix at once. The oracle of everything else here."""

from __future__ import annotations

import torch
from torch import Tensor

from llm_latency.attention.checks import broadcast_mask, check_flag, check_scale, check_tensors, visible_pairs
from llm_latency.attention.masked_values import holds_non_finite, weighted_values


def attention_reference(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, mask: Tensor | None = None, scale: float | None = None
) -> Tensor:
    """softmax(q k^T * scale) v with the full matrix of scores in memory (Vaswani et al., 2017).

    Args:
        q: [batch, seq_q, heads, head_dim]. k, v: [batch, seq_k, kv_heads, head_dim]; each KV head serves
            heads / kv_heads consecutive query heads. FP16, BF16, FP32 or FP64; computed in FP32 (FP64 for FP64).
        causal: queries see no later key; the last query is aligned with the last key.
        mask: bool, broadcastable to [batch, heads, seq_q, seq_k]; True where a query may attend.
        scale: factor on the scores; None is 1 / sqrt(head_dim).

    Returns:
        [batch, seq_q, heads, head_dim] in q's dtype. A row that may attend to nothing is zeros.

    Raises:
        TypeError, ValueError: see `checks.check_tensors`.
    """
    check_tensors(q, k, v, mask)
    check_flag("causal", causal)
    scale = check_scale(scale, q.shape[-1])
    compute = torch.promote_types(q.dtype, torch.float32)
    group = q.shape[2] // k.shape[2]
    # [batch, heads, seq, head_dim]
    q32 = q.to(compute).transpose(1, 2)
    k32 = k.to(compute).transpose(1, 2).repeat_interleave(group, dim=1)
    v32 = v.to(compute).transpose(1, 2).repeat_interleave(group, dim=1)

    scores = q32 @ k32.transpose(-1, -2) * scale  # [batch, heads, seq_q, seq_k]
    allowed = visible_pairs(q, k, causal, mask)
    if allowed is None:
        out = scores.softmax(dim=-1) @ v32
    else:
        allowed = broadcast_mask(allowed, q, k)
        weights = scores.masked_fill(~allowed, -torch.inf).softmax(dim=-1)
        weights = weights.masked_fill(~allowed, 0.0)  # softmax over nothing is NaN; the row shall be zeros
        out = weighted_values(weights, v32, allowed) if holds_non_finite(v32) else weights @ v32
    return out.transpose(1, 2).to(q.dtype)
