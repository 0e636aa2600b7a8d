"""What all our Triton kernels stand on: Triton itself, so that it runs here; a tile, a product, a step of the softmax.

Triton decides by the environment variable TRITON_INTERPRET, when `@triton.jit` meets a function, whether to compile it
or to interpret it on the CPU. This module is imported only when a Triton kernel is first asked for, sets the variable
where torch sees no CUDA device, and then imports Triton. Setting TRITON_INTERPRET=1 before starting Python interprets
on a GPU machine too.
"""

from __future__ import annotations

import importlib.util
import os

import numpy as np
import torch
from torch import Tensor

from llm_latency.attention.backend_facts import triton_problem
from llm_latency.attention.reference import broadcast_mask

if importlib.util.find_spec("triton") is None:
    raise ImportError(triton_problem())

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import triton
import triton.language as tl

INTERPRETED: bool = triton.knobs.runtime.interpret


def _interpret_standard_functions() -> None:
    """Make tl.max, tl.sum and their like interpretable when Triton was imported before the variable was set.

    torch.compile imports Triton on its own. Its standard functions are then fixed as compiled ones, which an
    interpreted kernel cannot call; wrapped anew, they are what a fresh process would have got.
    """
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    renewed: dict[int, InterpretedFunction] = {}  # by id: hashing a JITFunction reads all that it refers to
    for module in (tl.standard, tl):
        for name, value in list(vars(module).items()):
            if isinstance(value, JITFunction):
                setattr(module, name, renewed.setdefault(id(value), InterpretedFunction(value.fn)))


if INTERPRETED:
    _interpret_standard_functions()

LOG2_E = 1.4426950408889634  # exp(x) = exp2(x * LOG2_E); a GPU has an instruction for exp2 only


# -- on the host --------------------------------------------------------------------------------------------------


def padded(size: int) -> int:
    """The next power of two, at least 16: the sizes that Triton's blocks and matrix products can have."""
    return max(16, triton.next_power_of_2(size))


def launching(tensor: Tensor):
    """Launch on the tensor's own GPU, which need not be the current one; interpreted, keep NumPy quiet about NaN."""
    if tensor.is_cuda:
        return torch.cuda.device(tensor.device)
    return np.errstate(invalid="ignore", over="ignore")


def positive_scale(q: Tensor, scale: float) -> tuple[Tensor, float]:
    """The kernels take the largest raw score of a row as the largest scaled one: true for a positive scale only."""
    if scale > 0:
        return q, scale
    return (-q, -scale) if scale < 0 else (torch.zeros_like(q), 1.0)


def mask_argument(mask: Tensor | None, q: Tensor, k: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """A mask as bytes [batch, heads, seq_q, seq_k], and its strides. Without one a kernel reads none, but wants some
    pointer."""
    if mask is None:
        return q, (0, 0, 0, 0)
    full = broadcast_mask(mask, q, k).view(torch.uint8)
    return full, full.stride()


class InferenceOnly(torch.autograd.Function):
    """Marks a kernel's result so that a backward pass says there is none, instead of training on no gradient."""

    @staticmethod
    def forward(ctx, run, *tensors):
        return run(*tensors)

    @staticmethod
    def backward(ctx, *gradients):
        raise NotImplementedError("the Triton kernels are for inference and have no backward pass; use another backend")


# -- in a kernel --------------------------------------------------------------------------------------------------


@triton.jit
def load_tile(
    base, rows, dims, row_stride, dim_stride, row_limit, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    CHECK_ROWS: tl.constexpr,
):  # fmt: skip
    """Rows of a [rows, HEAD_DIM] matrix as a tile [len(rows), BLOCK_D]; what lies outside is 0."""
    pointers = base + rows[:, None] * row_stride + dims[None, :] * dim_stride
    if CHECK_ROWS:
        inside = (rows[:, None] < row_limit) & (dims[None, :] < HEAD_DIM)
        return tl.load(pointers, mask=inside, other=0.0)
    elif BLOCK_D != HEAD_DIM:
        return tl.load(pointers, mask=(dims[None, :] < HEAD_DIM) & (rows[:, None] >= 0), other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def dot(a, b, acc, UPCAST: tl.constexpr):
    """a @ b + acc in FP32; acc may be None. FP32 input stays FP32 ("ieee"), not TF32.

    UPCAST: the interpreter has no BF16 product.
    """
    if UPCAST:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def softmax_step(
    q, k, v, m, l, acc, allowed, scale_log2, MASKED: tl.constexpr, GUARD: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Take one block of keys into the running softmax; `flash.online_softmax_step` line by line.

    q [rows, D], k and v [keys, D]; m, l [rows]; acc [rows, D] in FP32; allowed [rows, keys], read if MASKED. m is the
    largest raw score so far, not yet scaled. GUARD keeps non-finite values of v out of the rows that may not see them.
    """
    scores = dot(q, tl.trans(k), None, UPCAST)  # [rows, keys]
    if MASKED:
        scores = tl.where(allowed, scores, -float("inf"))
    m_new = tl.maximum(m, tl.max(scores, 1))
    origin = tl.where(m_new == -float("inf"), 0.0, m_new)
    # Subtract, then scale. The usual `scores * scale - m * scale` becomes one fused operation that rounds the second
    # product and not the first: at scores of 1e11 the largest weight is then not 1 but exp of some thousands.
    shrink = tl.exp2((m - origin) * scale_log2)
    weights = tl.exp2((scores - origin[:, None]) * scale_log2)
    l = l * shrink + tl.sum(weights, 1)
    acc = acc * shrink[:, None]
    if GUARD and MASKED:
        # A masked slot has weight 0, but 0 * NaN is NaN: what is not finite is taken out of the product, and put back
        # where a row may see it: inf, -inf, or inf - inf = NaN.
        v32 = v.to(tl.float32)
        nan = v32 != v32
        # By way of FP32: the interpreter cannot turn a bool into BF16.
        seen = allowed.to(tl.float32).to(v.dtype)
        plus = dot(seen, ((v32 == float("inf")) | nan).to(tl.float32).to(v.dtype), None, UPCAST)
        minus = dot(seen, ((v32 == -float("inf")) | nan).to(tl.float32).to(v.dtype), None, UPCAST)
        acc += tl.where(plus > 0, float("inf"), 0.0) - tl.where(minus > 0, float("inf"), 0.0)
        v = tl.where(tl.abs(v32) < float("inf"), v32, 0.0).to(v.dtype)
    return m_new, l, dot(weights.to(v.dtype), v, acc, UPCAST)
