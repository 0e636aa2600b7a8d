"""The text path: from characters to token ids and back, and what can be saved around the model."""

from .streaming import StreamingDetokenizer

__all__ = ["StreamingDetokenizer"]
