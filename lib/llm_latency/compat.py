"""What the versions and the configurations of transformers say differently, or not at all."""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import Cache, PreTrainedConfig


@functools.cache
def _cache_name() -> str:
    from transformers import LlamaForCausalLM  # here: its import takes seconds, which arithmetic alone does not need

    # transformers 5.24 renamed `past_key_values` to `cache` and warns of the old name; earlier ones know only the old.
    return "cache" if "cache" in inspect.signature(LlamaForCausalLM.forward).parameters else "past_key_values"


def with_cache(cache: Cache | None) -> dict[str, Cache | None]:
    """The keyword argument that hands `cache` to a transformers model's forward or generate: `**with_cache(cache)`."""
    return {_cache_name(): cache}


def head_dim(config: PreTrainedConfig) -> int:
    """Width of one attention head. Llama's configurations say it; Qwen2's leave it to be computed."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def check_rope(config: PreTrainedConfig) -> None:
    """Raise ValueError for rotary positions whose factors change with the longest text that is read (cases.md 42).

    Keys that several requests share, or that one pass computes for several, would be rotated by another's length.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    for part in (rope, *rope.values()):  # some models keep one set per kind of layer
        kind = part.get("rope_type") if isinstance(part, dict) else None
        if kind in ("dynamic", "longrope"):
            raise ValueError(
                f"this model's RoPE is {kind!r}: its factors change with the longest text, so that requests cannot "
                "share a pass or a prefix; expected rotations that are fixed"
            )
