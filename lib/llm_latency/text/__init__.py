"""The text path: from characters to token ids and back, and what can be saved around the model."""

from llm_latency.text.streaming import StreamingDetokenizer
from llm_latency.text.token_cache import TokenCache, TokenCacheStats

__all__ = [
    "StreamingDetokenizer",
    "TokenCache",
    "TokenCacheStats",
]
