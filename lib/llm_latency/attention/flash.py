"""FlashAttention in plain PyTorch: exact attention, block by block, without the matrix of scores."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from llm_latency.arguments import check_count
from llm_latency.attention.checks import check_request
from llm_latency.attention.reference import broadcast_mask, holds_non_finite, weighted_values


def online_softmax_step(
    scores: Tensor, values: Tensor, m: Tensor, l: Tensor, acc: Tensor, allowed: Tensor | None, guard: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Add one block of keys to the running softmax (Milakov and Gimelshein, 2018; Dao et al., 2022).

    Three things per row suffice for the exact softmax over all keys seen so far, whatever comes next: the largest
    score m, the sum l of exp(score - m), and the vector acc, the sum of exp(score - m) * value.

    Args:
        scores: [..., rows, block_k]. values: [..., block_k, head_dim].
        m, l: [..., rows, 1]. acc: [..., rows, head_dim]. At the start -inf, 0 and 0.
        allowed: bool [..., rows, block_k]; None if every row may attend to every key.
        guard: True if values may hold NaN or infinities, which must not leak from masked keys: 0 * NaN is NaN.

    Returns:
        The new m, l, acc. The softmax's output so far is acc / l.
    """
    if allowed is not None:
        scores = scores.masked_fill(~allowed, -torch.inf)
    m_new = torch.maximum(m, scores.amax(dim=-1, keepdim=True))
    # A row that has seen nothing yet has m_new = -inf, and -inf - -inf is NaN: measure such rows from 0 instead.
    origin = m_new.masked_fill(m_new == -torch.inf, 0.0)
    shrink = torch.exp(m - origin)  # exp(old maximum - new one): rescales the sums so far
    weights = torch.exp(scores - origin)  # [..., rows, block_k]
    new_part = weighted_values(weights, values, allowed) if guard and allowed is not None else weights @ values
    return m_new, l * shrink + weights.sum(dim=-1, keepdim=True), acc * shrink + new_part


def key_blocks(
    start: int, stop: int, seq_q: int, seq_k: int, block_k: int, causal: bool
) -> Iterator[tuple[int, int, bool]]:
    """The blocks of keys that queries start..stop must read: (first key, end, whether it crosses the diagonal).

    If causal, query i sees the keys up to i + seq_k - seq_q: the last query sees them all. Blocks that none of these
    queries may see are left out; only a block that crosses the diagonal needs a causal mask.
    """
    offset = seq_k - seq_q
    last_key = min(seq_k, stop + offset) if causal else seq_k
    for k_start in range(0, last_key, block_k):
        k_stop = min(k_start + block_k, seq_k)
        yield k_start, k_stop, causal and k_stop - 1 > start + offset


class FlashAttention(torch.nn.Module):
    """Exact attention whose extra memory grows with the sequence, not with its square (FlashAttention-2, Dao 2023).

    Queries are taken in blocks of `block_q`; for each, keys and values stream past in blocks of `block_k` through
    `online_softmax_step`. Sums are in FP32 (FP64 for FP64 input). Blocks above the causal diagonal are never touched.

    Arguments of the call, result and errors are those of `attention_reference`. Raises TypeError or ValueError for a
    block size that is not an int of 1 or more.
    """

    def __init__(self, block_q: int = 128, block_k: int = 128):
        super().__init__()
        self.block_q = check_count("block_q", block_q)
        self.block_k = check_count("block_k", block_k)

    def extra_repr(self) -> str:
        return f"block_q={self.block_q}, block_k={self.block_k}"

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        causal: bool = False,
        mask: Tensor | None = None,
        scale: float | None = None,
    ) -> Tensor:
        """q [batch, seq_q, heads, head_dim], k and v [batch, seq_k, kv_heads, head_dim] to a tensor like q."""
        scale = check_request(q, k, v, causal, mask, scale)  # None becomes 1 / sqrt(head_dim)
        if mask is not None:
            mask = broadcast_mask(mask, q, k)  # [batch, heads, seq_q, seq_k]
        guard = (causal or mask is not None) and holds_non_finite(v)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for start in range(0, q.shape[1], self.block_q):
            stop = min(start + self.block_q, q.shape[1])
            out[:, start:stop] = self._query_block(q, k, v, start, stop, causal, mask, scale, guard)
        return out

    def _query_block(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        start: int,
        stop: int,
        causal: bool,
        mask: Tensor | None,
        scale: float,
        guard: bool,
    ) -> Tensor:
        """Attention of queries start..stop over all keys: [batch, stop - start, heads, head_dim], in FP32."""
        batch, seq_q, heads, head_dim = q.shape
        seq_k, kv_heads = k.shape[1], k.shape[2]
        group, rows = heads // kv_heads, stop - start
        compute = torch.promote_types(q.dtype, torch.float32)

        # The query heads that share a KV head are stacked as rows, so K and V are never repeated.
        q_block = q[:, start:stop].unflatten(2, (kv_heads, group)).permute(0, 2, 3, 1, 4)
        q_block = q_block.reshape(batch, kv_heads, group * rows, head_dim).to(compute)
        m = q_block.new_full((batch, kv_heads, group * rows, 1), -torch.inf)
        l = torch.zeros_like(m)
        acc = torch.zeros_like(q_block)

        for k_start, k_stop, crosses in key_blocks(start, stop, seq_q, seq_k, self.block_k, causal):
            # [batch, kv_heads, block_k, head_dim]
            k_block = k[:, k_start:k_stop].transpose(1, 2).to(compute)
            v_block = v[:, k_start:k_stop].transpose(1, 2).to(compute)
            scores = q_block @ k_block.transpose(-1, -2) * scale  # [batch, kv_heads, group * rows, block_k]
            allowed = None
            if mask is not None:  # [batch, kv_heads, group, rows, block_k]
                allowed = mask[:, :, start:stop, k_start:k_stop].unflatten(1, (kv_heads, group))
            if crosses:
                last_seen = torch.arange(start, stop, device=q.device)[:, None] + seq_k - seq_q  # [rows, 1]
                below = torch.arange(k_start, k_stop, device=q.device) <= last_seen
                allowed = below.expand(1, 1, group, -1, -1) if allowed is None else allowed & below
            if allowed is not None:
                allowed = allowed.flatten(2, 3)  # broadcastable to the scores
            m, l, acc = online_softmax_step(scores, v_block, m, l, acc, allowed, guard)

        out = acc / l.masked_fill(l == 0, 1.0)  # a row that saw no key has acc = 0 and stays zeros
        return out.unflatten(2, (group, rows)).permute(0, 3, 1, 2, 4).flatten(2, 3)
