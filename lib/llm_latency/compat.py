"""Where supported versions of transformers differ: one name."""

from __future__ import annotations

import functools
import inspect

from transformers import Cache, LlamaForCausalLM


@functools.cache
def _cache_name() -> str:
    # transformers 5.24 renamed `past_key_values` to `cache` and warns of the old name; earlier ones know only the old.
    return "cache" if "cache" in inspect.signature(LlamaForCausalLM.forward).parameters else "past_key_values"


def with_cache(cache: Cache | None) -> dict[str, Cache | None]:
    """The keyword argument that hands `cache` to a transformers model's forward or generate: `**with_cache(cache)`."""
    return {_cache_name(): cache}
