"""Makes transformers models read the codes: `model.set_attn_implementation("int8_kv")`.

The cache then hands the attention a `QuantizedKV` in place of keys and values. Everything else (no cache, another
cache) goes to transformers' own SDPA path, so one model serves both.
"""

from __future__ import annotations

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from llm_latency.kv_cache.int8 import ATTENTION_NAME
from llm_latency.kv_cache.int8_attention import attend_int8
from llm_latency.kv_cache.view import QuantizedKV

MANY_QUERIES = 16  # from here on a pass is bound by arithmetic, and one full-precision copy serves all its queries


def int8_kv_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor | QuantizedKV,
    value: Tensor | QuantizedKV,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    **kwargs,
) -> tuple[Tensor, None]:
    """transformers' attention signature; query [batch, heads, n, head_dim] -> [batch, n, heads, head_dim]."""
    if isinstance(key, QuantizedKV):
        if query.shape[2] < MANY_QUERIES:
            out = attend_int8(query, key, mask=attention_mask, scale=scaling)
            return out.transpose(1, 2).contiguous(), None
        key, value = key.dequantize()
    return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)


def register() -> None:
    """Make "int8_kv" known to transformers. Importing `llm_latency.kv_cache` does it."""
    AttentionInterface.register(ATTENTION_NAME, int8_kv_attention)
    # Without the mask function of its own, a registered attention gets no mask: causality and padding would be lost.
    AttentionMaskInterface.register(ATTENTION_NAME, sdpa_mask)
