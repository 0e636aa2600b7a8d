"""Keys and values of many requests in the blocks of one pool."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PretrainedConfig

from llm_latency.compat import head_dim
from llm_latency.kv_cache.block_manager import BlockManager, Reservation


class PagedKVCache:
    """The storage behind a `BlockManager`: one pool per model, blocks of `block_size` tokens, a table per request.

    It is not a transformers Cache: those hold one batch that grows in step, this one holds requests that come and go.
    `llm_latency.batching` runs a transformers model over it.

    Args:
        config: a transformers config (layers, KV heads, head size).
        num_blocks: blocks in the pool; one more, always zero, fills the tables of shorter requests.
        dtype, device: those of the model.

    Attributes:
        pool: [layers, 2, num_blocks + 1, block_size, kv_heads, head_dim], keys at 0 and values at 1.
        manager: the bookkeeping.

    Raises:
        ValueError: sizes below 1.
    """

    def __init__(
        self,
        config: PretrainedConfig,
        *,
        num_blocks: int,
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        prefix_caching: bool = True,
    ):
        config = config.get_text_config()
        self.manager = BlockManager(num_blocks, block_size, prefix_caching=prefix_caching)
        self.kv_heads = config.num_key_value_heads
        self.head_dim = head_dim(config)
        self.block_size = block_size
        self.null_block = num_blocks
        shape = (config.num_hidden_layers, 2, num_blocks + 1, block_size, self.kv_heads, self.head_dim)
        self.pool = torch.zeros(shape, dtype=dtype, device=device)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole pool."""
        return self.pool.nbytes

    def prepare(self, reservation: Reservation) -> None:
        """Copies shared blocks and clears fresh ones, before anything is written.

        Clearing matters: an unused slot is masked, but a mask does not stop a NaN that an earlier owner left (0 * NaN).
        """
        if reservation.copies:
            sources, targets = torch.tensor(reservation.copies, device=self.pool.device).unbind(1)
            self.pool[:, :, targets] = self.pool[:, :, sources]
        if reservation.fresh:
            self.pool[:, :, torch.tensor(reservation.fresh, device=self.pool.device)] = 0

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Stores keys and values [n, kv_heads, head_dim] of n tokens, of whatever requests, at slots int64 [n]."""
        for pool, new in zip(self.pool[layer], (keys, values), strict=True):
            pool.view(-1, self.kv_heads, self.head_dim).index_copy_(0, slots, new)

    def gather(self, layer: int, tables: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [rows, kv_heads, blocks * block_size, head_dim] of block tables int64 [rows, blocks]."""
        rows, blocks = tables.shape
        flat = tables.reshape(-1)
        # Whole blocks are copied, each contiguous: token by token it would be block_size times as many small copies.
        keys, values = (
            pool.index_select(0, flat)
            .view(rows, blocks * self.block_size, self.kv_heads, self.head_dim)
            .transpose(1, 2)
            for pool in self.pool[layer]
        )
        return keys, values

    def tables(self, requests: Sequence) -> Tensor:
        """Block tables int64 [rows, blocks] of several requests, filled up with the block that is always zero."""
        tables = [self.manager.table(request) for request in requests]
        width = max(map(len, tables), default=0)
        rows = [table + [self.null_block] * (width - len(table)) for table in tables]
        return torch.tensor(rows, dtype=torch.int64, device=self.pool.device)
