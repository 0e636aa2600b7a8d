"""Attention as the paper writes it: the whole score matrix at once. Every other implementation is tested against it.

It also fixes what a mask means in all of them: who may attend to whom, and that a masked key has no effect at all, even
if its value is NaN (a slot of a cache that was never written may hold anything).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from llm_latency.attention.checks import check_request


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
        TypeError, ValueError: arguments whose types, dtypes, devices or shapes do not fit together as above.
    """
    scale = check_request(q, k, v, causal, mask, scale)  # raises as above; None becomes 1 / sqrt(head_dim)
    compute = torch.promote_types(q.dtype, torch.float32)
    group = q.shape[2] // k.shape[2]
    # [batch, heads, seq, head_dim]
    queries = q.to(compute).transpose(1, 2)
    keys = k.to(compute).transpose(1, 2).repeat_interleave(group, dim=1)
    values = v.to(compute).transpose(1, 2).repeat_interleave(group, dim=1)

    scores = queries @ keys.transpose(-1, -2) * scale  # [batch, heads, seq_q, seq_k]
    allowed = visible_pairs(q, k, causal, mask)
    if allowed is None:
        out = scores.softmax(dim=-1) @ values
    else:
        allowed = broadcast_mask(allowed, q, k)
        weights = scores.masked_fill(~allowed, -torch.inf).softmax(dim=-1)
        weights = weights.masked_fill(~allowed, 0.0)  # softmax over nothing is NaN; the row must be zeros
        out = weighted_values(weights, values, allowed) if holds_non_finite(values) else weights @ values
    return out.transpose(1, 2).to(q.dtype)


def broadcast_mask(mask: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """A mask that has passed the checks as a view [batch, heads, seq_q, seq_k]: no copy is made."""
    return mask.expand(q.shape[0], q.shape[2], q.shape[1], k.shape[1])


def visible_pairs(q: Tensor, k: Tensor, causal: bool, mask: Tensor | None) -> Tensor | None:
    """Which query may attend to which key: bool, broadcastable to [batch, heads, seq_q, seq_k]; None where all may.

    causal aligns bottom-right: the last query sees every key, as it must when earlier keys come from a cache.
    """
    seq_q, seq_k = q.shape[1], k.shape[1]
    if not causal:
        return mask
    allowed = torch.ones(seq_q, seq_k, dtype=torch.bool, device=q.device).tril(seq_k - seq_q)
    return allowed if mask is None else allowed & mask


def holds_non_finite(x: Tensor) -> bool:
    """True if x may hold NaN or an infinity: they make its sum non-finite (so does an overflow). One pass, no copy."""
    return not bool(x.sum(dtype=torch.promote_types(x.dtype, torch.float32)).isfinite())


def weighted_values(weights: Tensor, values: Tensor, allowed: Tensor) -> Tensor:
    """weights @ values with non-finite values kept out of the rows that may not see them.

    A masked key has weight 0, but 0 * NaN is NaN. So the matmul runs with such values set to 0, and each one is then
    added to the rows that may attend to it.

    weights [..., rows, keys], zero where not allowed; values [..., keys, head_dim]; allowed bool, broadcastable to
    weights. Returns [..., rows, head_dim].
    """
    out = weights @ values.where(values.isfinite(), 0.0)
    seen = allowed.expand(weights.shape).to(weights.dtype)
    nan = values.isnan()
    plus = seen @ ((values == math.inf) | nan).to(weights.dtype) > 0  # [..., rows, head_dim]
    minus = seen @ ((values == -math.inf) | nan).to(weights.dtype) > 0
    # inf, -inf, or inf - inf = NaN: what the plain product gives to a row that sees such a value
    return out + torch.where(plus, math.inf, 0.0) - torch.where(minus, math.inf, 0.0)
