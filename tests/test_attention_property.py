"""Random requests: shapes, dtypes, masks, GQA ratios, strides, block sizes; the error never above twice the peer's."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from attention_oracle import assert_as_good_as_peer, tensors
from hypothesis import given
from hypothesis import strategies as st
from properties import property_settings

from llm_latency.attention import FlashAttention, attend
from llm_latency.attention.dispatch import cannot

NO_TRITON = cannot("triton", torch.zeros(1, 1, 1, 16))
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LAYOUTS = ["plain", "heads first", "every second", "slice", "expanded"]


@st.composite
def requests(draw, longest: int, largest_group: int):
    """(q, k, v, arguments) of a request that every backend must do."""
    kv_heads = draw(st.integers(1, 2))
    sizes = dict(
        batch=draw(st.integers(1, 2)),
        seq_q=draw(st.integers(0, longest)),
        seq_k=draw(st.integers(0, longest + 9)),
        heads=kv_heads * draw(st.integers(1, largest_group)),
        kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([1, 8, 17, 40, 64, 72])),
    )
    seed = draw(st.integers(0, 10_000))
    q, k, v = tensors(**sizes, dtype=draw(st.sampled_from(DTYPES)), layout=draw(st.sampled_from(LAYOUTS)), seed=seed)
    full = (sizes["batch"], sizes["heads"], sizes["seq_q"], sizes["seq_k"])
    mask = None
    if draw(st.booleans()):
        shape = [n if draw(st.booleans()) else 1 for n in full]
        shape = shape[draw(st.integers(0, 3)) :]
        density = draw(st.sampled_from([0.1, 0.5, 0.95]))
        mask = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < density
        if draw(st.booleans()) and mask.dim() >= 2:
            mask = mask.transpose(-1, -2).contiguous().transpose(-1, -2)
    return q, k, v, dict(causal=draw(st.booleans()), mask=mask, scale=draw(st.sampled_from([None, None, 0.3, 1.0])))


@property_settings(150)
@given(requests(longest=40, largest_group=3), st.integers(1, 48), st.integers(1, 48))
def test_the_blocked_module_is_exact(request_, block_q, block_k):
    """Guards against any block size, shape or layout at which the online softmax or its masks go wrong."""
    q, k, v, arguments = request_
    assert_as_good_as_peer(FlashAttention(block_q, block_k)(q, k, v, **arguments), q, k, v, **arguments)


@property_settings(60)
@given(requests(longest=40, largest_group=3), st.sampled_from(["sdpa", "reference", "auto"]))
def test_the_other_backends_keep_the_same_promises(request_, backend):
    """Guards against a dispatch that hands SDPA a mask or an alignment it reads differently."""
    q, k, v, arguments = request_
    assert_as_good_as_peer(attend(q, k, v, backend=backend, **arguments), q, k, v, **arguments)


@pytest.mark.skipif(NO_TRITON is not None, reason=str(NO_TRITON))
@property_settings(20)
@given(requests(longest=24, largest_group=2))
def test_the_prefill_kernel_is_exact(request_):
    """Guards against a kernel that is right for powers of two only. Blocks of 16, so that there are several."""
    from llm_latency.attention import triton_prefill

    q, k, v, arguments = request_
    scale = arguments["scale"] or q.shape[-1] ** -0.5
    with mock.patch.object(triton_prefill, "FIXED_BLOCK", 16):
        out = triton_prefill.prefill(q, k, v, arguments["causal"], arguments["mask"], scale)
    assert_as_good_as_peer(out, q, k, v, **arguments)


@pytest.mark.skipif(NO_TRITON is not None, reason=str(NO_TRITON))
@property_settings(20)
@given(requests(longest=4, largest_group=3), st.integers(1, 4), st.integers(0, 150))
def test_the_decode_kernel_is_exact(request_, splits, more_keys):
    """Guards against a split that is empty, half full or masked, and against joining them wrongly."""
    from llm_latency.attention import triton_decode

    q, k, v, arguments = request_
    if arguments["mask"] is None:  # a longer cache, so that there is something to split
        more = torch.randn(q.shape[0], more_keys, *k.shape[2:], generator=torch.Generator().manual_seed(3)).to(k.dtype)
        k, v = torch.cat([more, k], dim=1), torch.cat([more.flip(1), v], dim=1)
    scale = arguments["scale"] or q.shape[-1] ** -0.5
    with mock.patch.object(triton_decode, "choose_splits", return_value=splits):
        out = triton_decode.decode(q, k, v, arguments["causal"], arguments["mask"], scale)
    assert_as_good_as_peer(out, q, k, v, **arguments)
