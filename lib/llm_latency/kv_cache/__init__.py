"""Caches of keys and values that hold more tokens in fewer bytes."""

from llm_latency.kv_cache.block_manager import BlockManager, OutOfPages
from llm_latency.kv_cache.int8 import Int8KVCache
from llm_latency.kv_cache.int8_attention import attend_int8
from llm_latency.kv_cache.paged import PagedKVCache
from llm_latency.kv_cache.registration import register as _register

__all__ = [
    "BlockManager",
    "Int8KVCache",
    "OutOfPages",
    "PagedKVCache",
    "attend_int8",
]

_register()
