"""What the prefill and the decode kernel share: loading a tile, and one step of the online softmax."""

from __future__ import annotations

from llm_latency.attention.triton_runtime import tl, triton

LOG2_E = 1.4426950408889634  # exp(x) = exp2(x * LOG2_E); a GPU has an instruction for exp2 only


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
