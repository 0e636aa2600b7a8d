"""Attention over an INT8 cache that never writes a full-precision copy: blocked, and as a Triton kernel."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from torch.nn import functional as F
from transformers import DynamicCache, LlamaConfig

from llm_latency.compat import with_cache
from llm_latency.kv_cache import Int8KVCache, attend_int8, int8_attention, stores

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed on this platform"
)


def cache_and_query(
    length, *, n=1, batch=1, heads=9, kv_heads=3, head_dim=64, window=32, group=64, dtype=torch.float32, seed=0
):
    config = LlamaConfig(
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        hidden_size=heads * head_dim,
        num_hidden_layers=1,
    )
    generator = torch.Generator().manual_seed(seed)
    cache = Int8KVCache(config, residual_length=window, group_size=group)
    shape = (batch, kv_heads, length, head_dim)
    keys, values = (torch.randn(shape, generator=generator) for _ in range(2))
    keys[..., 3] *= 20  # an outlier channel, as real keys have
    cache.update(keys.to(dtype), values.to(dtype), 0)
    query = torch.randn(batch, heads, n, head_dim, generator=generator).to(dtype)
    return cache.layers[0], query


def oracle(layer, query, mask=None):
    """Plain attention in FP64 over the numbers that the codes stand for."""
    exact = layer.keys, layer.values
    layer.keys, layer.values = layer.keys.double(), layer.values.double()
    keys, values = layer.dequantize()
    layer.keys, layer.values = exact
    n, length = query.shape[2], keys.shape[2]
    repeats = query.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(repeats, 1), values.repeat_interleave(repeats, 1)
    scores = query.double() @ keys.transpose(2, 3) / query.shape[-1] ** 0.5
    causal = torch.ones(n, length, dtype=torch.bool).tril(length - n)
    mask = causal if mask is None else mask
    weights = scores.masked_fill(~mask, float("-inf")).softmax(-1).nan_to_num(0.0)
    return weights @ values


def peer_error(layer, query, expected):
    """The error of SDPA over a dequantised copy, in the same precision."""
    keys, values = layer.dequantize()
    n, length = query.shape[2], keys.shape[2]
    repeats = query.shape[1] // keys.shape[1]
    mask = torch.ones(n, length, dtype=torch.bool).tril(length - n)
    out = F.scaled_dot_product_attention(
        query, keys.repeat_interleave(repeats, 1), values.repeat_interleave(repeats, 1), attn_mask=mask
    )
    return float((out.double() - expected).abs().max())


CASES = [
    dict(length=1),
    dict(length=20),  # all in the window
    dict(length=33),  # one token quantised
    dict(length=300),
    dict(length=1500),  # more than one block
    dict(length=131, batch=2, heads=6, kv_heads=2, head_dim=8, window=4, group=16),
    dict(length=37, heads=4, kv_heads=4, head_dim=72, window=0, group=16),
    dict(length=200, batch=2, heads=2, kv_heads=1, head_dim=96),
    dict(length=300, dtype=torch.float16),
    dict(length=500, batch=2, dtype=torch.bfloat16),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_blocked_equals_the_oracle(case):
    """Guards against scales put to the wrong channel, token or head, and against a tail that is read or dropped."""
    layer, query = cache_and_query(**case)
    expected = oracle(layer, query)
    out = attend_int8(query, layer, backend="blocked")
    assert out.dtype == query.dtype and out.shape == query.shape
    assert float((out.double() - expected).abs().max()) <= 2 * peer_error(layer, query, expected) + 1e-6


@needs_triton
@pytest.mark.parametrize("case", CASES, ids=str)
def test_triton_equals_the_oracle(case):
    """The same for the kernel; in Triton's interpreter where there is no CUDA."""
    layer, query = cache_and_query(**case)
    expected = oracle(layer, query)
    out = attend_int8(query, layer, backend="triton")
    assert out.dtype == query.dtype and out.shape == query.shape
    # BF16 and FP16 round the scaled query and weights once more than the peer does: half a digit is allowed for it.
    slack = 1e-6 if query.dtype == torch.float32 else 2e-3
    assert float((out.double() - expected).abs().max()) <= 2 * peer_error(layer, query, expected) + slack


@pytest.mark.cuda
@pytest.mark.parametrize(
    "case", [*CASES, pytest.param(dict(length=9000, batch=3, dtype=torch.bfloat16), marks=pytest.mark.long)], ids=str
)
def test_triton_on_cuda(case):
    """The compiled kernel: other casts and tensor cores than the interpreter's."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device: this checks the compiled kernel")
    layer, query = cache_and_query(**case)
    expected = oracle(layer, query)
    error = peer_error(layer, query, expected)
    for store in (layer.key_store, layer.value_store):
        store.for_each_row(lambda x: x.cuda()) if store.codes is not None else None
    layer.keys, layer.values = layer.keys.cuda(), layer.values.cuda()
    out = attend_int8(query.cuda(), layer, backend="triton").cpu()
    slack = 1e-6 if query.dtype == torch.float32 else 2e-3
    assert float((out.double() - expected).abs().max()) <= 2 * error + slack


@pytest.mark.parametrize("length, n", [(300, 5), (33, 33), (40, 7), (2, 2)])
def test_several_queries_are_causal(length, n):
    """Guards against a causal mask aligned at the top left: the newest token must see everything (case 2)."""
    layer, query = cache_and_query(length, n=n, batch=2)
    assert torch.allclose(attend_int8(query, layer).double(), oracle(layer, query), atol=1e-5)


def test_masks_and_rows_that_see_nothing():
    """Guards against NaN in a row without a token (case 1), and a mask put to the wrong heads."""
    layer, query = cache_and_query(150, n=3, batch=2)
    generator = torch.Generator().manual_seed(5)
    for shape in ((2, 1, 3, 150), (2, 9, 3, 150), (3, 150), (1, 1, 1, 150)):
        mask = torch.rand(shape, generator=generator) > 0.5
        mask[..., 0, :] = False
        out = attend_int8(query, layer, mask=mask)
        assert torch.allclose(out.double(), oracle(layer, query, mask), atol=1e-5)
        assert (out[:, :, 0] == 0).all()


@pytest.mark.parametrize("n", [1, 3])
def test_a_nan_of_the_query_is_not_hidden(n):
    """Guards against mending every NaN of the weights as if it came from an empty row: the answer was plain zeros."""
    layer, query = cache_and_query(50, n=n)
    query[0, 0, n - 1, 0] = torch.nan
    out = attend_int8(query, layer)
    assert out[0, 0, n - 1].isnan().all() and int(out.isnan().sum()) == out.shape[-1]


def test_blocks_do_not_change_the_result(monkeypatch):
    """Guards against borders between blocks: tiny blocks, one group each, give what one large block gives."""
    layer, query = cache_and_query(700, batch=2, n=2)
    large = attend_int8(query, layer)
    monkeypatch.setattr(stores, "BLOCK_BYTES", 1)
    assert torch.allclose(attend_int8(query, layer), large, atol=1e-6)


def test_the_temporary_stays_small():
    """Guards against a full-precision copy of the cache: no float tensor as large as the keys is ever made."""
    layer, query = cache_and_query(8192)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            out = function(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.is_floating_point():
                largest = max(largest, out.untyped_storage().nbytes())
            return out

    with Watch():
        attend_int8(query, layer)
    assert largest <= 1.5 * stores.BLOCK_BYTES
    assert largest < 8192 * 3 * 64 * 2 / 2, "half of BF16 keys or more"


def test_bad_arguments():
    """Guards against silent broadcasting of heads, lengths and masks."""
    layer, query = cache_and_query(50)
    with pytest.raises(ValueError, match=r"expected \[1, a multiple of 3 heads, n, 64\]"):
        attend_int8(query[:, :8], layer)
    with pytest.raises(ValueError, match="query has shape"):
        attend_int8(query[..., :32], layer)
    with pytest.raises(ValueError, match="51 queries over 50 stored tokens"):
        attend_int8(query.expand(-1, -1, 51, -1), layer)
    with pytest.raises(ValueError, match="mask has shape"):
        attend_int8(query, layer, mask=torch.ones(1, 1, 1, 49, dtype=torch.bool))
    with pytest.raises(TypeError, match=r"expected torch\.bool"):
        attend_int8(query, layer, mask=torch.zeros(1, 1, 1, 50))
    with pytest.raises(TypeError, match="mask is list"):
        attend_int8(query, layer, mask=[True] * 50)
    with pytest.raises(TypeError, match="int64"):
        attend_int8(query.long(), layer)
    with pytest.raises(ValueError, match="scale=nan"):
        attend_int8(query, layer, scale=float("nan"))
    with pytest.raises(ValueError, match="backend='cuda'"):
        attend_int8(query, layer, backend="cuda")
    with pytest.raises(ValueError, match="one query, no mask"):
        attend_int8(query, layer, mask=torch.ones(50, dtype=torch.bool), backend="triton")
    odd, query = cache_and_query(50, group=7, window=4)
    with pytest.raises(ValueError, match="groups of 7"):
        attend_int8(query, odd, backend="triton")


def logits(model, cache, pieces, mask=None):
    out, start = [], 0
    with torch.inference_mode():
        for piece in pieces:
            start += piece.shape[1]
            more = {} if mask is None else {"attention_mask": mask[:, :start]}
            out.append(model(input_ids=piece, use_cache=True, **with_cache(cache), **more).logits)
    return torch.cat(out, 1)


@pytest.mark.parametrize("name", ["tiny_llama", "tiny_qwen2"])
@pytest.mark.parametrize("padded", [False, True])
def test_a_model_reads_the_codes_themselves(request, name, padded, monkeypatch):
    """Guards against a registered attention that loses causality or padding, and against one that is never called."""
    model = request.getfixturevalue(name)
    ids = torch.randint(3, 97, (2, 90), generator=torch.Generator().manual_seed(1))
    mask = None
    if padded:
        mask = torch.ones_like(ids)
        mask[0, :7] = 0
    pieces = ids.split([60, 5, 1, 1, 23], dim=1)
    live = slice(7 if padded else 0, None)

    def new():
        return Int8KVCache(model.config, residual_length=4, group_size=16)

    expected = logits(model, new(), pieces, mask)
    exact = logits(model, DynamicCache(config=model.config), pieces, mask)
    calls = []
    original = int8_attention.attend_blocked
    monkeypatch.setattr(int8_attention, "attend_blocked", lambda *a: calls.append(1) or original(*a))
    model.set_attn_implementation("int8_kv")
    assert torch.allclose(logits(model, new(), pieces, mask)[:, live], expected[:, live], atol=2e-3)
    assert len(calls) == 3 * 3  # three layers; the passes of 5, 1 and 1 tokens; the others dequantise once for many
    # Any other cache, and none, still goes to SDPA.
    assert torch.allclose(logits(model, DynamicCache(config=model.config), pieces, mask), exact, atol=1e-5)
    assert len(calls) == 9
