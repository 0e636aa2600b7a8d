"""Keys and values of many requests in the pages of one pool."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PretrainedConfig

from llm_latency.kv_cache.block_manager import BlockManager, Reservation


class PagedKVCache:
    """The storage behind a `BlockManager`: one pool per model, pages of `page_size` tokens, a table per request.

    It is not a transformers Cache: those hold one batch that grows in step, this one holds requests that come and go.
    `llm_latency.batching` runs a transformers model over it.

    Args:
        config: a transformers config (layers, KV heads, head size).
        num_pages: pages in the pool; one more, always zero, fills the tables of shorter requests.
        dtype, device: those of the model.

    Attributes:
        pool: [layers, 2, num_pages + 1, page_size, kv_heads, head_dim], keys at 0 and values at 1.
        manager: the bookkeeping.

    Raises:
        ValueError: sizes below 1.
    """

    def __init__(
        self,
        config: PretrainedConfig,
        *,
        num_pages: int,
        page_size: int = 16,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        prefix_caching: bool = True,
    ):
        config = config.get_text_config()
        self.manager = BlockManager(num_pages, page_size, prefix_caching=prefix_caching)
        self.kv_heads = config.num_key_value_heads
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.page_size = page_size
        self.null_page = num_pages
        shape = (config.num_hidden_layers, 2, num_pages + 1, page_size, self.kv_heads, self.head_dim)
        self.pool = torch.zeros(shape, dtype=dtype, device=device)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole pool."""
        return self.pool.numel() * self.pool.element_size()

    @property
    def page_nbytes(self) -> int:
        """Bytes of one page: keys and values of page_size tokens in every layer."""
        return self.nbytes // (self.null_page + 1)

    def prepare(self, reservation: Reservation) -> None:
        """Copies shared pages and clears fresh ones, before anything is written.

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
        """Keys and values, each [rows, kv_heads, pages * page_size, head_dim], of page tables int64 [rows, pages]."""
        rows, pages = tables.shape
        flat = tables.reshape(-1)
        # Whole pages are copied, each contiguous: token by token it would be page_size times as many small copies.
        keys, values = (
            pool.index_select(0, flat).view(rows, pages * self.page_size, self.kv_heads, self.head_dim).transpose(1, 2)
            for pool in self.pool[layer]
        )
        return keys, values

    def tables(self, requests: Sequence, pages: int | None = None) -> Tensor:
        """Page tables int64 [rows, pages] of several requests, filled up with the page that is always zero."""
        tables = [self.manager.table(request) for request in requests]
        width = pages or max(map(len, tables), default=0)
        rows = [table + [self.null_page] * (width - len(table)) for table in tables]
        return torch.tensor(rows, dtype=torch.int64, device=self.pool.device)
