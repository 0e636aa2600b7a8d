"""Caches of keys and values that hold more tokens in fewer bytes."""

from llm_latency.kv_cache.int8 import Int8KVCache as Int8KVCache
from llm_latency.kv_cache.int8_attention import attend_int8 as attend_int8
from llm_latency.kv_cache.registration import register as _register

_register()
