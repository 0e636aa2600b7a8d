"""The INT8 cache against the BF16 cache: bytes, and the time to read it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import Cache, DynamicCache, PreTrainedModel

from llm_latency.compat import head_dim, with_cache
from llm_latency.kv_cache import Int8KVCache, attend_int8
from llm_latency.kv_cache.int8 import ATTENTION_NAME
from llm_latency.timing import Comparison, compare

TOKENS = 4096
BF16, INT8, COPY, SDPA, READ = (
    "BF16 cache",
    "INT8 cache",
    "INT8, copied to BF16 first",
    "BF16, attention alone",
    "INT8, attention alone",
)


def random_kv(config, tokens: int, *, batch: int = 1, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """Keys and values [batch, kv_heads, tokens, head_dim] in BF16 for timing: what they hold does not matter for it."""
    generator = torch.Generator(device=device).manual_seed(0)
    shape = (batch, config.num_key_value_heads, tokens, head_dim(config))
    keys, values = (torch.randn(shape, generator=generator, device=device) for _ in range(2))
    return keys.bfloat16(), values.bfloat16()


def bytes_ratio(config, tokens: int = TOKENS) -> float:
    """Bytes that an Int8KVCache of `tokens` tokens holds, scales and window included, over those of BF16."""
    keys, values = random_kv(config, tokens)
    cache = Int8KVCache(config)
    cache.update(keys, values, 0)
    return cache.nbytes / (keys.nbytes + values.nbytes)


def reading_times(
    config, tokens: int, *, batch: int = 1, device: torch.device | str = "cpu", rounds: int = 20
) -> Comparison:
    """One layer's part of a decode step by kind of cache, timed in turns.

    "BF16 cache", "INT8 cache", "INT8, copied to BF16 first": take in one token, attend to all. "..., attention alone":
    the attention without taking in a token; the BF16 one is the best case for it, a tensor that need not grow.
    """
    keys, values = random_kv(config, tokens, batch=batch, device=device)
    token = keys[:, :, :1].clone(), values[:, :, :1].clone()
    heads, head_dim = config.num_attention_heads, keys.shape[-1]
    query = torch.randn(batch, heads, 1, head_dim, device=device).bfloat16()
    dynamic = DynamicCache(config=config)
    dynamic.update(keys, values, 0)
    int8 = [_filled(config, keys, values) for _ in range(3)]

    def grown() -> Tensor:
        return sdpa(query, *dynamic.update(*token, 0))

    def blocked() -> Tensor:
        int8[0].store(*token)
        return attend_int8(query, int8[0])

    def copied() -> Tensor:
        int8[1].store(*token)
        return sdpa(query, *int8[1].dequantize())

    functions: dict[str, Callable[[], Tensor]] = {
        BF16: grown,
        INT8: blocked,
        COPY: copied,
        SDPA: lambda: sdpa(query, keys, values),
        READ: lambda: attend_int8(query, int8[2]),
    }
    with torch.inference_mode():
        return compare(functions, rounds=rounds, device=device)


def step_times(model: PreTrainedModel, tokens: int, *, rounds: int = 10) -> Comparison:
    """Whole decode steps of a BF16 or FP16 model after `tokens` tokens of context: "BF16 cache" and "INT8 cache".

    The caches are filled with random numbers: the time of a step does not depend on them. The model's attention must be
    "int8_kv", which serves both.

    Raises ValueError if it is another.
    """
    if model.config._attn_implementation != ATTENTION_NAME:
        raise ValueError(
            f"the model's attention is {model.config._attn_implementation!r}; "
            f"call model.set_attn_implementation({ATTENTION_NAME!r}) first"
        )
    keys, values = (x.to(model.dtype) for x in random_kv(model.config, tokens, device=model.device))
    token = torch.ones(1, 1, dtype=torch.long, device=model.device)

    def stepping(cache: Cache) -> Callable[[], Tensor]:
        for layer in range(model.config.num_hidden_layers):
            cache.update(keys, values, layer)
        return lambda: model(input_ids=token, use_cache=True, **with_cache(cache)).logits

    functions = {
        BF16: stepping(DynamicCache(config=model.config)),
        INT8: stepping(Int8KVCache(model.config)),
    }
    with torch.inference_mode():
        return compare(functions, rounds=rounds, warmup=1, device=model.device)


def sdpa(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """SDPA of one query, as transformers calls it: the heads that share a KV head are rows, and nothing is repeated."""
    batch, heads, _, head_dim = query.shape
    rows = query.view(batch, keys.shape[1], heads // keys.shape[1], head_dim)
    return F.scaled_dot_product_attention(rows, keys, values)


def _filled(config, keys: Tensor, values: Tensor):
    layer = Int8KVCache(config).layers[0]
    layer.store(keys, values)
    return layer
