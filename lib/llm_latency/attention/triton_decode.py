"""FlashDecoding as two Triton kernels: few queries against a long cache, the cache split among many programs.

One query has no rows to share out, so a kernel like prefill's would keep one program per head busy and leave the rest
of the GPU idle. Here each program reads one stretch of the cache and keeps the m, l and acc of its stretch; a second,
small kernel joins them (Dao, Haziza, Massa and Sizov, "Flash-Decoding for long-context inference", 2023).
"""

from __future__ import annotations

import functools

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
from llm_latency.attention.triton_prefill import repair

MAX_ROWS = 64  # query heads per KV head times queries: beyond it, prefill's blocks fill the GPU
MAX_SPLITS = 64
BLOCK_K = 64


@triton.jit
def split_kernel(
    Q, K, V, Mask, PartAcc, PartM, PartL,
    q_batch, q_seq, q_head, q_dim, k_batch, k_seq, k_head, k_dim, v_batch, v_seq, v_head, v_dim,
    mask_batch, mask_head, mask_q, mask_k,
    kv_heads, group, seq_q, seq_k, keys_per_split, scale_log2,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, CAUSAL: tl.constexpr, HAS_MASK: tl.constexpr,
    UPCAST: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    # All query heads that share a KV head are rows of one program: the cache is read once, not once per head.
    pair = tl.program_id(0)
    split = tl.program_id(1)
    batch = (pair // kv_heads).to(tl.int64)
    kv_head = (pair % kv_heads).to(tl.int64)
    rows = tl.arange(0, BLOCK_ROWS)
    keys = tl.arange(0, BLOCK_K)
    dims = tl.arange(0, BLOCK_D)
    query = rows // group
    head = kv_head * group + rows % group
    real = rows < seq_q * group

    q_pointers = Q + batch * q_batch + (query * q_seq + head * q_head)[:, None] + dims[None, :] * q_dim
    q = tl.load(q_pointers, mask=real[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)
    m = tl.full([BLOCK_ROWS], -float("inf"), tl.float32)
    l = tl.full([BLOCK_ROWS], 0.0, tl.float32)
    acc = tl.full([BLOCK_ROWS, BLOCK_D], 0.0, tl.float32)

    # This program's stretch of keys, and the part of it that every row sees.
    first = split * keys_per_split
    last = tl.minimum(seq_k, first + keys_per_split)
    full = last
    if CAUSAL:
        full = tl.minimum(last, seq_k - seq_q + 1)
    if HAS_MASK:
        full = first
    full = first + tl.maximum(full - first, 0) // BLOCK_K * BLOCK_K

    k_base = K + batch * k_batch + kv_head * k_head + first.to(tl.int64) * k_seq
    v_base = V + batch * v_batch + kv_head * v_head + first.to(tl.int64) * v_seq
    for _ in range(first, full, BLOCK_K):
        k = load_tile(k_base, keys, dims, k_seq, k_dim, seq_k, HEAD_DIM, BLOCK_D, False)
        v = load_tile(v_base, keys, dims, v_seq, v_dim, seq_k, HEAD_DIM, BLOCK_D, False)
        m, l, acc = softmax_step(q, k, v, m, l, acc, None, scale_log2, False, False, UPCAST)
        k_base += BLOCK_K * k_seq
        v_base += BLOCK_K * v_seq

    mask_rows = Mask + batch * mask_batch + (head * mask_head + query.to(tl.int64) * mask_q)[:, None]
    for start in range(full, last, BLOCK_K):
        k = load_tile(k_base, keys, dims, k_seq, k_dim, last - start, HEAD_DIM, BLOCK_D, True)
        v = load_tile(v_base, keys, dims, v_seq, v_dim, last - start, HEAD_DIM, BLOCK_D, True)
        allowed = real[:, None] & ((start + keys) < last)[None, :]
        if HAS_MASK:
            mask = tl.load(mask_rows + (start + keys)[None, :] * mask_k, mask=allowed, other=0)
            allowed = allowed & (mask != 0)
        if CAUSAL:
            allowed = allowed & ((query + seq_k - seq_q)[:, None] >= (start + keys)[None, :])
        m, l, acc = softmax_step(q, k, v, m, l, acc, allowed, scale_log2, True, False, UPCAST)
        k_base += BLOCK_K * k_seq
        v_base += BLOCK_K * v_seq

    # PartAcc [batch * kv_heads, splits, BLOCK_ROWS, BLOCK_D]; PartM, PartL [batch * kv_heads, splits, BLOCK_ROWS]
    place = (pair * tl.num_programs(1) + split).to(tl.int64) * BLOCK_ROWS
    tl.store(PartM + place + rows, m)
    tl.store(PartL + place + rows, l)
    tl.store(PartAcc + (place + rows)[:, None] * BLOCK_D + dims[None, :], acc)


@triton.jit
def join_kernel(
    PartAcc, PartM, PartL, Out, out_batch, out_seq, out_head, out_dim, kv_heads, group, splits, scale_log2,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_SPLITS: tl.constexpr,
):  # fmt: skip
    # One program per row: bring every split to the largest m of all, then add.
    pair = tl.program_id(0)
    row = tl.program_id(1)
    parts = tl.arange(0, BLOCK_SPLITS)
    dims = tl.arange(0, BLOCK_D)
    places = (pair.to(tl.int64) * splits + parts) * BLOCK_ROWS + row
    there = parts < splits
    m = tl.load(PartM + places, mask=there, other=-float("inf"))
    l = tl.load(PartL + places, mask=there, other=0.0)
    acc = tl.load(PartAcc + places[:, None] * BLOCK_D + dims[None, :], mask=there[:, None], other=0.0)
    largest = tl.max(m, 0)
    origin = tl.where(largest == -float("inf"), 0.0, largest)
    worth = tl.exp2((m - origin) * scale_log2)
    total = tl.sum(l * worth, 0)
    out = tl.sum(acc * worth[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    batch = (pair // kv_heads).to(tl.int64)
    head = pair % kv_heads * group + row % group
    pointers = Out + batch * out_batch + head * out_head + (row // group) * out_seq + dims * out_dim
    tl.store(pointers, out.to(Out.dtype.element_ty), mask=dims < HEAD_DIM)


def new_parts(pairs: int, parts: int, rows: int, dims: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Where the parts of each pair of batch and KV head keep their acc [pairs, parts, rows, dims], m and l."""
    acc = torch.empty(pairs, parts, rows, dims, dtype=torch.float32, device=device)
    m = torch.empty(pairs, parts, rows, dtype=torch.float32, device=device)
    return acc, m, torch.empty_like(m)


def join(part_acc: Tensor, part_m: Tensor, part_l: Tensor, out: Tensor, kv_heads: int, scale: float) -> None:
    """Add up the parts of `new_parts`, whose scores had `scale`, into out [batch, seq_q, heads, head_dim]."""
    pairs, parts, block_rows, block_d = part_acc.shape
    _, seq_q, heads, head_dim = out.shape
    group = heads // kv_heads
    join_kernel[(pairs, seq_q * group)](
        part_acc, part_m, part_l, out, *out.stride(), kv_heads, group, parts, scale * LOG2_E,
        HEAD_DIM=head_dim, BLOCK_D=block_d, BLOCK_ROWS=block_rows, BLOCK_SPLITS=triton.next_power_of_2(parts),
        num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip


@functools.lru_cache
def multiprocessors(device: torch.device) -> int:
    """Of a GPU; interpreted on a CPU, some number for several parts."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def choose_splits(seq_k: int, pairs: int, device: torch.device) -> int:
    """How many stretches to cut the cache into: some two programs per multiprocessor, each with a block or more."""
    wanted = triton.cdiv(2 * multiprocessors(device), pairs)
    return max(1, min(wanted, triton.cdiv(seq_k, BLOCK_K), MAX_SPLITS))


def decode(q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Tensor | None, scale: float) -> Tensor:
    """Attention of few queries by `split_kernel` and `join_kernel`; arguments are checked already.

    q [batch, seq_q, heads, head_dim] with seq_q * heads / kv_heads at most MAX_ROWS; k, v [batch, seq_k, kv_heads,
    head_dim], any strides; FP32, FP16 or BF16.
    """
    batch, seq_q, heads, head_dim = q.shape
    seq_k, kv_heads = k.shape[1], k.shape[2]
    group = heads // kv_heads
    if seq_q * group > MAX_ROWS:
        raise ValueError(f"{seq_q} queries of {group} heads per KV head are {seq_q * group} rows; at most {MAX_ROWS}")
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if out.numel() == 0 or seq_k == 0:
        return out.zero_()
    positive_q, positive = positive_scale(q, scale)
    pairs, block_rows, block_d = batch * kv_heads, padded(seq_q * group), padded(head_dim)
    splits = choose_splits(seq_k, pairs, q.device)
    keys_per_split = triton.cdiv(triton.cdiv(seq_k, splits), BLOCK_K) * BLOCK_K
    splits = triton.cdiv(seq_k, keys_per_split)
    part_acc, part_m, part_l = new_parts(pairs, splits, block_rows, block_d, q.device)
    mask_bytes, mask_strides = mask_argument(mask, q, k)
    with launching(q):
        split_kernel[(pairs, splits)](
            positive_q, k, v, mask_bytes, part_acc, part_m, part_l,
            *positive_q.stride(), *k.stride(), *v.stride(), *mask_strides,
            kv_heads, group, seq_q, seq_k, keys_per_split, positive * LOG2_E,
            HEAD_DIM=head_dim, BLOCK_D=block_d, CAUSAL=causal and seq_q > 1, HAS_MASK=mask is not None,
            UPCAST=INTERPRETED, BLOCK_ROWS=block_rows, BLOCK_K=BLOCK_K, num_warps=4, num_stages=3,
            enable_fp_fusion=True,
        )  # fmt: skip
        join(part_acc, part_m, part_l, out, kv_heads, positive)
    if mask is not None or (causal and seq_q > 1):
        repair(q, k, v, out, causal, mask, scale)
    return out
