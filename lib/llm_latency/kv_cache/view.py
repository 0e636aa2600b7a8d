"""What a reader of a quantised cache gets to see: one layer's stores and window, nothing copied."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from llm_latency.kv_cache.stores import Store


@dataclass(frozen=True, slots=True)
class QuantizedKV:
    """One layer's keys and values: the oldest tokens in two stores, the newest exact.

    key_window, value_window: the exact tokens [batch, kv_heads, window, head_dim].

    Valid until the cache is next written to.
    """

    keys: Store
    values: Store
    key_window: Tensor
    value_window: Tensor

    @property
    def quantized(self) -> int:
        """Tokens that are codes."""
        return self.keys.length

    @property
    def length(self) -> int:
        """Tokens in all."""
        return self.quantized + self.key_window.shape[-2]

    def dequantize(self) -> tuple[Tensor, Tensor]:
        """All keys and all values, [batch, kv_heads, length, head_dim] each, in the window's dtype."""
        return self._read(self.keys, self.key_window), self._read(self.values, self.value_window)

    def _read(self, store: Store, window: Tensor) -> Tensor:
        batch, heads, newest, head_dim = window.shape
        out: Tensor = torch.empty(
            batch, heads, store.length + newest, head_dim, dtype=window.dtype, device=window.device
        )
        store.read_into(out[:, :, : store.length])
        out[:, :, store.length :] = window
        return out
