"""Attention that reads an INT8 cache as it lies: no full-precision copy of it is ever written.

On a CPU a block of codes at a time is widened to FP32, small enough to stay in a core's cache, and used at once. The
scales of values are not even multiplied in: they are folded into the attention weights, of which there are far fewer.
On CUDA one Triton kernel does both in registers (`int8_triton`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from llm_latency.attention.checks import check_scale
from llm_latency.kv_cache.stores import ChannelStore, TokenStore, block_ranges
from llm_latency.kv_cache.view import QuantizedKV


def attend_int8(
    query: Tensor, kv: QuantizedKV, *, mask: Tensor | None = None, scale: float | None = None, backend: str = "auto"
) -> Tensor:
    """Attention of the newest tokens over a quantised cache that holds them already.

    query: [batch, heads, n, head_dim], heads a multiple of the cache's KV heads. Without a mask the n queries are the
    newest n tokens and each sees the tokens up to itself.
    mask: bool, broadcastable to [batch, heads, n, length], True = may attend. A row that may attend to nothing is 0.
    scale: None is 1 / sqrt(head_dim).
    backend: "blocked" (any device), "triton" (one query without a mask; CUDA, or Triton's interpreter on a CPU), or
        "auto": Triton on CUDA where it can, else blocked.

    Returns [batch, heads, n, head_dim] in the query's dtype; sums are FP32.

    Raises ValueError, naming the shapes, for a query or mask that does not fit, and for an unknown backend.
    """
    _check(query, kv, mask)
    if backend not in ("auto", "blocked", "triton"):
        raise ValueError(f"backend={backend!r}; expected 'auto', 'blocked' or 'triton'")
    scale = check_scale(scale, query.shape[-1])
    n = query.shape[2]
    if mask is None and n > 1:
        mask = torch.ones(n, kv.length, dtype=torch.bool, device=query.device).tril(kv.length - n)
    fits_triton = mask is None and kv.keys.group_size >= 16 and kv.keys.group_size.bit_count() == 1
    if backend == "triton" and not fits_triton:
        raise ValueError(
            f"backend='triton' takes one query, no mask, and groups of 16, 32, 64, ... tokens; got {n} queries, "
            f"{'no mask' if mask is None else 'a mask'}, groups of {kv.keys.group_size}. Use 'blocked'"
        )
    if backend == "triton" or (backend == "auto" and query.is_cuda and fits_triton):
        from llm_latency.kv_cache.int8_triton import decode_int8

        return decode_int8(query, kv, scale)
    return attend_blocked(query, kv, mask, scale)


def attend_blocked(query: Tensor, kv: QuantizedKV, mask: Tensor | None, scale: float) -> Tensor:
    """The blocked path: arguments as `attend_int8` after its checks."""
    batch, heads, n, head_dim = query.shape
    kv_heads, quantized = kv.key_window.shape[1], kv.quantized
    # The query heads that share a KV head become rows of one product: [batch, kv_heads, rows, head_dim]
    q = query.reshape(batch, kv_heads, heads // kv_heads * n, head_dim).float() * scale
    ranges = list(block_ranges(quantized, batch * kv_heads * head_dim, kv.keys.group_size))
    # One buffer for every block of keys, then of values: written again before it has left the core's cache.
    buffer = q.new_empty(batch, kv_heads, head_dim * max((end - start for start, end in ranges), default=0))

    key_scales = kv.keys.scales.float() if quantized else None
    scores = [torch.matmul(q, _key_block(kv.keys, key_scales, start, end, buffer)) for start, end in ranges]
    scores.append(torch.matmul(q, kv.key_window.float().transpose(2, 3)))
    scores = torch.cat(scores, dim=-1)  # [batch, kv_heads, rows, length]
    if mask is not None:
        scores.view(batch, heads, n, kv.length).masked_fill_(~mask, float("-inf"))
    weights = scores.softmax(dim=-1)
    if mask is not None:
        # A row that sees nothing has NaN for weights. Only those rows are mended: another NaN must stay to be seen.
        weights.view(batch, heads, n, kv.length).masked_fill_(~mask.any(dim=-1, keepdim=True), 0.0)

    out = torch.matmul(weights[..., quantized:], kv.value_window.float())  # [batch, kv_heads, rows, head_dim]
    if quantized:
        folded = weights[..., :quantized] * kv.values.scales[:, :, :quantized].float().transpose(2, 3)
        for start, end in ranges:
            out += torch.matmul(folded[..., start:end], _value_block(kv.values, start, end, buffer))
    return out.view(batch, heads, n, head_dim).to(query.dtype)


def _key_block(keys: ChannelStore, scales: Tensor, start: int, end: int, buffer: Tensor) -> Tensor:
    """Keys start..end, dequantised: FP32 [batch, kv_heads, head_dim, end - start]; start begins a group."""
    size = keys.group_size
    whole = (end - start) // size
    block = buffer[..., : keys.codes.shape[2] * (end - start)].unflatten(-1, (-1, end - start))
    block.copy_(keys.codes[..., start:end])
    scales = scales[..., start // size :]  # [batch, kv_heads, head_dim, groups]
    if whole:
        block[..., : whole * size].unflatten(-1, (whole, size)).mul_(scales[..., :whole].unsqueeze(-1))
    if (end - start) % size:
        block[..., whole * size :].mul_(scales[..., whole : whole + 1])
    return block


def _value_block(values: TokenStore, start: int, end: int, buffer: Tensor) -> Tensor:
    """Codes of the values start..end, not yet scaled: FP32 [batch, kv_heads, end - start, head_dim]."""
    head_dim = values.codes.shape[3]
    block = buffer[..., : head_dim * (end - start)].unflatten(-1, (end - start, head_dim))
    block.copy_(values.codes[:, :, start:end])
    return block


def _check(query: Tensor, kv: QuantizedKV, mask: Tensor | None) -> None:
    if not isinstance(kv.keys, ChannelStore):
        raise ValueError(
            f"the keys lie in a {type(kv.keys).__name__}; this attention reads keys with scales per channel"
        )
    if not query.is_floating_point():
        raise TypeError(f"query has dtype {query.dtype}; expected a floating-point one")
    batch, kv_heads, _, head_dim = kv.key_window.shape
    shape = list(query.shape)
    if query.dim() != 4 or shape[0] != batch or shape[3] != head_dim or shape[1] % kv_heads:
        raise ValueError(
            f"query has shape {shape}; expected [{batch}, a multiple of {kv_heads} heads, n, {head_dim}] for this cache"
        )
    if not 1 <= shape[2] <= kv.length:
        raise ValueError(f"{shape[2]} queries over {kv.length} stored tokens; expected 1 to {kv.length}")
    if mask is not None:
        if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
            kind = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
            raise ValueError(f"mask is {kind}; expected bool, True = may attend")
        wanted = (batch, shape[1], shape[2], kv.length)
        try:
            fits = torch.broadcast_shapes(mask.shape, wanted) == wanted
        except RuntimeError:
            fits = False
        if not fits:
            raise ValueError(f"mask has shape {list(mask.shape)}; expected broadcastable to {list(wanted)}")
