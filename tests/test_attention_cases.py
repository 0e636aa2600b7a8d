"""Reported faults of attention code, for every backend that works on this machine."""

from __future__ import annotations

import math

import pytest
import torch
from attention_oracle import assert_as_good_as_peer, tensors

from llm_latency.attention import BACKENDS, FlashAttention, attend, attention_reference
from llm_latency.attention.dispatch import cannot

# On the CPU; tests/test_cuda_attention.py repeats these cases on the GPU.
HERE = [name for name in BACKENDS if cannot(name, torch.zeros(1, 1, 1, 16)) is None]
NAN = math.nan


@pytest.fixture(params=HERE)
def backend(request) -> str:
    return request.param


def test_a_row_that_sees_nothing_is_zeros(backend):
    """Guards against NaN from a softmax over nothing."""
    q, k, v = tensors(seq_q=2, seq_k=4)
    mask = torch.tensor([[False] * 4, [True, False, True, True]])
    out = attend(q, k, v, backend=backend, mask=mask)
    assert torch.equal(out[:, 0], torch.zeros_like(out[:, 0]))
    assert_as_good_as_peer(out, q, k, v, mask=mask)


def test_everything_masked_is_zeros(backend):
    """Guards against 0 / 0 where a whole block, and every block, is masked."""
    q, k, v = tensors(seq_q=3, seq_k=40)
    mask = torch.zeros(1, 1, 1, 40, dtype=torch.bool)
    assert not attend(q, k, v, backend=backend, mask=mask).any()


def test_a_masked_block_before_the_first_live_one():
    """Guards against a running maximum of -inf that turns the first live block into NaN."""
    q, k, v = tensors(seq_q=3, seq_k=40)
    mask = torch.zeros(3, 40, dtype=torch.bool)
    mask[:, 33:35] = True
    assert_as_good_as_peer(FlashAttention(2, 16)(q, k, v, mask=mask), q, k, v, mask=mask)


@pytest.mark.parametrize("seq_q, seq_k", [(2, 5), (5, 2), (6, 6), (1, 9), (3, 40)])
def test_causal_aligns_bottom_right(backend, seq_q, seq_k):
    """Guards against SDPA's top-left alignment: with values of ones in one slot each, weights can be counted."""
    q, k, _ = tensors(seq_q=seq_q, seq_k=seq_k, heads=1, kv_heads=1, head_dim=64)
    v = torch.zeros(1, seq_k, 1, 64)
    v[0, range(seq_k), 0, range(seq_k)] = 1.0  # channel j of the output is the weight of key j
    out = attend(q, k, v, backend=backend, causal=True)
    seen = (out[0, :, 0] > 0).sum(dim=-1).tolist()
    assert seen == [max(0, seq_k - seq_q + 1 + row) for row in range(seq_q)]
    assert_as_good_as_peer(out, q, k, v, causal=True)


def test_signal_in_the_last_channels(backend):
    """Guards against a kernel that reads 64 channels of 128."""
    q, k, v = tensors(head_dim=128, seq_q=9, seq_k=11)
    for x in (q, k, v):
        x[..., :64] = 0.0
    assert_as_good_as_peer(attend(q, k, v, backend=backend), q, k, v)


@pytest.mark.parametrize("head_dim", [96, 72, 80])
def test_head_dim_that_is_no_power_of_two(backend, head_dim):
    """Guards against padding that leaks into the scores or out of the result; 37 tokens are no multiple either."""
    q, k, v = tensors(head_dim=head_dim, seq_q=37, seq_k=37, heads=2, kv_heads=1)
    assert_as_good_as_peer(attend(q, k, v, backend=backend, causal=True), q, k, v, causal=True)


@pytest.mark.parametrize("seq_q", [1, 3])
def test_groups_are_consecutive_heads(backend, seq_q):
    """Guards against KV heads tiled (0, 1, 0, 1) instead of repeated (0, 0, 1, 1)."""
    q, k, v = tensors(seq_q=seq_q, seq_k=6)
    v[:, :, 0], v[:, :, 1] = 0.0, 1.0
    out = attend(q, k, v, backend=backend)
    for head, expected in enumerate((0.0, 0.0, 1.0, 1.0)):
        assert torch.allclose(out[:, :, head], torch.tensor(expected), atol=1e-6)


@pytest.mark.parametrize("seq_q", [1, 20])
def test_large_bf16_values_come_back_exactly(backend, seq_q):
    """Guards against a fused multiply-subtract: scores of 1e11 whose largest weight is no longer exp(0)."""
    full = torch.full((1, 20, 2, 64), 133120.0, dtype=torch.bfloat16)
    out = attend(full[:, :seq_q], full, full, backend=backend, causal=True)
    assert torch.equal(out, full[:, :seq_q])


def test_fp16_scores_beyond_65504_stay_finite(backend):
    """Guards against scores kept in FP16: 64 * 60 * 60 is 230400."""
    q, k, v = (x.half() for x in tensors(head_dim=64, seq_q=5, seq_k=8))
    q, k = q.sign() * 60, k.sign() * 60
    out = attend(q, k, v, backend=backend, scale=1.0)
    truth = attention_reference(q.double(), k.double(), v.double(), scale=1.0)
    assert torch.allclose(out.double(), truth, atol=2e-3)


@pytest.mark.parametrize("seq_q", [1, 12])
@pytest.mark.parametrize("poison", [NAN, math.inf, -math.inf])
def test_what_stands_in_a_masked_slot_has_no_effect(backend, seq_q, poison):
    """Guards against 0 * NaN and NaN - inf: unused slots of a cache may hold anything."""
    q, k, v = tensors(seq_q=seq_q, seq_k=12)
    mask = torch.ones(12, dtype=torch.bool)
    mask[[2, 7]] = False
    clean = attend(q, k, v, backend=backend, mask=mask)
    k[:, [2, 7]], v[:, [2, 7]] = poison, poison
    assert torch.allclose(attend(q, k, v, backend=backend, mask=mask), clean, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("poison", [NAN, math.inf])
def test_masked_slots_have_no_effect_in_half_precision_either(backend, poison, dtype):
    """Guards against a guard that only FP32 gets through: Triton's interpreter stopped at a bool turned into BF16."""
    q, k, v = (x.to(dtype) for x in tensors(seq_q=12, seq_k=12))
    mask = torch.ones(12, dtype=torch.bool)
    mask[[2, 7]] = False
    clean = attend(q, k, v, backend=backend, mask=mask)
    v[:, [2, 7]] = poison
    assert torch.allclose(attend(q, k, v, backend=backend, mask=mask), clean, atol=3e-2)


def test_a_later_nan_reaches_later_rows_only(backend):
    """Guards against a guard that is too coarse: causally, row 8 sees the NaN of key 8, rows 0 to 7 do not."""
    q, k, v = tensors(seq_q=12, seq_k=12)
    clean = attend(q, k, v, backend=backend, causal=True)
    k[:, 8, 0, 3], v[:, 9, 1, 5] = NAN, math.inf
    out = attend(q, k, v, backend=backend, causal=True)
    assert torch.allclose(out[:, :8], clean[:, :8], atol=1e-6)
    truth = attention_reference(q, k, v, causal=True)
    assert torch.equal(out.isfinite(), truth.isfinite()) and out[:, 8:, :2].isnan().all()


@pytest.mark.parametrize("scale", [0.0, -0.7, 3.0])
def test_any_scale(backend, scale):
    """Guards against `scale or default`, which takes 0 for None, and a maximum taken before a negative scale."""
    q, k, v = tensors(seq_q=4, seq_k=9)
    assert_as_good_as_peer(
        attend(q, k, v, backend=backend, causal=True, scale=scale), q, k, v, causal=True, scale=scale
    )


@pytest.mark.parametrize("seq_q, seq_k, batch", [(0, 4, 1), (3, 0, 1), (0, 0, 1), (3, 4, 0), (1, 1, 1)])
def test_empty_and_single(backend, seq_q, seq_k, batch):
    """Guards against a crash or uninitialised memory where there is nothing to compute."""
    q, k, v = tensors(batch=batch, seq_q=seq_q, seq_k=seq_k)
    for causal in (False, True):
        out = attend(q, k, v, backend=backend, causal=causal)
        assert out.shape == q.shape
        assert seq_k or not out.any()


@pytest.mark.parametrize("shape", [(7,), (5, 7), (1, 1, 7), (4, 1, 7), (2, 1, 5, 1), (2, 4, 5, 7), ()])
def test_masks_broadcast(backend, shape):
    """Guards against a mask spread over the wrong axis, heads in particular."""
    q, k, v = tensors(batch=2)
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(1)) > 0.3
    out = attend(q, k, v, backend=backend, mask=mask)
    full = attend(q, k, v, backend="reference", mask=mask.expand(2, 4, 5, 7))
    assert torch.allclose(out, full, atol=1e-5)


def test_inputs_are_left_alone(backend):
    """Guards against an in-place scale, which the next layer's cache would see."""
    q, k, v = tensors(seq_q=6, seq_k=6)
    before = [x.clone() for x in (q, k, v)]
    attend(q, k, v, backend=backend, causal=True, scale=-2.0)
    assert all(torch.equal(a, b) for a, b in zip(before, (q, k, v), strict=True))
