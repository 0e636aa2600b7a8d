"""Decode attention over an INT8 cache in one Triton kernel: codes become numbers in registers, never in memory.

The sequence is split among programs, as in FlashDecoding (Dao et al. 2023), because one query gives too few programs to
fill a GPU; `triton_decode` joins the parts. Import this module only when the kernel is wanted: it loads Triton.
"""

from __future__ import annotations

from torch import Tensor

from llm_latency.attention.triton_block import (
    INTERPRETED,
    LOG2_E,
    launching,
    load_tile,
    padded,
    positive_scale,
    softmax_step,
    tl,
    triton,
)
from llm_latency.attention.triton_decode import join, multiprocessors, new_parts
from llm_latency.kv_cache.int8 import Int8CacheLayer

PROGRAMS_PER_PROCESSOR = 4  # enough in flight to hide the waiting for memory


@triton.jit
def decode_kernel(
    Q, KeyCodes, KeyScales, ValueCodes, ValueScales, KeyWindow, ValueWindow, PartAcc, PartM, PartL,
    kc_batch, kc_head, kc_dim, ks_batch, ks_head, ks_dim, vc_batch, vc_head, vc_seq, vs_batch, vs_head,
    kw_batch, kw_head, kw_seq, vw_batch, vw_head, vw_seq,
    kv_heads, rows, quantized, window, groups_per_part, parts, scale_log2,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    # The last part reads the window of exact tokens, each of the others its groups of codes.
    part = tl.program_id(0)
    pair = tl.program_id(1).to(tl.int64)  # one batch row and KV head
    batch = pair // kv_heads
    head = pair % kv_heads
    r = tl.arange(0, ROWS)
    d = tl.arange(0, BLOCK_D)
    t = tl.arange(0, GROUP)
    # The query heads that share this KV head, padded to the 16 rows a matrix product wants.
    q = load_tile(Q + pair * rows * HEAD_DIM, r, d, HEAD_DIM, 1, rows, HEAD_DIM, BLOCK_D, True)  # [ROWS, BLOCK_D]
    q32 = q.to(tl.float32)
    m = tl.full([ROWS], -float("inf"), tl.float32)
    l = tl.full([ROWS], 0.0, tl.float32)
    acc = tl.full([ROWS, BLOCK_D], 0.0, tl.float32)

    if part < parts:
        key_codes = KeyCodes + batch * kc_batch + head * kc_head
        key_scales = KeyScales + batch * ks_batch + head * ks_head
        value_codes = ValueCodes + batch * vc_batch + head * vc_head
        value_scales = ValueScales + batch * vs_batch + head * vs_head
        first = part * groups_per_part
        last = tl.minimum(first + groups_per_part, tl.cdiv(quantized, GROUP))
        for group in range(first, last):
            start = group * GROUP
            left = quantized - start
            # A group's key scales belong to channels, so they go into the query: D products instead of D * GROUP.
            ks = tl.load(key_scales + d * ks_dim + group, mask=d < HEAD_DIM, other=0.0).to(tl.float32)
            kc = load_tile(key_codes + start, t, d, 1, kc_dim, left, HEAD_DIM, BLOCK_D, True)  # [GROUP, BLOCK_D]
            vs = tl.load(value_scales + start + t, mask=t < left, other=0.0).to(tl.float32)
            vc = load_tile(value_codes + start * vc_seq, t, d, vc_seq, 1, left, HEAD_DIM, BLOCK_D, True)
            k = kc.to(tl.float32).to(q.dtype)  # by way of FP32: the interpreter cannot turn INT8 into BF16
            v = (vc.to(tl.float32) * vs[:, None]).to(q.dtype)
            scaled = (q32 * ks[None, :]).to(q.dtype)
            m, l, acc = softmax_step(scaled, k, v, m, l, acc, (t < left)[None, :], scale_log2, True, False, UPCAST)
    else:
        key_window = KeyWindow + batch * kw_batch + head * kw_head
        value_window = ValueWindow + batch * vw_batch + head * vw_head
        for start in range(0, window, GROUP):
            left = window - start
            k = load_tile(key_window + start * kw_seq, t, d, kw_seq, 1, left, HEAD_DIM, BLOCK_D, True).to(q.dtype)
            v = load_tile(value_window + start * vw_seq, t, d, vw_seq, 1, left, HEAD_DIM, BLOCK_D, True).to(q.dtype)
            m, l, acc = softmax_step(q, k, v, m, l, acc, (t < left)[None, :], scale_log2, True, False, UPCAST)

    place = (pair * (parts + 1) + part) * ROWS + r
    tl.store(PartM + place, m)
    tl.store(PartL + place, l)
    tl.store(PartAcc + place[:, None] * BLOCK_D + d[None, :], acc)


def decode_int8(query: Tensor, kv: Int8CacheLayer, scale: float) -> Tensor:
    """One query [batch, heads, 1, head_dim] over a quantised cache; arguments are checked (see `attend_int8`)."""
    batch, heads, _, head_dim = query.shape
    kv_heads = kv.keys.shape[1]
    rows, pairs = heads // kv_heads, batch * kv_heads
    q, scale = positive_scale(query.contiguous(), scale)
    groups = triton.cdiv(kv.quantized, kv.key_store.group_size)
    parts = min(groups, max(1, triton.cdiv(PROGRAMS_PER_PROCESSOR * multiprocessors(query.device), pairs)))
    groups_per_part = triton.cdiv(groups, parts) if parts else 1
    parts = triton.cdiv(groups, groups_per_part)
    part_acc, part_m, part_l = new_parts(pairs, parts + 1, padded(rows), padded(head_dim), query.device)
    window, value_window = kv.keys.contiguous(), kv.values.contiguous()
    # Before the first token leaves the window there are no codes; the kernel then reads none, but wants pointers.
    keys, values = kv.key_store, kv.value_store
    kc, ks, vc, vs = (keys.codes, keys.scales, values.codes, values.scales) if kv.quantized else (window,) * 4
    out = query.new_empty(batch, 1, heads, head_dim)
    with launching(query):
        decode_kernel[(parts + 1, pairs)](
            q, kc, ks, vc, vs, window, value_window, part_acc, part_m, part_l,
            *kc.stride()[:3], *ks.stride()[:3], *vc.stride()[:3], *vs.stride()[:2],
            *window.stride()[:3], *value_window.stride()[:3],
            kv_heads, rows, kv.quantized, window.shape[2], groups_per_part, parts, scale * LOG2_E,
            HEAD_DIM=head_dim, BLOCK_D=padded(head_dim), GROUP=keys.group_size, ROWS=padded(rows), UPCAST=INTERPRETED,
        )  # fmt: skip
        join(part_acc, part_m, part_l, out, kv_heads, scale)
    return out.transpose(1, 2)
