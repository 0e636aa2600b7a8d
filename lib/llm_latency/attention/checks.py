"""What every attention backend asks of its arguments, in one place, so that all refuse the same things."""

from __future__ import annotations

import torch
from torch import Tensor

from llm_latency.arguments import check_flag, check_number

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def check_request(q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Tensor | None, scale: float | None) -> float:
    """Raise TypeError or ValueError unless the arguments fit together; return the factor on the scores.

    q [batch, seq_q, heads, head_dim]; k, v [batch, seq_k, kv_heads, head_dim]; one floating dtype and one device for
    all; heads a multiple of kv_heads; mask None or bool, broadcastable to [batch, heads, seq_q, seq_k].
    """
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} is {type(tensor).__name__}; expected a tensor")
        if tensor.dtype not in DTYPES:
            raise TypeError(f"{name} has dtype {tensor.dtype}; expected one of {', '.join(map(str, DTYPES))}")
        if tensor.dim() != 4:
            raise ValueError(f"{name} has shape {list(tensor.shape)}; expected [batch, seq, heads, head_dim]")
    if not q.dtype == k.dtype == v.dtype:
        raise TypeError(f"dtypes differ: q {q.dtype}, k {k.dtype}, v {v.dtype}; expected one for all")
    if not q.device == k.device == v.device:
        raise ValueError(f"devices differ: q on {q.device}, k on {k.device}, v on {v.device}")
    if k.shape != v.shape:
        raise ValueError(f"k has shape {list(k.shape)}, v has {list(v.shape)}; expected the same")
    batch, _, heads, head_dim = q.shape
    if batch != k.shape[0] or head_dim != k.shape[3]:
        raise ValueError(
            f"q has shape {list(q.shape)}, k has {list(k.shape)}; expected the same batch (first) and head_dim (last)"
        )
    if head_dim == 0 or heads == 0 or k.shape[2] == 0:
        raise ValueError(
            f"q has shape {list(q.shape)}, k has {list(k.shape)}; expected heads and head_dim of 1 or more"
        )
    if heads % k.shape[2]:
        raise ValueError(f"{heads} query heads are not divisible by {k.shape[2]} KV heads")
    if mask is not None:
        check_mask(mask, q.device, (batch, heads, q.shape[1], k.shape[1]))
    check_flag("causal", causal)
    return check_scale(scale, head_dim)


def check_mask(mask: Tensor, device: torch.device, full: tuple[int, ...]) -> None:
    """Raise TypeError or ValueError unless mask is bool, on that device and broadcastable to `full`."""
    if not isinstance(mask, Tensor):
        raise TypeError(f"mask is {type(mask).__name__}; expected a bool tensor or None")
    if mask.dtype != torch.bool:
        raise TypeError(f"mask has dtype {mask.dtype}; expected torch.bool, True where a query may attend")
    if mask.device != device:
        raise ValueError(f"mask is on {mask.device}, the queries on {device}")
    padded = (1,) * (4 - mask.dim()) + tuple(mask.shape)
    if len(padded) != 4 or any(have not in (1, want) for have, want in zip(padded, full, strict=True)):
        raise ValueError(
            f"mask has shape {list(mask.shape)}; expected one that broadcasts to "
            f"[batch, heads, seq_q, seq_k] = {list(full)}"
        )


def check_scale(scale: float | None, head_dim: int) -> float:
    """The factor on the logits, 1 / sqrt(head_dim) for None. TypeError for no number, ValueError for inf or NaN."""
    return head_dim**-0.5 if scale is None else check_number("scale", scale)
