"""FlashAttention as a Triton kernel: one program per block of queries and head (FlashAttention-2, Dao 2023).

A NaN that stands in a masked slot must not reach the result, and in a product 0 * NaN does. Guarding every product
costs registers that the common case needs, so the kernel runs unguarded; where masks are in play, a second launch looks
for blocks of the result that are not finite and computes only those again, guarded. Nothing waits for the GPU.
"""

from __future__ import annotations

import torch
from torch import Tensor

from llm_latency.attention.triton_block import (
    INTERPRETED,
    LOG2_E,
    launching,
    load_tile,
    mask_argument,
    padded,
    positive_scale,
    softmax_step,
    tl,
    triton,
)


@triton.jit
def prefill_kernel(
    Q, K, V, Mask, Out,
    q_batch, q_seq, q_head, q_dim, k_batch, k_seq, k_head, k_dim, v_batch, v_seq, v_head, v_dim,
    mask_batch, mask_head, mask_q, mask_k, out_batch, out_seq, out_head, out_dim,
    group, seq_q, seq_k, scale_log2,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, CAUSAL: tl.constexpr, HAS_MASK: tl.constexpr,
    REPAIR: tl.constexpr, UPCAST: tl.constexpr, LENGTH_CLASS: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    # Causal blocks at the end have the most keys to read: starting with them leaves no long tail.
    first_row = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_Q
    head = tl.program_id(1).to(tl.int64)
    batch = tl.program_id(2).to(tl.int64)
    kv_head = head // group
    rows = tl.arange(0, BLOCK_Q)
    keys = tl.arange(0, BLOCK_K)
    dims = tl.arange(0, BLOCK_D)

    out_base = Out + batch * out_batch + head * out_head + first_row.to(tl.int64) * out_seq
    out_pointers = out_base + rows[:, None] * out_seq + dims[None, :] * out_dim
    inside = (rows < seq_q - first_row)[:, None] & (dims < HEAD_DIM)[None, :]
    if REPAIR:
        before = tl.load(out_pointers, mask=inside, other=0.0).to(tl.float32)
        if tl.min(tl.min((tl.abs(before) < float("inf")).to(tl.int32), 1), 0) == 1:
            return

    # This program's queries are loaded once and stay in registers; scores never leave the chip.
    q_base = Q + batch * q_batch + head * q_head + first_row.to(tl.int64) * q_seq
    q = load_tile(q_base, rows, dims, q_seq, q_dim, seq_q - first_row, HEAD_DIM, BLOCK_D, True)
    m = tl.full([BLOCK_Q], -float("inf"), tl.float32)
    l = tl.full([BLOCK_Q], 0.0, tl.float32)
    acc = tl.full([BLOCK_Q, BLOCK_D], 0.0, tl.float32)

    # Query i sees keys up to i + offset. Blocks below `full` are visible to every row; none beyond `last` is read.
    offset = seq_k - seq_q
    last = seq_k
    full = seq_k
    if CAUSAL:
        last = tl.minimum(seq_k, first_row + BLOCK_Q + offset)
        full = tl.maximum(tl.minimum(seq_k, first_row + offset + 1), 0)
    if HAS_MASK:
        full = 0
    full = full // BLOCK_K * BLOCK_K

    k_base = K + batch * k_batch + kv_head * k_head
    v_base = V + batch * v_batch + kv_head * v_head
    for _ in range(0, full, BLOCK_K):
        k = load_tile(k_base, keys, dims, k_seq, k_dim, seq_k, HEAD_DIM, BLOCK_D, False)
        v = load_tile(v_base, keys, dims, v_seq, v_dim, seq_k, HEAD_DIM, BLOCK_D, False)
        m, l, acc = softmax_step(q, k, v, m, l, acc, None, scale_log2, False, False, UPCAST)
        k_base += BLOCK_K * k_seq
        v_base += BLOCK_K * v_seq

    mask_rows = Mask + batch * mask_batch + head * mask_head + (first_row + rows).to(tl.int64)[:, None] * mask_q
    for start in range(full, last, BLOCK_K):
        k = load_tile(k_base, keys, dims, k_seq, k_dim, seq_k - start, HEAD_DIM, BLOCK_D, True)
        v = load_tile(v_base, keys, dims, v_seq, v_dim, seq_k - start, HEAD_DIM, BLOCK_D, True)
        allowed = ((first_row + rows) < seq_q)[:, None] & ((start + keys) < seq_k)[None, :]
        if HAS_MASK:
            mask = tl.load(mask_rows + (start + keys)[None, :] * mask_k, mask=allowed, other=0)
            allowed = allowed & (mask != 0)
        if CAUSAL:
            allowed = allowed & ((first_row + rows + offset)[:, None] >= (start + keys)[None, :])
        m, l, acc = softmax_step(q, k, v, m, l, acc, allowed, scale_log2, True, REPAIR, UPCAST)
        k_base += BLOCK_K * k_seq
        v_base += BLOCK_K * v_seq

    out = acc / tl.where(l == 0.0, 1.0, l)[:, None]  # a row that saw nothing has acc = 0, and stays zeros
    tl.store(out_pointers, out.to(Out.dtype.element_ty), mask=inside)


# Which block sizes are fastest depends on the GPU's shared memory and registers: Triton times these at the first call
# for each head_dim, mask and class of lengths. A configuration that does not fit the device is left out by itself.
CONFIGURATIONS = [
    triton.Config({"BLOCK_Q": block_q, "BLOCK_K": block_k}, num_warps=warps, num_stages=stages)
    for block_q, block_k, warps, stages in (
        (128, 128, 8, 2), (128, 64, 8, 3), (128, 64, 8, 2), (128, 64, 4, 3), (128, 64, 4, 2), (128, 32, 4, 3),
        (64, 64, 4, 3), (64, 32, 4, 2), (32, 32, 4, 1),
    )
]  # fmt: skip
FIXED_BLOCK = 64  # where nothing is tuned: in the interpreter, and for repairs

if not INTERPRETED:
    tuned_prefill_kernel = triton.autotune(CONFIGURATIONS, key=["HEAD_DIM", "CAUSAL", "HAS_MASK", "LENGTH_CLASS"])(
        prefill_kernel
    )


def prefill(q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Tensor | None, scale: float) -> Tensor:
    """Attention by `prefill_kernel`; arguments are checked already (see `dispatch.attend`).

    q [batch, seq_q, heads, head_dim]; k, v [batch, seq_k, kv_heads, head_dim], any strides; FP32, FP16 or BF16.
    """
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if out.numel() == 0 or k.shape[1] == 0:
        return out.zero_()
    _launch(prefill_kernel if INTERPRETED else tuned_prefill_kernel, q, k, v, out, causal, mask, scale, repair=False)
    if causal or mask is not None:
        repair(q, k, v, out, causal, mask, scale)
    return out


def repair(q: Tensor, k: Tensor, v: Tensor, out: Tensor, causal: bool, mask: Tensor | None, scale: float) -> None:
    """Compute those blocks of `out` again, guarded, that hold NaN or infinities; the others are only looked at."""
    _launch(prefill_kernel, q, k, v, out, causal, mask, scale, repair=True)


def _launch(
    kernel,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    causal: bool,
    mask: Tensor | None,
    scale: float,
    repair: bool,
) -> None:
    batch, seq_q, heads, head_dim = q.shape
    q, scale = positive_scale(q, scale)
    mask_bytes, mask_strides = mask_argument(mask, q, k)
    options = dict(
        HEAD_DIM=head_dim, BLOCK_D=padded(head_dim), CAUSAL=causal, HAS_MASK=mask is not None, REPAIR=repair,
        UPCAST=INTERPRETED, LENGTH_CLASS=min(8192, max(128, triton.next_power_of_2(seq_q))),
    )  # fmt: skip
    if kernel is prefill_kernel:
        options |= dict(BLOCK_Q=FIXED_BLOCK, BLOCK_K=FIXED_BLOCK, num_warps=4, num_stages=1)

    def grid(meta: dict) -> tuple[int, int, int]:
        return triton.cdiv(seq_q, meta["BLOCK_Q"]), heads, batch

    with launching(q):
        kernel[grid](
            q, k, v, mask_bytes, out, *q.stride(), *k.stride(), *v.stride(), *mask_strides, *out.stride(),
            heads // k.shape[2], seq_q, k.shape[1], scale * LOG2_E, enable_fp_fusion=True, **options,
        )  # fmt: skip
