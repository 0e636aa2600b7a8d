"""Attention in five ways: the formula, FlashAttention in PyTorch, the same as Triton kernels, SDPA, and flash-attn.

Importing this registers `attn_implementation="llm_latency_flash"` and `"llm_latency_triton"` with transformers. The
Triton kernels themselves (`triton_prefill`, `triton_decode`) are imported at their first use.
"""

from llm_latency.attention.backend_facts import BACKENDS, backends
from llm_latency.attention.dispatch import attend, cannot
from llm_latency.attention.flash import FlashAttention, online_softmax_step
from llm_latency.attention.reference import attention_reference
from llm_latency.attention.transformers_hook import IMPLEMENTATIONS, register

__all__ = [
    "BACKENDS",
    "IMPLEMENTATIONS",
    "FlashAttention",
    "attend",
    "attention_reference",
    "backends",
    "cannot",
    "online_softmax_step",
    "register",
]
