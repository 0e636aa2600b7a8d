"""The text path: from characters to token ids and back, and what can be saved around the model."""

from .batch import decode_batch
from .compress import CompressedPrompt, Dropped, Section, compress_prompt
from .streaming import StreamingDetokenizer
from .token_cache import TokenCache, TokenCacheStats

__all__ = [
    "CompressedPrompt",
    "Dropped",
    "Section",
    "StreamingDetokenizer",
    "TokenCache",
    "TokenCacheStats",
    "compress_prompt",
    "decode_batch",
]
