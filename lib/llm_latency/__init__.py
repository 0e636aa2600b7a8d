"""Clocks that tell the truth, and FlashAttention, an INT8 KV cache and fast decoders for transformers models."""

from llm_latency import _moved

_moved.install()
