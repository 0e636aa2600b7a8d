"""transformers' own quantised caches beside ours: which are here, what they hold, and which operations they survive."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, QuantizedCache

from every_millisecond.laboratory.cache_bench import random_kv, sdpa
from llm_latency.compat import head_dim
from llm_latency.kv_cache import Int8CacheLayer, Int8KVCache, attend_int8
from llm_latency.timing import Comparison, compare

MakeCache = Callable[[], Cache]


def quantised_caches(config) -> tuple[dict[str, MakeCache], dict[str, str]]:
    """Caches for a model's config that can be made here, by name; and why others cannot.

    optimum-quanto and hqq are packages of their own, not among this course's dependencies. Their settings are
    transformers' defaults, with the axes that HQQ's documentation recommends.
    """
    wanted = {
        "quanto, 4 bits": ("optimum.quanto", "optimum-quanto", {"backend": "quanto", "nbits": 4}),
        "HQQ, 8 bits": ("hqq", "hqq", {"backend": "hqq", "nbits": 8, "axis_key": 1, "axis_value": 1}),
        "HQQ, 4 bits": ("hqq", "hqq", {"backend": "hqq", "nbits": 4, "axis_key": 1, "axis_value": 1}),
    }
    caches: dict[str, MakeCache] = {
        "BF16": lambda: DynamicCache(config=config),
        "ours, 8 bits": lambda: Int8KVCache(config),
    }
    missing: dict[str, str] = {}
    try:
        QuantizedCache("fp8", config)
        caches["transformers, FP8"] = lambda: QuantizedCache("fp8", config)
    except ValueError:
        missing["transformers, FP8"] = "this release of transformers has none"
    for name, (module, package, options) in wanted.items():
        if _found(module):
            caches[name] = lambda options=options: QuantizedCache(config=config, **options)
        else:
            missing[name] = f"not installed (pip install {package})"
    return caches, missing


def _found(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the package around it is missing
        return False


def layer_bytes_ratio(make_cache: MakeCache, config, tokens: int = 4096) -> float:
    """Bytes that one layer of a cache holds after a prompt of `tokens` BF16 tokens, over those of the prompt itself."""
    keys, values = random_kv(config, tokens)
    cache = make_cache()
    cache.update(keys, values, 0)
    del cache.layers[1:]
    return held_bytes(cache) / (keys.nbytes + values.nbytes)


def late_token_error(make_cache: MakeCache, config) -> float:
    """Relative error of a token ten times larger than all before, read after 200 more have come: 0 is exact."""
    keys, values = (x.float() for x in random_kv(config, 200))
    large = 10 * keys[:, :, :1], 10 * values[:, :, :1]
    cache = make_cache()
    for more in ((keys, values), large, (keys, values)):
        read, _ = cache.update(*more, 0)
    read = read.dequantize()[0] if isinstance(read, Int8CacheLayer) else read
    return float((read[:, :, 200] - large[0][:, :, 0]).norm() / large[0].norm())


def peer_times(caches: dict[str, MakeCache], config, tokens: int = 4096, *, rounds: int = 10) -> Comparison:
    """One layer's part of a decode step through each cache on the CPU: take in a token, attend to all."""
    keys, values = random_kv(config, tokens)
    token = keys[:, :, :1].clone()
    query = torch.randn(1, config.num_attention_heads, 1, keys.shape[-1]).bfloat16()

    def stepping(cache: Cache) -> Callable[[], Tensor]:
        cache.update(keys, values, 0)

        def step() -> Tensor:
            read, read_values = cache.update(token, token, 0)
            return attend_int8(query, read) if isinstance(read, Int8CacheLayer) else sdpa(query, read, read_values)

        return step

    with torch.inference_mode():
        return compare({name: stepping(make()) for name, make in caches.items()}, rounds=rounds, device="cpu")


def held_bytes(cache: Cache) -> int:
    """Bytes of the memory behind all tensors that a cache's layers hold, each counted once."""
    storages: dict[int, int] = {}
    for layer in cache.layers:
        for tensor in _tensors(vars(layer).values()):
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def _tensors(things: Iterable) -> Iterable[Tensor]:
    for thing in things:
        if isinstance(thing, Tensor):
            if hasattr(thing, "__tensor_flatten__"):  # a tensor made of others, such as quanto's
                yield from _tensors(getattr(thing, name) for name in thing.__tensor_flatten__()[0])
            elif thing.numel():
                yield thing
        elif isinstance(thing, dict):
            yield from _tensors(thing.values())
        elif isinstance(thing, list | tuple):
            yield from _tensors(thing)
        elif type(thing).__module__.startswith("llm_latency"):
            yield from _tensors(vars(thing).values())


OPERATIONS: dict[str, tuple[Callable[[Cache], None], Callable[[Tensor], Tensor]]] = {
    "crop": (lambda cache: cache.crop(-5), lambda x: x[:, :, :-5]),
    "reorder": (lambda cache: cache.reorder_cache(torch.tensor([1, 0])), lambda x: x.flip(0)),
    "repeat": (lambda cache: cache.batch_repeat_interleave(2), lambda x: x.repeat_interleave(2, 0)),
    "select": (lambda cache: cache.batch_select_indices(torch.tensor([1])), lambda x: x[1:]),
}


def operations_that_work(make_cache: MakeCache, config) -> dict[str, bool]:
    """Run each operation on a cache of 200 tokens, then read it: are the keys those that it should now hold?"""
    keys = torch.randn(2, config.num_key_value_heads, 200, head_dim(config), generator=torch.Generator().manual_seed(0))
    results = {}
    for name, (change, expected) in OPERATIONS.items():
        cache = make_cache()
        cache.update(keys, keys, 0)
        del cache.layers[1:]  # older releases cannot crop a layer that was never written to
        wanted = torch.cat([expected(keys), expected(keys)[:, :, :1]], dim=2)
        try:
            change(cache)
            read, _ = cache.update(wanted[:, :, -1:], wanted[:, :, -1:], 0)
            # FP8 has three bits of mantissa; an operation that failed is off by whole rows or tokens.
            read = read.dequantize()[0] if isinstance(read, Int8CacheLayer) else read
            results[name] = read.shape == wanted.shape and bool((read - wanted).abs().mean() < 0.1)
        except (IndexError, RuntimeError, ValueError, TypeError):
            results[name] = False
    return results
