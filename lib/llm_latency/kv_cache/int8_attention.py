"""Attention that reads an INT8 cache as it lies: no full-precision copy of it is ever written.

On a CPU a block of codes at a time is widened to FP32, small enough to stay in a core's cache, and used at once. The
scales of values are not even multiplied in: they are folded into the attention weights, of which there are far fewer.
On CUDA one Triton kernel does both in registers (`int8_triton`).

Importing this makes transformers models read the codes: `model.set_attn_implementation("int8_kv")`. The cache then
hands the attention its layer in place of keys and values. Everything else (no cache, another cache) goes to
transformers' own SDPA path, so one model serves both.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from llm_latency.attention.backend_facts import triton_problem
from llm_latency.attention.checks import check_mask, check_scale
from llm_latency.attention.transformers_hook import register
from llm_latency.kv_cache.int8 import ATTENTION_NAME, Int8CacheLayer
from llm_latency.kv_cache.stores import ChannelStore, TokenStore, block_ranges

MANY_QUERIES = 16  # from here on a pass is bound by arithmetic, and one full-precision copy serves all its queries


def attend_int8(
    query: Tensor, kv: Int8CacheLayer, *, mask: Tensor | None = None, scale: float | None = None, backend: str = "auto"
) -> Tensor:
    """Attention of the newest tokens over one layer of an `Int8KVCache` that holds them already.

    query: [batch, heads, n, head_dim], heads a multiple of the cache's KV heads. Without a mask the n queries are the
    newest n tokens and each sees the tokens up to itself.
    mask: bool, broadcastable to [batch, heads, n, length], True = may attend. A row that may attend to nothing is 0.
    scale: None is 1 / sqrt(head_dim).
    backend: "blocked" (any device), "triton" (one query without a mask; CUDA, or Triton's interpreter on a CPU), or
        "auto": Triton on CUDA where it can, else blocked.

    Returns [batch, heads, n, head_dim] in the query's dtype; sums are FP32.

    Raises TypeError or ValueError, naming the shapes, for a query or mask that does not fit, ValueError for an unknown
    backend, ImportError for "triton" where it is not installed.
    """
    _check(query, kv, mask)
    if backend not in ("auto", "blocked", "triton"):
        raise ValueError(f"backend={backend!r}; expected 'auto', 'blocked' or 'triton'")
    scale = check_scale(scale, query.shape[-1])
    n, length, group_size = query.shape[2], kv.get_seq_length(), kv.key_store.group_size
    if mask is None and n > 1:
        mask = torch.ones(n, length, dtype=torch.bool, device=query.device).tril(length - n)
    fits_triton = mask is None and group_size >= 16 and group_size.bit_count() == 1
    if backend == "triton" and not fits_triton:
        raise ValueError(
            f"backend='triton' takes one query, no mask, and groups of 16, 32, 64, ... tokens; got {n} queries, "
            f"{'no mask' if mask is None else 'a mask'}, groups of {group_size}. Use 'blocked'"
        )
    if backend == "auto" and query.is_cuda and fits_triton and triton_problem(query.device) is None:
        backend = "triton"
    if backend != "triton":
        return attend_blocked(query, kv, mask, scale)
    from llm_latency.kv_cache.int8_triton import decode_int8  # at the first use: it loads Triton

    return decode_int8(query, kv, scale)


def attend_blocked(query: Tensor, kv: Int8CacheLayer, mask: Tensor | None, scale: float) -> Tensor:
    """The blocked path: arguments as `attend_int8` after its checks."""
    batch, heads, n, head_dim = query.shape
    kv_heads, quantized, length = kv.keys.shape[1], kv.quantized, kv.get_seq_length()
    # The query heads that share a KV head become rows of one product: [batch, kv_heads, rows, head_dim]
    q = query.reshape(batch, kv_heads, heads // kv_heads * n, head_dim).float() * scale
    ranges = list(block_ranges(quantized, batch * kv_heads * head_dim, kv.key_store.group_size))
    # One buffer for every block of keys, then of values: written again before it has left the core's cache.
    buffer = q.new_empty(batch, kv_heads, head_dim * max((end - start for start, end in ranges), default=0))

    key_scales = kv.key_store.scales.float() if quantized else None
    scores = [torch.matmul(q, _key_block(kv.key_store, key_scales, start, end, buffer)) for start, end in ranges]
    scores.append(torch.matmul(q, kv.keys.float().transpose(2, 3)))
    scores = torch.cat(scores, dim=-1)  # [batch, kv_heads, rows, length]
    if mask is not None:
        scores.view(batch, heads, n, length).masked_fill_(~mask, float("-inf"))
    weights = scores.softmax(dim=-1)
    if mask is not None:
        # A row that sees nothing has NaN for weights. Only those rows are mended: another NaN must stay to be seen.
        weights.view(batch, heads, n, length).masked_fill_(~mask.any(dim=-1, keepdim=True), 0.0)

    out = torch.matmul(weights[..., quantized:], kv.values.float())  # [batch, kv_heads, rows, head_dim]
    if quantized:
        folded = weights[..., :quantized] * kv.value_store.scales[:, :, :quantized].float().transpose(2, 3)
        for start, end in ranges:
            out += torch.matmul(folded[..., start:end], _value_block(kv.value_store, start, end, buffer))
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


def _check(query: Tensor, kv: Int8CacheLayer, mask: Tensor | None) -> None:
    if not isinstance(kv.key_store, ChannelStore):
        raise ValueError("this attention reads keys with scales per channel; this cache has key_scales='token'")
    if not query.is_floating_point():
        raise TypeError(f"query has dtype {query.dtype}; expected a floating-point one")
    shape, length = list(query.shape), kv.get_seq_length()
    if length == 0:
        raise ValueError("the cache is empty; expected one that holds the queries' tokens already")
    batch, kv_heads, _, head_dim = kv.keys.shape
    if query.dim() != 4 or shape[0] != batch or shape[3] != head_dim or shape[1] % kv_heads:
        raise ValueError(
            f"query has shape {shape}; expected [{batch}, a multiple of {kv_heads} heads, n, {head_dim}] for this cache"
        )
    if not 1 <= shape[2] <= length:
        raise ValueError(f"{shape[2]} queries over {length} stored tokens; expected 1 to {length}")
    if mask is not None:
        check_mask(mask, query.device, (batch, shape[1], shape[2], length))


# -- transformers -------------------------------------------------------------------------------------------------


def int8_kv_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor | Int8CacheLayer,
    value: Tensor | Int8CacheLayer,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    **kwargs,
) -> tuple[Tensor, None]:
    """transformers' attention signature; query [batch, heads, n, head_dim] -> [batch, n, heads, head_dim]."""
    if isinstance(key, Int8CacheLayer):
        if query.shape[2] < MANY_QUERIES:
            out = attend_int8(query, key, mask=attention_mask, scale=scaling)
            return out.transpose(1, 2).contiguous(), None
        key, value = key.dequantize()
    return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)


register(ATTENTION_NAME, int8_kv_attention, sdpa_mask)
