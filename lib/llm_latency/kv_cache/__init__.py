"""Caches of keys and values that hold more tokens in fewer bytes."""

from llm_latency.kv_cache.block_manager import BlockManager as BlockManager
from llm_latency.kv_cache.block_manager import OutOfPages as OutOfPages
from llm_latency.kv_cache.int8 import Int8KVCache as Int8KVCache
from llm_latency.kv_cache.int8_attention import attend_int8 as attend_int8
from llm_latency.kv_cache.paged import PagedKVCache as PagedKVCache
from llm_latency.kv_cache.paged_waste import SlotUse as SlotUse
from llm_latency.kv_cache.paged_waste import contiguous_use as contiguous_use
from llm_latency.kv_cache.paged_waste import paged_use as paged_use
from llm_latency.kv_cache.registration import register as _register

_register()
