"""What the attention tests compare with: FP64 as the truth, plain attention in the tensors' own dtype as the peer."""

from __future__ import annotations

import torch
from torch import Tensor

from llm_latency.attention import attention_reference
from llm_latency.attention.reference import visible_pairs


def peer(q: Tensor, k: Tensor, v: Tensor, *, causal=False, mask=None, scale=None) -> Tensor:
    """Plain attention with every product rounded to the tensors' dtype, as a model's eager attention does it."""
    group = q.shape[2] // k.shape[2]
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    allowed = visible_pairs(q.transpose(1, 2), k.transpose(1, 2), causal, mask)
    if allowed is not None:
        scores = scores.masked_fill(~allowed, -torch.inf)
    weights = scores.float().softmax(dim=-1).to(q.dtype).nan_to_num(0.0)  # a row without keys
    return (weights @ v).transpose(1, 2)


def assert_as_good_as_peer(out: Tensor, q: Tensor, k: Tensor, v: Tensor, **arguments) -> None:
    """The error against FP64 is at most twice the peer's, plus what no order of summation can avoid.

    That is one rounding of the result in its own dtype, and one rounding of the largest score in FP32, in which all
    sums are kept: a product of 72 terms added in another order differs by that much. The largest error of a few numbers
    is left to luck, the peer's too: with fewer than 1000 the factor is 6. (With 2 throughout, torch's own SDPA fails
    about one random case in a thousand.)
    """
    assert out.shape == q.shape and out.dtype == q.dtype and out.device == q.device
    q64, k64, v64 = q.double(), k.double(), v.double()
    truth = attention_reference(q64, k64, v64, **arguments)
    if truth.numel() == 0 or k.shape[1] == 0:
        assert not out.any()
        return
    assert torch.isfinite(out).all(), "the result holds NaN or infinities"
    error = (out.double() - truth).abs().max().item()
    peer_error = (peer(q, k, v, **arguments).double() - truth).abs().max().item()
    scale = arguments.get("scale")
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    keys = k64.repeat_interleave(q.shape[2] // k.shape[2], dim=2)
    score = abs(scale) * (q64.transpose(1, 2) @ keys.permute(0, 2, 3, 1)).abs().max().item()
    rounding = torch.finfo(q.dtype).eps * truth.abs().max().item()
    rounding += torch.finfo(torch.float32).eps * score * v64.abs().max().item()
    factor = 2 if out.numel() >= 1000 else 6
    assert error <= factor * peer_error + rounding, f"error {error:.3g}, the same-precision peer's {peer_error:.3g}"


def tensors(
    batch=1, seq_q=5, seq_k=7, heads=4, kv_heads=2, head_dim=16, dtype=torch.float32, layout="plain", seed=0
) -> tuple[Tensor, Tensor, Tensor]:
    """Random q, k, v [batch, seq, heads, head_dim]; layout: how they lie in memory."""
    generator = torch.Generator().manual_seed(seed)

    def make(seq: int, heads: int) -> Tensor:
        if layout == "heads first":  # as transformers hands them over
            x = torch.randn(batch, heads, seq, head_dim, generator=generator).to(dtype).transpose(1, 2)
        elif layout == "every second":
            x = torch.randn(batch, seq, heads, 2 * head_dim, generator=generator).to(dtype)[..., ::2]
        elif layout == "slice":
            x = torch.randn(batch, seq + 3, heads + 1, head_dim, generator=generator).to(dtype)[:, 2 : 2 + seq, 1:]
        elif layout == "expanded":
            x = torch.randn(1, seq, heads, head_dim, generator=generator).to(dtype).expand(batch, -1, -1, -1)
        else:
            x = torch.randn(batch, seq, heads, head_dim, generator=generator).to(dtype)
        return x

    return make(seq_q, heads), make(seq_k, kv_heads), make(seq_k, kv_heads)
