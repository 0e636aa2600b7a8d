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

import torch
from torch import Tensor

from llm_latency.quantization.rounding import SCALE_DTYPE, dequantize_into, largest_code, round_symmetric

BLOCK_BYTES = 2**19  # of FP32 numbers dequantised at a time, so that they stay in a CPU core's cache
# Capacity grows by this many tokens: a copy of the codes once in 64 tokens, and little held in reserve.
GROW_TOKENS = 64


def ceil_to(value: int, multiple: int) -> int:
    """The smallest multiple that is not below value."""
    return -(-value // multiple) * multiple


def block_ranges(tokens: int, numbers_per_token: int, granule: int) -> Iterator[tuple[int, int]]:
    """Cut 0..tokens into equal (start, end) of about BLOCK_BYTES as FP32 numbers; a start is a multiple of granule."""
    parts = max(1, round(4 * numbers_per_token * tokens / BLOCK_BYTES))
    step = granule * max(1, math.ceil(tokens / (parts * granule)))
    for start in range(0, tokens, step):
        yield start, min(start + step, tokens)


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
        self.top = largest_code(bits)
        self.length = 0
        self.codes: Tensor | None = None
        self.scales: Tensor | None = None

    def append(self, x: Tensor) -> None:
        """Add tokens x [batch, kv_heads, n, head_dim]."""
        if x.shape[-2] == 0:
            return
        batch, heads, count, head_dim = x.shape
        codes, scales = round_symmetric(x, dim=-1, top=self.top)
        end = self.length + count
        if self.codes is None or end > self.codes.shape[-2]:
            capacity = ceil_to(end, GROW_TOKENS)
            self.codes = _grown(self.codes, (batch, heads, capacity, head_dim), -2, self.length, x, torch.int8)
            self.scales = _grown(self.scales, (batch, heads, capacity, 1), -2, self.length, x, SCALE_DTYPE)
        self.codes[:, :, self.length : end] = codes
        self.scales[:, :, self.length : end] = scales
        self.length = end

    def drop(self, tokens: int) -> None:
        """Remove the newest tokens, 0 to length."""
        self.length -= tokens

    def read_into(self, out: Tensor) -> None:
        """Write the first tokens, dequantised, to out [batch, kv_heads, up to length, head_dim]."""
        batch, heads, tokens, head_dim = out.shape
        for start, end in block_ranges(tokens, batch * heads * head_dim, GROW_TOKENS):
            dequantize_into(out[:, :, start:end], self.codes[:, :, start:end], self.scales[:, :, start:end])

    def for_each_row(self, change: Callable[[Tensor], Tensor]) -> None:
        """Apply a function of the batch dimension (select, repeat, reorder) to all tensors."""
        if self.codes is not None:
            self.codes, self.scales = change(self.codes), change(self.scales)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(t.nbytes for t in (self.codes, self.scales) if t is not None)


class ChannelStore:
    """One scale per channel, head and group of `group_size` tokens. Methods as those of `TokenStore`.

    codes: int8 [batch, kv_heads, head_dim, capacity]: a channel's tokens lie side by side, because they share scales,
    and because query times keys is then a plain matrix product whose rows are long.
    scales: BF16 [batch, kv_heads, head_dim, capacity / group_size].
    open_group: the exact tokens of the last, unfinished group, [batch, kv_heads, fewer than group_size, head_dim]. They
    are read as codes like all others; the exact ones are kept so that a larger token that joins the group can set a new
    scale without rounding the others a second time. A finished group's exact tokens are dropped.
    """

    def __init__(self, *, group_size: int = 64, bits: int = 8):
        self.group_size = group_size
        self.top = largest_code(bits)
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
        start = self.length - self.length % self.group_size
        self._reserve(start + x.shape[-2], x)
        finished = x.shape[-2] - x.shape[-2] % self.group_size
        self._write(start, x[:, :, :finished].unflatten(-2, (finished // self.group_size, self.group_size)))
        self._write(start + finished, x[:, :, finished:].unsqueeze(2))
        # A copy, not a view: a view would keep the whole of a long prompt alive, or change with the caller's tensor.
        self.open_group = x[:, :, finished:].clone() if finished or x is given else x
        self.length = start + x.shape[-2]

    def drop(self, tokens: int) -> None:
        start = self.length - self.length % self.group_size
        self.length -= tokens
        if self.length >= start:
            # Still in the open group: as if the dropped tokens had never been there, scales included.
            self.open_group = self.open_group[:, :, : self.length - start].clone()
            self._write(start, self.open_group.unsqueeze(2))
        else:
            # Reopens a finished group. Its exact tokens are gone; what was read from it so far takes their place.
            start = self.length - self.length % self.group_size
            batch, heads, _, head_dim = self.open_group.shape
            self.open_group = self.open_group.new_empty(batch, heads, self.length - start, head_dim)
            self.read_into(self.open_group, start)

    def read_into(self, out: Tensor, first: int = 0) -> None:
        """Write tokens from `first` on, which begins a group, to out [batch, kv_heads, up to the length, head_dim]."""
        size = self.group_size
        batch, heads, tokens, head_dim = out.shape
        for start, end in block_ranges(tokens, batch * heads * head_dim, size):
            block, group = out[:, :, start:end], (first + start) // size
            # Turned while they are single bytes: [batch, heads, tokens, head_dim]
            codes = self.codes[..., first + start : first + end].transpose(2, 3).contiguous()
            scales = self.scales[..., group:].transpose(2, 3).unsqueeze(3)  # [batch, heads, groups, 1, head_dim]
            whole = (end - start) // size
            split = whole * size  # what is left behind it is the open group
            if whole:
                parts = (whole, size)
                dequantize_into(
                    block[:, :, :split].unflatten(2, parts),
                    codes[:, :, :split].unflatten(2, parts),
                    scales[:, :, :whole],
                )
            if split < end - start:
                dequantize_into(block[:, :, split:], codes[:, :, split:], scales[:, :, whole])

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
        capacity = ceil_to(tokens, ceil_to(GROW_TOKENS, self.group_size))
        used = ceil_to(self.length, self.group_size)
        self.codes = _grown(self.codes, (batch, heads, head_dim, capacity), -1, used, x, torch.int8)
        shape = (batch, heads, head_dim, capacity // self.group_size)
        self.scales = _grown(self.scales, shape, -1, used // self.group_size, x, SCALE_DTYPE)

    def _write(self, start: int, groups: Tensor) -> None:
        """Round groups [batch, heads, groups, tokens, head_dim] and put them where token `start` begins one."""
        if groups.numel() == 0:
            return
        codes, scales = round_symmetric(groups, dim=-2, top=self.top)
        codes, group = codes.flatten(2, 3), start // self.group_size
        self.codes[..., start : start + codes.shape[2]] = codes.transpose(2, 3)
        self.scales[..., group : group + scales.shape[2]] = scales.squeeze(3).transpose(2, 3)
