"""What every attention backend asks of its arguments, in one place, so that all refuse the same things."""

from __future__ import annotations

import math

import torch
from torch import Tensor

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def check_tensors(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> None:
    """Raise TypeError or ValueError unless q, k, v and mask fit together.

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
        _check_mask(mask, q, (batch, heads, q.shape[1], k.shape[1]))


def _check_mask(mask: Tensor, q: Tensor, full: tuple[int, ...]) -> None:
    if not isinstance(mask, Tensor):
        raise TypeError(f"mask is {type(mask).__name__}; expected a bool tensor or None")
    if mask.dtype != torch.bool:
        raise TypeError(f"mask has dtype {mask.dtype}; expected torch.bool, True where a query may attend")
    if mask.device != q.device:
        raise ValueError(f"mask is on {mask.device}, q on {q.device}")
    padded = (1,) * (4 - mask.dim()) + tuple(mask.shape)
    if len(padded) != 4 or any(have not in (1, want) for have, want in zip(padded, full, strict=True)):
        raise ValueError(
            f"mask has shape {list(mask.shape)}; expected one that broadcasts to "
            f"[batch, heads, seq_q, seq_k] = {list(full)}"
        )


def check_scale(scale: float | None, head_dim: int) -> float:
    """The factor on the logits, 1 / sqrt(head_dim) for None. TypeError for no number, ValueError for inf or NaN."""
    if scale is None:
        return head_dim**-0.5
    if isinstance(scale, bool) or not isinstance(scale, (int, float)):
        raise TypeError(f"scale={scale!r}; expected a number or None")
    if not math.isfinite(scale):
        raise ValueError(f"scale={scale}; expected a finite number")
    return float(scale)


def check_flag(name: str, value: bool) -> bool:
    """TypeError unless value is True or False: `causal=mask` is a mistake that truthiness would hide."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}={value!r}; expected True or False")
    return value


def check_block(name: str, value: int) -> int:
    """A block size: an int of 1 or more, else TypeError or ValueError."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}={value!r}; expected an int")
    if value < 1:
        raise ValueError(f"{name}={value}; expected 1 or more")
    return value


def broadcast_mask(mask: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """A checked mask as a view [batch, heads, seq_q, seq_k]; no memory is spent."""
    return mask.expand(q.shape[0], q.shape[2], q.shape[1], k.shape[1])


def visible_pairs(q: Tensor, k: Tensor, causal: bool, mask: Tensor | None) -> Tensor | None:
    """Which query may attend to which key: bool, broadcastable to [batch, heads, seq_q, seq_k]; None where all may.

    causal aligns bottom-right: the last query sees every key, as it must when earlier keys come from a cache.
    """
    seq_q, seq_k = q.shape[1], k.shape[1]
    if not causal:
        return mask
    allowed = torch.ones(seq_q, seq_k, dtype=torch.bool, device=q.device).tril(seq_k - seq_q)
    return allowed if mask is None else allowed & mask
