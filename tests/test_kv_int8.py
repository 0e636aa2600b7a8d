"""Int8KVCache: what it stores, exactly, through every operation a cache has; its bytes; its errors."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from properties import property_settings
from transformers import LlamaConfig, MistralConfig

from llm_latency.kv_cache import Int8KVCache
from llm_latency.quantization.rounding import dequantize, quantize_symmetric


def config(heads=3, head_dim=6, layers=1, **more) -> LlamaConfig:
    return LlamaConfig(
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=head_dim,
        hidden_size=heads * head_dim,
        num_hidden_layers=layers,
        **more,
    )


def tokens(n: int, *, batch=2, heads=3, head_dim=6, seed=0, dtype=torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (batch, heads, n, head_dim)
    return tuple(torch.randn(shape, generator=generator).to(dtype) for _ in range(2))


def round_trip(keys, values, window: int, group: int):
    """What a cache of these tokens must read: an independent, slow restatement of the format."""
    old = max(0, keys.shape[2] - window)
    read_keys, read_values = keys.clone(), values.clone()
    for start in range(0, old, group):
        piece = slice(start, min(start + group, old))
        read_keys[:, :, piece] = dequantize(*quantize_symmetric(keys[:, :, piece], dim=-2), dtype=keys.dtype)
    if old:
        read_values[:, :, :old] = dequantize(*quantize_symmetric(values[:, :, :old], dim=-1), dtype=values.dtype)
    return read_keys, read_values


def read(cache: Int8KVCache, layer: int = 0):
    return cache.layers[layer].dequantize()


@pytest.mark.parametrize("pieces", [[10], [1] * 10, [3, 7], [7, 3], [4, 4, 1, 1]])
def test_exactly_the_newest_window_is_exact(pieces):
    """Case 17: after a prompt transformers' own layers hold no exact token, later between none and the whole window."""
    cache = Int8KVCache(config(), residual_length=4)
    keys, values = tokens(10)
    for k, v in zip(keys.split(pieces, 2), values.split(pieces, 2), strict=True):
        returned = cache.update(k, v, 0)
    for x, stored in zip((keys, values), returned, strict=True):
        assert torch.equal(stored[:, :, -4:], x[:, :, -4:])
        assert (stored[:, :, :-4] != x[:, :, :-4]).any(-1).all(), "an older token is exact, too"
        assert torch.allclose(stored, x, atol=float(x.abs().max()) / 127 * 0.51)
    assert cache.get_seq_length() == 10


@property_settings(25)
@given(
    total=st.integers(1, 300),
    window=st.sampled_from([0, 1, 4, 32, 70]),
    group=st.sampled_from([1, 7, 16, 64]),
    seed=st.integers(0, 10**6),
    data=st.data(),
)
def test_the_bits_do_not_depend_on_how_tokens_arrived(total, window, group, seed, data):
    """Guards against scales that depend on the sizes of the updates, and against groups cut at their borders."""
    keys, values = tokens(total, seed=seed)
    cache = Int8KVCache(config(), residual_length=window, group_size=group)
    start = 0
    while start < total:
        n = data.draw(st.integers(1, total - start))
        returned = cache.update(keys[:, :, start : start + n], values[:, :, start : start + n], 0)
        start += n
    for stored, expected in zip(returned, round_trip(keys, values, window, group), strict=True):
        assert torch.equal(stored, expected)


OPERATIONS = st.one_of(
    st.tuples(st.just("update"), st.integers(1, 40)),
    st.tuples(st.just("crop"), st.integers(0, 30)),
    st.tuples(st.just("reorder"), st.integers(0, 10**6)),
    st.tuples(st.just("repeat"), st.integers(1, 2)),
    st.tuples(st.just("select"), st.integers(0, 10**6)),
    st.tuples(st.just("reset"), st.just(0)),
)


@property_settings(60)
@given(
    operations=st.lists(OPERATIONS, min_size=2, max_size=14),
    window=st.sampled_from([0, 3, 16]),
    group=st.sampled_from([4, 16]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_any_sequence_of_operations(operations, window, group, dtype):
    """Guards against an operation that touches only the window (as the built-in layers' do), or only one of the two."""
    cache = Int8KVCache(config(), residual_length=window, group_size=group)
    keys = values = None
    crops, largest = 0, 0.0
    for seed, (name, number) in enumerate(operations):
        batch = 2 if keys is None else keys.shape[0]
        generator = torch.Generator().manual_seed(number)
        if name == "update":
            k, v = tokens(number, batch=batch, seed=seed, dtype=dtype)
            largest = max(largest, float(k.abs().max()))
            cache.update(k, v, 0)
            keys, values = (k, v) if keys is None else (torch.cat([keys, k], 2), torch.cat([values, v], 2))
        elif name == "reset":
            cache.reset()
            keys = values = None
        elif keys is not None and name == "crop":
            number = min(number, keys.shape[2])
            cache.crop(-number)
            crops += 1
            keys, values = (x[:, :, : x.shape[2] - number] for x in (keys, values))
        elif keys is not None and name in ("reorder", "select"):
            rows = torch.randint(batch, (batch if name == "reorder" else 1 + number % batch,), generator=generator)
            cache.reorder_cache(rows) if name == "reorder" else cache.batch_select_indices(rows)
            keys, values = keys[rows], values[rows]
        elif keys is not None and name == "repeat" and batch <= 8:
            cache.batch_repeat_interleave(number)
            keys, values = (x.repeat_interleave(number, 0) for x in (keys, values))
        assert cache.get_seq_length() == (0 if keys is None else keys.shape[2])
        if keys is None or keys.shape[2] == 0:
            continue
        stored_keys, stored_values = read(cache)
        assert stored_keys.shape == keys.shape and stored_keys.dtype == dtype
        exact = cache.layers[0].keys.shape[2]
        assert exact <= window
        for stored, x in ((stored_keys, keys), (stored_values, values)):
            assert torch.equal(stored[:, :, x.shape[2] - exact :], x[:, :, x.shape[2] - exact :])
        # Half a scale, which is rounded to BF16, and the rounding of what is read to the tokens' own type.
        half, reading = 0.5 * (1 + 2**-8), 2**-8 if dtype == torch.bfloat16 else 1e-6
        x = values.double()
        allowed = x.abs().amax(-1, keepdim=True) / 127 * half + x.abs() * reading + 1e-9
        assert ((stored_values.double() - x).abs() <= allowed).all()
        # A crop that reopens a finished group of keys can have it quantised once more.
        allowed = (1 + crops) * largest * (half / 127 + reading)
        assert float((stored_keys.double() - keys.double()).abs().max()) <= allowed


@pytest.mark.parametrize("window", [0, 4, 32])
def test_cropped_tokens_leave_no_trace(window):
    """Case 16: 300 tokens, five cropped, five others: as if the first five had never been, scales included."""
    keys, values = tokens(300)
    other_keys, other_values = tokens(5, seed=1)
    spoiled = keys.clone()
    spoiled[:, :, -5:] *= 1000  # a trace would show in the scales of their neighbours
    cache = Int8KVCache(config(), residual_length=window)
    cache.update(spoiled, values, 0)
    cache.crop(-5)
    assert cache.get_seq_length() == 295
    cache.update(other_keys, other_values, 0)
    never = Int8KVCache(config(), residual_length=window)
    never.update(keys[:, :, :295], values[:, :, :295], 0)
    never.update(other_keys, other_values, 0)
    assert cache.get_seq_length() == never.get_seq_length() == 300
    for a, b in zip(read(cache), read(never), strict=True):
        assert torch.equal(a, b)
    assert cache.nbytes == never.nbytes


def test_a_crop_into_a_finished_group_keeps_what_was_read():
    """Guards against a crop deep into quantised tokens that loses or shifts the older ones."""
    keys, values = tokens(200)
    cache = Int8KVCache(config(), residual_length=4, group_size=16)
    before_keys, before_values = cache.update(keys, values, 0)
    cache.crop(-91)
    for a, b in zip(read(cache), (before_keys, before_values), strict=True):
        assert torch.equal(a, b[:, :, :109])
    cache.crop(-109)
    assert cache.get_seq_length() == 0
    returned = cache.update(keys, values, 0)
    for a, b in zip(returned, (before_keys, before_values), strict=True):
        assert torch.equal(a, b)


def test_batch_operations_reach_quantised_and_exact_tokens():
    """Case 16: rows reordered, repeated and selected on both sides of the window's border, bit for bit."""
    keys, values = tokens(100, batch=3)
    for change, expected in (
        (lambda c: c.reorder_cache(torch.tensor([2, 0, 0])), torch.tensor([2, 0, 0])),
        (lambda c: c.batch_repeat_interleave(2), torch.tensor([0, 0, 1, 1, 2, 2])),
        (lambda c: c.batch_select_indices(torch.tensor([1])), torch.tensor([1])),
        (lambda c: c.batch_select_indices(torch.tensor([True, False, True])), torch.tensor([0, 2])),
    ):
        cache = Int8KVCache(config(), residual_length=8, group_size=16)
        cache.update(keys, values, 0)
        change(cache)
        more_keys, more_values = tokens(30, batch=len(expected), seed=1)
        returned = cache.update(more_keys, more_values, 0)
        whole = torch.cat([keys[expected], more_keys], 2), torch.cat([values[expected], more_values], 2)
        for a, b in zip(returned, round_trip(*whole, 8, 16), strict=True):
            assert torch.equal(a, b)


def test_zeros_stay_zeros():
    """Case 15: all-zero keys, and one all-zero channel, read as exact zeros and no NaN."""
    keys, values = tokens(100)
    keys[..., 2] = 0.0
    values[:, 1] = 0.0
    cache = Int8KVCache(config(), residual_length=4)
    stored_keys, stored_values = cache.update(keys, values, 0)
    assert (stored_keys[..., 2] == 0).all() and (stored_values[:, 1] == 0).all()
    assert torch.isfinite(stored_keys).all()


def test_a_late_large_token_is_stored_as_well_as_the_format_allows():
    """Guards against a scale frozen at the first update (as FP8's in transformers): the late token would be clipped."""
    keys, values = tokens(200)
    keys[:, :, 150] *= 100
    values[:, :, 150] *= 100
    cache = Int8KVCache(config(), residual_length=0, group_size=16)
    for k, v in zip(keys.split(1, 2), values.split(1, 2), strict=True):
        stored_keys, stored_values = cache.update(k, v, 0)
    for stored, x in ((stored_keys, keys), (stored_values, values)):
        error = (stored - x).abs()[:, :, 150]
        assert (error <= x[:, :, 150].abs().amax(-1, keepdim=True) / 127 * 0.51).all()
    # Only the sixteen keys that share its group (144 to 159) pay; only the token itself among the values.
    plain_keys, plain_values = tokens(200)
    expected_keys, expected_values = round_trip(plain_keys, plain_values, 0, 16)
    others = [i for i in range(200) if not 144 <= i < 160]
    assert torch.equal(stored_keys[:, :, others], expected_keys[:, :, others])
    others = [i for i in range(200) if i != 150]
    assert torch.equal(stored_values[:, :, others], expected_values[:, :, others])


@pytest.mark.parametrize("length", [4096, 4095, 4097, 4159])
def test_bytes_at_4096_tokens(length):
    """Guards against scales, reserves or a kept prompt that eat up the saving: at most 0.53 of BF16's bytes."""
    keys, values = tokens(length, batch=1, heads=3, head_dim=64, dtype=torch.bfloat16)
    cache = Int8KVCache(config(3, 64))
    cache.update(keys, values, 0)
    assert cache.nbytes <= 0.53 * (keys.nbytes + values.nbytes)
    layer = cache.layers[0]
    held = [layer.keys, layer.values]
    held += [layer.key_store.codes, layer.key_store.scales, layer.key_store.open_group]
    held += [layer.value_store.codes, layer.value_store.scales]
    assert cache.nbytes == sum(x.untyped_storage().nbytes() for x in held), "a view keeps more alive than nbytes says"


def test_bytes_by_the_formula():
    """Guards against an nbytes that forgets a part: codes, scales, window and open group, counted by hand."""
    heads, head_dim, window, group = 2, 8, 4, 16
    cache = Int8KVCache(config(heads, head_dim, layers=3), residual_length=window, group_size=group)
    assert cache.nbytes == 0
    keys, values = tokens(100, batch=1, heads=heads, head_dim=head_dim)
    for layer in range(3):
        cache.update(keys, values, layer)
    reserved = 128  # 96 quantised tokens, in steps of 64
    codes = 2 * reserved * head_dim
    scales = 2 * (reserved // group * head_dim + reserved)
    exact = 4 * (2 * window * head_dim + 96 % group * head_dim)
    assert cache.nbytes == 3 * heads * (codes + scales + exact)


def test_half_precision_and_views():
    """Guards against results in another dtype, and against assuming contiguous input."""
    for dtype in (torch.float16, torch.bfloat16):
        cache = Int8KVCache(config(), residual_length=4)
        keys, values = tokens(80, dtype=dtype)
        strided = keys.transpose(1, 2).contiguous().transpose(1, 2)
        returned = cache.update(strided, values, 0)
        assert returned[0].dtype == returned[1].dtype == dtype
        for a, b in zip(returned, round_trip(keys, values, 4, 64), strict=True):
            assert torch.equal(a, b)


def test_what_is_returned_is_the_callers_own():
    """Guards against a returned tensor that a later update, or the caller's own writing, changes."""
    cache = Int8KVCache(config(), residual_length=4)
    keys, values = tokens(3)
    first, _ = cache.update(keys, values, 0)
    first.zero_()
    keys.zero_()
    second, _ = cache.update(*tokens(1, seed=1), 0)
    assert (second[:, :, :3] != 0).any()


def test_masks_and_lengths():
    """Guards against mask sizes that forget one of the two parts."""
    cache = Int8KVCache(config(layers=2), residual_length=4)
    assert cache.get_seq_length() == 0 and cache.get_mask_sizes(7, 0) == (7, 0)
    cache.update(*tokens(50), 0)
    assert cache.get_mask_sizes(3, 0) == (53, 0)
    assert cache.get_seq_length(0) == 50 and cache.get_seq_length(1) == 0
    assert cache.is_croppable and cache.get_max_length() == -1
    cache.reset()
    assert cache.get_seq_length() == 0 and cache.nbytes == 0


def filled() -> Int8KVCache:
    cache = Int8KVCache(config(), residual_length=4)
    cache.update(*tokens(50), 0)
    return cache


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["key_states", "value_states"])
def test_nan_and_infinity_are_refused_before_anything_is_stored(bad, where):
    """Guards against a NaN that quantisation turns into a number, or that lies in the window until it is too late."""
    cache = filled()
    before = read(cache)
    keys, values = tokens(3, seed=1)
    (keys if where == "key_states" else values)[1, 2, 0, 4] = bad
    with pytest.raises(ValueError, match=f"{where} holds NaN or infinity"):
        cache.update(keys, values, 0)
    assert cache.get_seq_length() == 50
    for a, b in zip(read(cache), before, strict=True):
        assert torch.equal(a, b)


@pytest.mark.cuda
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", [0, 1])
def test_on_a_gpu_nan_and_infinity_are_refused_one_pass_later(bad, where):
    """Guards against words made of NaN where nobody waits for the device to look: lengths are asked in every pass."""
    cache = Int8KVCache(config(layers=2), residual_length=4)
    clean = [x.cuda() for x in tokens(20)]
    broken = [x.clone() for x in clean]
    broken[where][1, 2, 7, 4] = bad
    for layer in (0, 1):
        cache.update(*clean, layer)
    torch.cuda.synchronize()
    assert cache.get_mask_sizes(1, 0) == (21, 0) and cache.get_seq_length() == 20
    cache.update(*clean, 0)
    assert not cache.update(*broken, 1)[where].isfinite().all(), "NaN was read back as a number"
    cache.get_seq_length()  # sends the marks
    torch.cuda.synchronize()
    for _ in range(2):
        with pytest.raises(ValueError, match="NaN or infinity"):
            cache.get_mask_sizes(1, 0)
    cache.reset()
    cache.update(*clean, 0)
    torch.cuda.synchronize()
    assert cache.get_seq_length() == cache.get_seq_length() == 20


def test_shapes_that_do_not_fit_are_refused():
    """Guards against broadcasting a batch of one into two, and against heads of another size."""
    cache = filled()
    with pytest.raises(ValueError, match="a batch of 1 came to a cache that holds a batch of 2"):
        cache.update(*tokens(1, batch=1), 0)
    with pytest.raises(ValueError, match="3 heads of 4; this model has 3 KV heads of 6"):
        cache.update(*tokens(1, head_dim=4), 0)
    with pytest.raises(ValueError, match="2 heads of 6"):
        cache.update(*tokens(1, heads=2), 0)
    with pytest.raises(ValueError, match="float16; this cache was begun with"):
        cache.update(*tokens(1, dtype=torch.float16), 0)
    keys, values = tokens(2)
    with pytest.raises(ValueError, match="expected the same"):
        cache.update(keys, values[:, :, :1], 0)
    with pytest.raises(ValueError, match="expected the same"):
        cache.update(keys[0], values[0], 0)
    with pytest.raises(ValueError, match=r"values torch\.float16; expected the same dtype"):
        cache.update(keys, values.half(), 0)
    assert cache.get_seq_length() == 50
    cache.reset()
    cache.update(*tokens(1, batch=1), 0)  # after a reset another batch size is welcome


def test_crops_that_do_not_fit_are_refused():
    """Guards against cropping more than is stored, which passes silently elsewhere, and against half-done crops."""
    cache = Int8KVCache(config(layers=2), residual_length=4)
    cache.update(*tokens(50), 0)
    cache.update(*tokens(50), 1)
    with pytest.raises(ValueError, match=r"crop\(-51\) from a cache that holds 50"):
        cache.crop(-51)
    with pytest.raises(ValueError, match=r"crop\(3\); expected a negative number"):
        cache.crop(3)
    with pytest.raises(TypeError, match=r"crop\(-1.0\)"):
        cache.crop(-1.0)
    cache.update(*tokens(5, seed=1), 0)  # a layer ahead of the others
    with pytest.raises(ValueError, match="holds 50"):
        cache.crop(-53)
    assert cache.get_seq_length(0) == 55 and cache.get_seq_length(1) == 50
    cache.crop(0)
    assert cache.get_seq_length(0) == 55
    with pytest.raises(TypeError, match=r"crop\(True\)"):
        cache.crop(True)
    cache.crop(torch.tensor(-2))  # what assisted generation of transformers 5.17 hands over
    assert cache.get_seq_length(0) == 53 and cache.get_seq_length(1) == 48
    with pytest.raises(ValueError, match="holds 0"):
        Int8KVCache(config()).crop(-1)
    first_only = Int8KVCache(config(layers=2), residual_length=4)
    first_only.update(*tokens(50), 0)
    first_only.crop(-7)  # the second layer was never written to
    assert first_only.get_seq_length(0) == 43 and first_only.get_seq_length(1) == 0


def test_options_and_configurations_that_do_not_fit_are_refused():
    """Guards against options silently dropped, and models whose layers this cache would store wrongly."""
    with pytest.raises(ValueError, match="residual_length=-1"):
        Int8KVCache(config(), residual_length=-1)
    with pytest.raises(TypeError, match=r"residual_length=4\.0"):
        Int8KVCache(config(), residual_length=4.0)
    with pytest.raises(ValueError, match="group_size=0"):
        Int8KVCache(config(), group_size=0)
    with pytest.raises(ValueError, match="bits=16"):
        Int8KVCache(config(), bits=16)
    with pytest.raises(ValueError, match="key_scales='head'"):
        Int8KVCache(config(), key_scales="head")
    with pytest.raises(ValueError, match="num_attention_heads=6 is no multiple of num_key_value_heads=4"):
        Int8KVCache(LlamaConfig(num_attention_heads=6, num_key_value_heads=4, head_dim=8, hidden_size=48))
    with pytest.raises(ValueError, match="hidden_size=50 is no multiple of num_attention_heads=6"):
        odd = LlamaConfig(num_attention_heads=6, num_key_value_heads=6, head_dim=8, hidden_size=48)
        odd.head_dim, odd.hidden_size = None, 50
        Int8KVCache(odd)
    with pytest.raises(ValueError, match="sliding"):
        Int8KVCache(MistralConfig(sliding_window=128, num_hidden_layers=2))
