"""Attention over blocks, as an attention implementation of transformers: the model itself stays as it is."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedModel

from llm_latency.attention import register
from llm_latency.batching.scheduler import Piece, Plan
from llm_latency.kv_cache.paged import PagedKVCache

NAME = "llm_latency_paged"


@dataclass(frozen=True, slots=True)
class PrefillPart:
    """A piece of a prompt: rows first to last of the step, behind `start` stored tokens."""

    first: int
    last: int
    start: int
    table: Tensor  # [1, blocks]
    mask: Tensor | None  # [last - first, slots]; None: nothing is stored before, so plain causal attention will do


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """One step's tokens of all requests in one flat row, and where their keys and values lie. Made once per step."""

    cache: PagedKVCache
    token_ids: Tensor  # [1, tokens]
    positions: Tensor  # [1, tokens]
    slots: Tensor  # [tokens]
    ends: Tensor  # rows whose logits are wanted
    decodes: int  # the first rows are one token each of so many requests
    tables: Tensor  # [decodes, blocks]
    mask: Tensor  # [decodes, 1, 1, slots], 0 or -inf
    parts: tuple[PrefillPart, ...]


def make_batch(cache: PagedKVCache, plan: Plan) -> PagedBatch:
    """Index tensors of a plan, shared by all layers."""
    manager, device = cache.manager, cache.pool.device
    for reservation in plan.reservations:
        cache.prepare(reservation)

    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    ends: list[int] = []
    parts: list[PrefillPart] = []
    for i, piece in enumerate(plan.pieces):
        stop = piece.start + piece.count
        if i >= len(plan.decodes):
            parts.append(_part(cache, piece, len(token_ids)))
        token_ids.extend(piece.request.tokens[piece.start : stop])
        positions.extend(range(piece.start, stop))
        slots.extend(manager.slots(piece.request.id, piece.start, stop))
        if stop == piece.request.length:
            ends.append(len(token_ids) - 1)

    tables = cache.tables([piece.request.id for piece in plan.decodes])
    lengths = torch.tensor([piece.start + 1 for piece in plan.decodes], device=device)
    places = torch.arange(tables.shape[1] * cache.block_size if plan.decodes else 0, device=device)
    mask = torch.zeros(len(plan.decodes), len(places), dtype=cache.pool.dtype, device=device)
    mask.masked_fill_(places >= lengths[:, None], -torch.inf)

    def tensor(numbers: list[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device=device)

    return PagedBatch(
        cache,
        tensor(token_ids)[None],
        tensor(positions)[None],
        tensor(slots),
        tensor(ends),
        len(plan.decodes),
        tables,
        mask[:, None, None],
        tuple(parts),
    )


def _part(cache: PagedKVCache, piece: Piece, first: int) -> PrefillPart:
    table = cache.tables([piece.request.id])
    mask = None
    if piece.start > 0:
        places = torch.arange(table.shape[1] * cache.block_size, device=table.device)
        mask = places <= torch.arange(piece.start, piece.start + piece.count, device=table.device)[:, None]
    return PrefillPart(first, first + piece.count, piece.start, table, mask)


def paged_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    paged_batch: PagedBatch,
    **options,
) -> tuple[Tensor, None]:
    """Stores this layer's new keys and values in their blocks, then attends request by request.

    Decode rows go through one call, padded to the longest and masked: one kernel for 16 short rows was more than twice
    as fast as 16 calls on a 2-core CPU. Pieces of prompts have many rows each and go one by one.

    Args:
        query: [1, heads, tokens, head_dim]. key, value: [1, kv_heads, tokens, head_dim], after rotary embedding.

    Returns:
        [1, tokens, heads, head_dim].

    Raises:
        ValueError: a model with sliding windows, soft caps or attention sinks, which blocks here do not know.
    """
    for name in ("sliding_window", "softcap", "s_aux"):
        if options.get(name) is not None:
            raise ValueError(f"paged attention here knows no {name}; {type(module).__name__} asks for it")
    batch, layer = paged_batch, module.layer_idx
    heads, tokens, head_dim = query.shape[1:]
    kv_heads = key.shape[1]
    batch.cache.write(layer, batch.slots, key[0].transpose(0, 1), value[0].transpose(0, 1))
    output = query.new_empty(tokens, heads, head_dim)

    if batch.decodes:
        keys, values = batch.cache.gather(layer, batch.tables)  # [rows, kv_heads, slots, head_dim]
        # The query heads that share a KV head stand as its rows, so that keys and values need no repeating.
        rows = query[0, :, : batch.decodes].transpose(0, 1).reshape(batch.decodes, kv_heads, -1, head_dim)
        mixed = scaled_dot_product_attention(rows, keys, values, attn_mask=batch.mask, scale=scaling)
        output[: batch.decodes] = mixed.reshape(batch.decodes, heads, head_dim)

    for part in batch.parts:
        rows = query[:, :, part.first : part.last]  # [1, heads, rows, head_dim]
        if part.mask is None:
            keys, values = key[:, :, part.first : part.last], value[:, :, part.first : part.last]
        else:
            keys, values = batch.cache.gather(layer, part.table)
        mixed = scaled_dot_product_attention(
            rows, keys, values, attn_mask=part.mask, is_causal=part.mask is None, scale=scaling, enable_gqa=True
        )
        output[part.first : part.last] = mixed[0].transpose(0, 1)
    return output[None], None


def _no_mask(*args, **options) -> None:
    """Who may see whom follows from the page tables."""


register(NAME, paged_attention, _no_mask)


@contextlib.contextmanager
def paged_model(model: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """The model with paged attention for a while; what it used before comes back, whatever happens."""
    before = model.config._attn_implementation
    model.config._attn_implementation = NAME
    try:
        yield model
    finally:
        model.config._attn_implementation = before
