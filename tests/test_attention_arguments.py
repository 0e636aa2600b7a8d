"""Arguments that cannot be meant: an error that names both sides, from every backend alike."""

from __future__ import annotations

import pytest
import torch
from attention_oracle import tensors

from llm_latency.arguments import check_device
from llm_latency.attention import BACKENDS, FlashAttention, attend, attention_reference, backend_facts, backends
from llm_latency.attention.dispatch import cannot

CPU_QUERY = torch.zeros(1, 1, 1, 16)
NO_TRITON = cannot("triton", CPU_QUERY)


def calls():
    return [attention_reference, FlashAttention(), attend, lambda *a, **k: attend(*a, backend="triton", **k)]


@pytest.mark.parametrize(
    "change, error, says",
    [
        (dict(kv_heads=3), ValueError, "4 query heads.*3 KV heads"),
        (dict(k_dim=8), ValueError, "16.*8"),
        (dict(k_batch=2), ValueError, "batch"),
        (dict(v_seq=6), ValueError, "7.*6"),
        (dict(q_dims=3), ValueError, r"q has shape \[5, 4, 16\]"),
        (dict(k_dtype=torch.float16), TypeError, "float32.*float16"),
        (dict(q_dtype=torch.int64), TypeError, "q has dtype torch.int64"),
    ],
)
def test_shapes_and_dtypes_that_do_not_agree(change, error, says):
    """Guards against broadcasting that hides a wrong axis."""
    q, k, v = tensors(kv_heads=change.get("kv_heads", 2))
    if "k_dim" in change:
        k, v = k[..., :8], v[..., :8]
    if "k_batch" in change:
        k, v = k.expand(2, -1, -1, -1), v.expand(2, -1, -1, -1)
    if "v_seq" in change:
        v = v[:, :6]
    q = q[0] if "q_dims" in change else q.to(change.get("q_dtype", q.dtype))
    k = k.to(change.get("k_dtype", k.dtype))
    for call in calls():
        with pytest.raises(error, match=says):
            call(q, k, v)


@pytest.mark.parametrize(
    "keywords, error, says",
    [
        (dict(mask=torch.zeros(5, 7)), TypeError, "float32.*bool"),
        (dict(mask=[True]), TypeError, "list"),
        (dict(mask=torch.ones(7, 5, dtype=torch.bool)), ValueError, r"\[7, 5\].*\[1, 4, 5, 7\]"),
        (dict(mask=torch.ones(1, 1, 1, 5, 7, dtype=torch.bool)), ValueError, "broadcasts"),
        (dict(scale="big"), TypeError, "'big'"),
        (dict(scale=float("nan")), ValueError, "nan"),
        (dict(causal=torch.ones(5, 7, dtype=torch.bool)), TypeError, "causal"),
        (dict(causal=1), TypeError, "causal=1"),
    ],
)
def test_masks_scales_and_flags(keywords, error, says):
    """Guards against a float mask read as true, and a mask given as `causal`."""
    for call in calls():
        with pytest.raises(error, match=says):
            call(*tensors(), **keywords)


@pytest.mark.parametrize("value, error", [(0, ValueError), (-3, ValueError), (2.0, TypeError), (True, TypeError)])
def test_block_sizes(value, error):
    """Guards against a loop that never advances."""
    for name in ("block_q", "block_k"):
        with pytest.raises(error, match=f"{name}={value}"):
            FlashAttention(**{name: value})


def test_backends_say_why_not():
    """Guards against a capability that is assumed: each backend works here, or a sentence says why not."""
    found = backends()
    assert tuple(found) == BACKENDS
    q, k, v = (x.to(check_device(), torch.float16) for x in tensors())
    for name, problem in found.items():
        if problem is None:
            assert attend(q, k, v, backend=name).shape == (1, 5, 4, 16)
        else:
            with pytest.raises(ValueError, match=name):
                attend(q, k, v, backend=name)
            assert len(problem.split()) > 5


def test_unknown_backend_lists_the_known():
    """Guards against a spelling mistake that runs something else."""
    with pytest.raises(ValueError, match=r"'flash2'.*'reference', 'flash', 'triton', 'sdpa', 'flash_attn'"):
        attend(*tensors(), backend="flash2")


def test_a_request_that_a_backend_cannot_do_is_refused():
    """Guards against a silent fall-back: FP64 and huge heads are named in the refusal."""
    if NO_TRITON:
        pytest.skip(NO_TRITON)
    with pytest.raises(ValueError, match="float64"):
        attend(*tensors(dtype=torch.float64), backend="triton")
    with pytest.raises(ValueError, match="257"):
        attend(*tensors(head_dim=257), backend="triton")


def test_without_triton_the_others_work(monkeypatch):
    """Guards against an import error on macOS, Windows and Arm, where there is no Triton."""
    monkeypatch.setattr(backend_facts.importlib.util, "find_spec", lambda name: None)
    assert "macOS" in backends()["triton"]
    with pytest.raises(ValueError, match="Triton is not installed"):
        attend(*tensors(), backend="triton")
    assert attend(*tensors()).shape == (1, 5, 4, 16)


def test_gradients_are_right_or_refused():
    """Guards against training on a gradient that is silently missing."""
    grads = {}
    for backend in ("reference", "flash", "sdpa"):
        q, k, v = (x.requires_grad_() for x in tensors())
        attend(q, k, v, backend=backend, causal=True).square().sum().backward()
        grads[backend] = torch.cat([x.grad.flatten() for x in (q, k, v)])
    assert torch.allclose(grads["flash"], grads["reference"], atol=1e-5)
    assert torch.allclose(grads["sdpa"], grads["reference"], atol=1e-5)
    if NO_TRITON is None:
        q, k, v = (x.requires_grad_() for x in tensors())
        with pytest.raises(NotImplementedError, match="no backward pass"):
            attend(q, k, v, backend="triton").sum().backward()
