"""Where quantised keys and values lie: one store per tensor, growing at the end, cut at the end, read back whole.

Two shapes of scale:

`ChannelStore`, for keys: one scale per channel for each group of `group_size` tokens. Keys have a few channels that
tower over the rest in every token (KIVI, Liu et al. 2024, section 3; notebook 07 plots them). A scale per token would
be set by those few, and round all other channels coarsely; a scale per channel keeps them apart.

`TokenStore`, for values: one scale per token and head. Values have no such channels, and the output is a sum over
tokens, weighted by the attention: with a scale of its own, a large token cannot blur the others.

Neither store depends on how its tokens arrived: one by one or all in one call give the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Protocol

import torch
from torch import Tensor

from llm_latency.kv_cache.symmetric import SCALE_DTYPE, dequantize_into, quantize_finite

BLOCK_BYTES = 2**19  # of FP32 numbers dequantised at a time, so that they stay in a CPU core's cache
# Capacity grows by this many tokens: a copy of the codes once in 64 tokens, and little held in reserve.
GROW_TOKENS = 64


class Store(Protocol):
    """One tensor [batch, kv_heads, length, head_dim] in fewer bits."""

    length: int

    def append(self, x: Tensor) -> None:
        """Add tokens x [batch, kv_heads, n, head_dim], finite."""

    def drop(self, tokens: int) -> None:
        """Remove the newest tokens, 0 to length."""

    def read_into(self, out: Tensor) -> None:
        """Write everything stored, dequantised, to out [batch, kv_heads, length, head_dim]."""

    def for_each_row(self, change: Callable[[Tensor], Tensor]) -> None:
        """Apply a function of the batch dimension (select, repeat, reorder) to all tensors."""

    @property
    def nbytes(self) -> int:
        """Bytes held: codes, scales, and whatever else."""


def block_ranges(tokens: int, numbers_per_token: int, granule: int) -> Iterator[tuple[int, int]]:
    """Cut 0..tokens into equal (start, end) of about BLOCK_BYTES as FP32 numbers; a start is a multiple of granule."""
    parts = max(1, round(4 * numbers_per_token * tokens / BLOCK_BYTES))
    step = granule * max(1, math.ceil(tokens / (parts * granule)))
    for start in range(0, tokens, step):
        yield start, min(start + step, tokens)


def _numbers_per_token(x: Tensor) -> int:
    batch, heads, _, head_dim = x.shape
    return batch * heads * head_dim


def _grown(x: Tensor | None, shape: tuple[int, ...], dim: int, used: int, like: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor of `shape` that begins with the `used` first entries of x along `dim`."""
    larger = torch.empty(shape, dtype=dtype, device=like.device)
    if x is not None and used:
        larger.narrow(dim, 0, used).copy_(x.narrow(dim, 0, used))
    return larger


class TokenStore:
    """One scale per token and head.

    codes: int8 [batch, kv_heads, capacity, head_dim]; scales: BF16 [batch, kv_heads, capacity, 1].
    """

    def __init__(self, *, bits: int = 8):
        self.bits = bits
        self.length = 0
        self.codes: Tensor | None = None
        self.scales: Tensor | None = None

    def append(self, x: Tensor) -> None:
        count = x.shape[-2]
        if count == 0:
            return
        codes, scales = quantize_finite(x, dim=-1, bits=self.bits)
        end = self.length + count
        if self.codes is None or end > self.codes.shape[-2]:
            batch, heads, _, head_dim = x.shape
            capacity = GROW_TOKENS * math.ceil(end / GROW_TOKENS)
            self.codes = _grown(self.codes, (batch, heads, capacity, head_dim), -2, self.length, x, torch.int8)
            self.scales = _grown(self.scales, (batch, heads, capacity, 1), -2, self.length, x, SCALE_DTYPE)
        self.codes[:, :, self.length : end] = codes
        self.scales[:, :, self.length : end] = scales
        self.length = end

    def drop(self, tokens: int) -> None:
        self.length -= tokens

    def read_into(self, out: Tensor) -> None:
        for start, end in block_ranges(self.length, _numbers_per_token(out), GROW_TOKENS):
            dequantize_into(out[:, :, start:end], self.codes[:, :, start:end], self.scales[:, :, start:end])

    def for_each_row(self, change: Callable[[Tensor], Tensor]) -> None:
        if self.codes is not None:
            self.codes, self.scales = change(self.codes), change(self.scales)

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (self.codes, self.scales) if t is not None)


class ChannelStore:
    """One scale per channel, head and group of `group_size` tokens.

    codes: int8 [batch, kv_heads, head_dim, capacity]: a channel's tokens lie side by side, because they share scales,
    and because query times keys is then a plain matrix product whose rows are long.
    scales: BF16 [batch, kv_heads, head_dim, capacity / group_size].
    open_group: the exact tokens of the last, unfinished group, [batch, kv_heads, fewer than group_size, head_dim]. They
    are read as codes like all others; the exact ones are kept so that a larger token that joins the group can set a new
    scale without rounding the others a second time. A finished group's exact tokens are dropped.
    """

    def __init__(self, *, group_size: int = 64, bits: int = 8):
        self.group_size = group_size
        self.bits = bits
        self.length = 0
        self.codes: Tensor | None = None
        self.scales: Tensor | None = None
        self.open_group: Tensor | None = None

    def append(self, x: Tensor) -> None:
        if x.shape[-2] == 0:
            return
        given = x
        if self.open_group is not None and self.open_group.shape[-2]:
            x = torch.cat([self.open_group, x], dim=-2)
        start = self.length - (self.length % self.group_size)
        self._reserve(start + x.shape[-2], x)
        finished = x.shape[-2] - x.shape[-2] % self.group_size
        if finished:
            groups = x[:, :, :finished].unflatten(-2, (-1, self.group_size))  # [batch, heads, groups, group, head_dim]
            self._write(start, *quantize_finite(groups, dim=-2, bits=self.bits))
        # A copy, not a view: a view would keep the whole of a long prompt alive, or change with the caller's tensor.
        self.open_group = x[:, :, finished:].clone() if finished or x is given else x
        self.length = start + finished
        self._write_open_group()

    def drop(self, tokens: int) -> None:
        start = self.length - (self.length % self.group_size)
        self.length -= tokens
        if self.length >= start:
            # Still in the open group: as if the dropped tokens had never been there, scales included.
            self.open_group = self.open_group[:, :, : self.length - start].clone()
            self.length = start
            self._write_open_group()
        else:
            # Reopens a finished group. Its exact tokens are gone; what was read from it so far takes their place.
            first = self.length - self.length % self.group_size
            batch, heads, _, head_dim = self.open_group.shape
            self.open_group = self.open_group.new_empty(batch, heads, self.length - first, head_dim)
            self._read_into(self.open_group, first)

    def read_into(self, out: Tensor) -> None:
        for start, end in block_ranges(self.length, _numbers_per_token(out), self.group_size):
            self._read_into(out[:, :, start:end], start)

    def for_each_row(self, change: Callable[[Tensor], Tensor]) -> None:
        if self.codes is not None:
            self.codes, self.scales, self.open_group = map(change, (self.codes, self.scales, self.open_group))

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (self.codes, self.scales, self.open_group) if t is not None)

    def _reserve(self, tokens: int, x: Tensor) -> None:
        if self.codes is not None and tokens <= self.codes.shape[-1]:
            return
        batch, heads, _, head_dim = x.shape
        step = self.group_size * math.ceil(GROW_TOKENS / self.group_size)
        capacity = step * math.ceil(tokens / step)
        used = self.group_size * math.ceil(self.length / self.group_size)
        groups = capacity // self.group_size
        self.codes = _grown(self.codes, (batch, heads, head_dim, capacity), -1, used, x, torch.int8)
        shape = (batch, heads, head_dim, groups)
        self.scales = _grown(self.scales, shape, -1, used // self.group_size, x, SCALE_DTYPE)

    def _write_open_group(self) -> None:
        count = self.open_group.shape[-2]
        if count:
            codes, scales = quantize_finite(self.open_group.unsqueeze(2), dim=-2, bits=self.bits)
            self._write(self.length, codes, scales)
            self.length += count

    def _write(self, start: int, codes: Tensor, scales: Tensor) -> None:
        # codes [batch, heads, groups, tokens, head_dim] and scales [batch, heads, groups, 1, head_dim], from `start` on
        group = start // self.group_size
        flat = codes.flatten(2, 3)
        self.codes[..., start : start + flat.shape[2]] = flat.transpose(2, 3)
        self.scales[..., group : group + scales.shape[2]] = scales.squeeze(3).transpose(2, 3)

    def _read_into(self, out: Tensor, start: int) -> None:
        # out [batch, heads, tokens, head_dim]; start is the first token of a group, the end may lie within one
        size, tokens = self.group_size, out.shape[2]
        # Turned while they are single bytes: [batch, heads, tokens, head_dim]
        codes = self.codes[..., start : start + tokens].transpose(2, 3).contiguous()
        scales = self.scales[..., start // size :].transpose(2, 3).unsqueeze(3)  # [batch, heads, groups, 1, head_dim]
        whole = tokens // size
        if whole:
            full = slice(0, whole * size)
            groups = (whole, size)
            dequantize_into(
                out[:, :, full].unflatten(2, groups), codes[:, :, full].unflatten(2, groups), scales[:, :, :whole]
            )
        if tokens % size:
            rest = slice(whole * size, tokens)
            dequantize_into(out[:, :, rest], codes[:, :, rest], scales[:, :, whole])
