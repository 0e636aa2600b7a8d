"""Caches of keys and values that hold more tokens in fewer bytes."""

from llm_latency.kv_cache.block_manager import BlockManager, OutOfBlocks
from llm_latency.kv_cache.int8 import Int8CacheLayer, Int8KVCache
from llm_latency.kv_cache.int8_attention import attend_int8
from llm_latency.kv_cache.paged import PagedKVCache

__all__ = [
    "BlockManager",
    "Int8CacheLayer",
    "Int8KVCache",
    "OutOfBlocks",
    "PagedKVCache",
    "attend_int8",
]
