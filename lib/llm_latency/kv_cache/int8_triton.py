"""Decode attention over an INT8 cache in one Triton kernel: codes become numbers in registers, never in memory.

The sequence is split among programs, as in FlashDecoding (Dao et al. 2023), because one query gives too few programs to
fill a GPU; a second, small kernel joins the parts. Import this module only when the kernel is wanted: it loads Triton.
"""

from __future__ import annotations

import torch
from torch import Tensor

from llm_latency.attention.triton_runtime import INTERPRETED, launching, padded, tl, triton
from llm_latency.kv_cache.view import QuantizedKV

LOG2_E = 1.4426950408889634  # exp(x) = exp2(x * LOG2_E); a GPU has an instruction for exp2 only
PROGRAMS_PER_PROCESSOR = 4  # enough in flight to hide the waiting for memory


@triton.jit
def softmax_part(scores, inside, m, l, acc):
    """One step of the online softmax: new maximum, weights [rows, tokens], and l, acc brought to that maximum."""
    scores = tl.where(inside[None, :], scores, -float("inf"))
    m_new = tl.maximum(m, tl.max(scores, 1))
    shrink = tl.exp2(m - m_new)
    weights = tl.exp2(scores - m_new[:, None])
    return m_new, l * shrink + tl.sum(weights, 1), acc * shrink[:, None], weights


@triton.jit
def decode_kernel(
    Q, KeyCodes, KeyScales, ValueCodes, ValueScales, KeyWindow, ValueWindow, PartM, PartL, PartAcc,
    kc_batch, kc_head, kc_dim, ks_batch, ks_head, ks_dim, vc_batch, vc_head, vc_seq, vs_batch, vs_head,
    kw_batch, kw_head, kw_seq, vw_batch, vw_head, vw_seq,
    kv_heads, rows, quantized, window, groups_per_part, parts, scale_log2,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    # The interpreter has no BF16 arithmetic; it computes in FP32. "ieee": FP32 input stays FP32, not TF32.
    compute: tl.constexpr = tl.float32 if UPCAST else Q.dtype.element_ty
    part = tl.program_id(0)
    pair = tl.program_id(1).to(tl.int64)  # one batch row and KV head
    batch = pair // kv_heads
    head = pair % kv_heads
    r = tl.arange(0, ROWS)
    d = tl.arange(0, BLOCK_D)
    t = tl.arange(0, GROUP)
    # The query heads that share this KV head, padded to the 16 rows a matrix product wants.
    row_inside = (r[:, None] < rows) & (d[None, :] < HEAD_DIM)
    q = tl.load(Q + (pair * rows + r[:, None]) * HEAD_DIM + d[None, :], mask=row_inside, other=0.0)  # [ROWS, BLOCK_D]
    q32 = q.to(tl.float32) * scale_log2
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
            token = group * GROUP + t
            inside = token < quantized
            # A group's key scales belong to channels, so they go into the query: D products instead of D * GROUP.
            ks = tl.load(key_scales + d * ks_dim + group, mask=d < HEAD_DIM, other=0.0).to(tl.float32)
            kc = tl.load(
                key_codes + d[:, None] * kc_dim + token[None, :],
                mask=(d[:, None] < HEAD_DIM) & inside[None, :],
                other=0,
            )  # [BLOCK_D, GROUP]
            scores = tl.dot((q32 * ks[None, :]).to(compute), kc.to(compute), input_precision="ieee")
            m, l, acc, weights = softmax_part(scores, inside, m, l, acc)
            # The scales of values belong to tokens, so they go into the weights.
            vs = tl.load(value_scales + token, mask=inside, other=0.0).to(tl.float32)
            vc = tl.load(
                value_codes + token[:, None] * vc_seq + d[None, :],
                mask=inside[:, None] & (d[None, :] < HEAD_DIM),
                other=0,
            )  # [GROUP, BLOCK_D]
            acc += tl.dot((weights * vs[None, :]).to(compute), vc.to(compute), input_precision="ieee")
    else:
        key_window = KeyWindow + batch * kw_batch + head * kw_head
        value_window = ValueWindow + batch * vw_batch + head * vw_head
        for start in range(0, window, GROUP):
            token = start + t
            inside = token < window
            both = inside[:, None] & (d[None, :] < HEAD_DIM)
            k = tl.load(key_window + token[:, None] * kw_seq + d[None, :], mask=both, other=0.0)
            v = tl.load(value_window + token[:, None] * vw_seq + d[None, :], mask=both, other=0.0)
            scores = tl.dot(q.to(compute), tl.trans(k.to(compute)), input_precision="ieee") * scale_log2
            m, l, acc, weights = softmax_part(scores, inside, m, l, acc)
            acc += tl.dot(weights.to(compute), v.to(compute), input_precision="ieee")

    out = (pair * (parts + 1) + part) * ROWS + r
    tl.store(PartM + out, m)
    tl.store(PartL + out, l)
    tl.store(PartAcc + out[:, None] * BLOCK_D + d[None, :], acc)


@triton.jit
def join_kernel(
    PartM, PartL, PartAcc, Out, rows, parts,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    pair = tl.program_id(1).to(tl.int64)
    p = tl.arange(0, PARTS)
    d = tl.arange(0, BLOCK_D)
    place = (pair * parts + p) * ROWS + row
    m = tl.load(PartM + place, mask=p < parts, other=-float("inf"))
    l = tl.load(PartL + place, mask=p < parts, other=0.0)
    acc = tl.load(PartAcc + place[:, None] * BLOCK_D + d[None, :], mask=(p < parts)[:, None], other=0.0)
    share = tl.exp2(m - tl.max(m, 0))  # a part without tokens has m = -inf, and no share
    total = tl.sum(l * share, 0)
    out = tl.sum(acc * share[:, None], 0) / total
    tl.store(Out + (pair * rows + row) * HEAD_DIM + d, out.to(Out.dtype.element_ty), mask=d < HEAD_DIM)


def decode_int8(query: Tensor, kv: QuantizedKV, scale: float) -> Tensor:
    """One query [batch, heads, 1, head_dim] over a quantised cache; arguments are checked (see `attend_int8`)."""
    batch, heads, _, head_dim = query.shape
    kv_heads = kv.key_window.shape[1]
    rows, pairs = heads // kv_heads, batch * kv_heads
    query = query.contiguous()
    block_d, padded_rows = padded(head_dim), padded(rows)
    groups = triton.cdiv(kv.quantized, kv.keys.group_size)
    parts = min(groups, max(1, triton.cdiv(_programs(query), pairs)))
    groups_per_part = triton.cdiv(groups, parts) if parts else 1
    parts = triton.cdiv(groups, groups_per_part)

    def part(*shape: int) -> Tensor:
        return torch.empty(pairs, parts + 1, *shape, dtype=torch.float32, device=query.device)

    m, l, acc = part(padded_rows), part(padded_rows), part(padded_rows, block_d)
    out = torch.empty_like(query)
    window, value_window = kv.key_window.contiguous(), kv.value_window.contiguous()
    # Before the first token leaves the window there are no codes; the kernel then reads none, but wants pointers.
    kc, ks, vc, vs = (
        (kv.keys.codes, kv.keys.scales, kv.values.codes, kv.values.scales) if kv.quantized else (window,) * 4
    )
    with launching(query):
        decode_kernel[(parts + 1, pairs)](
            query, kc, ks, vc, vs, window, value_window, m, l, acc,
            *kc.stride()[:3], *ks.stride()[:3], *vc.stride()[:3], *vs.stride()[:2],
            *window.stride()[:3], *value_window.stride()[:3],
            kv_heads, rows, kv.quantized, window.shape[2], groups_per_part, parts, scale * LOG2_E,
            HEAD_DIM=head_dim, BLOCK_D=block_d, GROUP=kv.keys.group_size, ROWS=padded_rows, UPCAST=INTERPRETED,
        )  # fmt: skip
        join_kernel[(rows, pairs)](
            m, l, acc, out, rows, parts + 1,
            HEAD_DIM=head_dim, BLOCK_D=block_d, ROWS=padded_rows, PARTS=triton.next_power_of_2(parts + 1),
        )  # fmt: skip
    return out


def _programs(query: Tensor) -> int:
    if not query.is_cuda:
        return 6  # interpreted: enough for several parts, few enough to be quick
    return PROGRAMS_PER_PROCESSOR * torch.cuda.get_device_properties(query.device).multi_processor_count
