"""Checks of the exercises to notebook 06: the online softmax, the blocked loop, the row that sees nothing."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from every_millisecond.checks import expect
from every_millisecond.checks.call import call
from every_millisecond.checks.draw import Draw
from every_millisecond.checks.exercise import exercise
from every_millisecond.checks.failure import CheckFailed

CHAPTER = "06_flash_attention"
State = tuple[Tensor, Tensor, Tensor]


def _state(scores: Tensor, values: Tensor, allowed: Tensor | None = None) -> State:
    """m, l and acc after all these scores [rows, keys], in closed form. Rows without an allowed key: -inf, 0, 0."""
    allowed = torch.ones_like(scores, dtype=torch.bool) if allowed is None else allowed
    scores = scores.double().masked_fill(~allowed, -torch.inf)
    m = scores.amax(-1, keepdim=True)
    weights = (scores - m.masked_fill(m == -torch.inf, 0)).exp()
    values = values.double().masked_fill(~allowed.any(0)[:, None], 0)
    return m.float(), weights.sum(-1, keepdim=True).float(), (weights @ values).float()


def _empty(rows: int, head_dim: int) -> State:
    return torch.full((rows, 1), -torch.inf), torch.zeros(rows, 1), torch.zeros(rows, head_dim)


def _blocks(draw: Draw, rows: int, head_dim: int) -> list[tuple[Tensor, Tensor]]:
    """Three blocks of odd sizes; scores rise in every other row and fall in the others."""
    sizes = [draw.odd(3, 9) for _ in range(3)]
    trend = torch.tensor([4.0, -4.0]).repeat(rows)[:rows, None]
    return [(2 * draw.normal(rows, n) + trend * i, draw.normal(n, head_dim)) for i, n in enumerate(sizes)]


@exercise(CHAPTER, "the online softmax update")
def check_update(learners: Callable, draw: Draw) -> None:
    """Three blocks, each from the true state before it; then scores that overflow unless the maximum is subtracted."""
    rows, head_dim = draw.odd(5, 9), draw.odd(11, 17)
    blocks = _blocks(draw, rows, head_dim)
    state = _empty(rows, head_dim)
    for number in range(len(blocks)):
        scores, values = blocks[number]
        seen = torch.cat([s for s, _ in blocks[: number + 1]], -1), torch.cat([v for _, v in blocks[: number + 1]])
        want = _state(*seen)
        found = _three(call(learners, *state, scores, values), rows, head_dim, first=number == 0)
        _compare(found, want, state, scores, values)
        state = want
    large = 100 * draw.normal(rows, 5) + 900
    found = _three(call(learners, *_empty(rows, head_dim), large, blocks[0][1][:1].repeat(5, 1)), rows, head_dim, True)
    expect.close(found[1], _state(large, blocks[0][1][:1].repeat(5, 1))[1], "l for scores around 900")


def _three(result: object, rows: int, head_dim: int, first: bool) -> State:
    expect.items(result, 3, "the result", "m, l, acc")
    for name, value, width in zip("m l acc".split(), result, (1, 1, head_dim), strict=True):
        expect.tensor(value, name, shape=(rows, width), dtype=torch.float32, finite=False)
        if first and value.isnan().any():
            raise CheckFailed(
                f"{name} holds NaN after the first block, where m starts at -inf: what the past is worth is "
                "exp(m - m_new), which is 0 there; exp(m_new - m) is infinite"
            )
        if value.isinf().any():
            raise CheckFailed(f"{name} holds infinities: is the new maximum subtracted from the scores before exp?")
    return tuple(result)


def _compare(found: State, want: State, before: State, scores: Tensor, values: Tensor) -> None:
    (m0, l0, acc0), (m, _l, _acc) = before, want
    block_m = scores.amax(-1, keepdim=True)
    weights = (scores - m).exp()
    shrink = (m0 - m).exp()
    expect.close(
        found[0], m, "m",
        mistakes={
            "It is the maximum of this block alone; a row may have seen a larger score before.": block_m,
            "It is one maximum for all rows; every row keeps its own.": m.max().expand_as(m),
        },
    )  # fmt: skip
    expect.close(
        found[1], _l, "l",
        mistakes={
            "The old sum was measured from the old maximum: multiply it by exp(m - m_new).": l0
            + weights.sum(-1, keepdim=True),
            "Is m_new subtracted from the scores before exp?": l0 + scores.exp().sum(-1, keepdim=True),
            "Is the old sum left out?": weights.sum(-1, keepdim=True),
            "The new weights must be measured from the new maximum, not from the old one or the block's.": l0 * shrink
            + (scores - block_m).exp().sum(-1, keepdim=True),
        },
    )  # fmt: skip
    expect.close(
        found[2], _acc, "acc",
        mistakes={
            "The old acc was measured from the old maximum, as l was: multiply it by exp(m - m_new).": acc0
            + weights @ values,
            "Is the old acc left out?": weights @ values,
            "It is divided by l already. Keep the plain sum, and divide once at the end.": _acc / _l,
        },
    )  # fmt: skip


def _attention(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, scale: float) -> Tensor:
    scores = (q.double() @ k.double().T * scale).masked_fill(~allowed, -torch.inf)
    return (scores.softmax(-1) @ v.double()).float()


@exercise(CHAPTER, "the blocked loop with a causal mask")
def check_blocked(learners: Callable, draw: Draw) -> None:
    """More keys than queries, a last block that is not full, and a look at the largest tensor that was made."""
    for _ in range(2):
        head_dim, block = draw.odd(5, 9), draw.odd(5, 9)
        keys = block * draw.integer(4, 6) + draw.integer(1, block - 1)
        queries = keys - draw.integer(3, 12)
        q, k, v = draw.normal(queries, head_dim), draw.normal(keys, head_dim), draw.normal(keys, head_dim)
        largest = _LargestTensor()

        @functools.wraps(learners)
        def watched(*args, largest=largest):
            with largest:
                return learners(*args)

        found = call(watched, q, k, v, block)
        _compare_attention(found, q, k, v, block)
        expect.that(
            largest.size < queries * keys,
            f"a tensor of {largest.size} values was made: for {queries} queries and {keys} keys that is the whole "
            "matrix of scores (or of the mask). Make one block of it at a time",
        )
    q = 100 * q  # scores of some hundreds, whose exp is infinite
    found = expect.tensor(call(learners, q, k, v, block), "the result", shape=q.shape, finite=False)
    expect.that(
        bool(found.isfinite().all()),
        "the result holds NaN or infinities for scores of some hundreds: is a row's maximum subtracted before exp?",
    )
    causal = torch.arange(keys)[None] <= torch.arange(queries)[:, None] + keys - queries
    want = _attention(q, k, v, causal, 1 / math.sqrt(head_dim))
    expect.close(found, want, "the result for scores of some hundreds", rel=1e-2, absolute=1e-2)


def _compare_attention(found: object, q: Tensor, k: Tensor, v: Tensor, block: int) -> None:
    (queries, head_dim), keys = q.shape, k.shape[0]
    i, j = torch.arange(queries)[:, None], torch.arange(keys)[None]
    offset, scale = keys - queries, 1 / math.sqrt(head_dim)
    causal = j <= i + offset
    full = keys // block * block
    scores = (q @ k.T * scale).masked_fill(~causal, -torch.inf)
    expect.close(
        found, _attention(q, k, v, causal, scale), "the result",
        mistakes={
            "Queries see later keys: is the causal mask missing?": _attention(q, k, v, causal | True, scale),
            "The mask is aligned top-left: the last query, not the first, belongs to the last key.": _attention(
                q, k, v, j <= i, scale
            ),
            "Off by one: a query also sees its own key.": _attention(q, k, v, j < i + offset, scale),
            "Is the factor 1 / sqrt(head_dim) missing?": _attention(q, k, v, causal, 1.0),
            "Is it 1 / head_dim instead of 1 / sqrt(head_dim)?": _attention(q, k, v, causal, 1 / head_dim),
            "The last block, which is not full, was left out.": _attention(q, k, v, causal & (j < full), scale),
            "Is the division by l missing at the end?": (scores - scores.amax(-1, keepdim=True)).exp() @ v,
        },
    )  # fmt: skip


class _LargestTensor(TorchFunctionMode):
    """While active, `size` is the number of values of the largest tensor that an operation returned."""

    def __init__(self) -> None:
        super().__init__()
        self.size = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.size = max(self.size, result.numel())
        return result


@exercise(CHAPTER, "the row that sees nothing")
def check_masked_update(update: Callable, finish: Callable, draw: Draw) -> None:
    """A row hidden from the first block, one hidden from all; then NaN in slots that nobody may see."""
    rows, head_dim = draw.odd(5, 9), draw.odd(11, 17)
    blocks = _blocks(draw, rows, head_dim)
    masks = [draw.uniform(rows, scores.shape[-1]) < 0.6 for scores, _ in blocks]
    masks[0][1], masks[1][1, 0] = False, True  # row 1 sees nothing at first
    for mask in masks:
        mask[2] = False  # row 2 sees nothing at all
        mask[0, :2] = True
    for (scores, _), mask in zip(blocks, masks, strict=True):
        scores.masked_fill_(~mask, 50.0)  # a hidden score that would be the maximum
    _run_masked(update, finish, blocks, masks)
    for (scores, values), mask in zip(blocks, masks, strict=True):
        mask[:, -1] = False
        scores[:, -1], values[-1] = torch.nan, torch.nan
    _run_masked(update, finish, blocks, masks)


def _run_masked(update: Callable, finish: Callable, blocks: list[tuple[Tensor, Tensor]], masks: list[Tensor]) -> None:
    rows, head_dim = blocks[0][0].shape[0], blocks[0][1].shape[-1]
    state = _empty(rows, head_dim)
    nan_hidden = any(values.isnan().any() for _, values in blocks)
    for number, ((scores, values), allowed) in enumerate(zip(blocks, masks, strict=True)):
        found = expect.items(call(update, *state, scores, values, allowed), 3, "the result", "m, l, acc")
        for name, value in zip("m l acc".split(), found, strict=True):
            expect.tensor(value, name, finite=False)
            if value.isnan().any():
                raise CheckFailed(
                    f"{name} holds NaN. "
                    + (
                        "A hidden slot held NaN, and 0 * NaN is NaN: hidden values must not enter the product"
                        if nan_hidden
                        else "A row that has seen nothing has m = -inf, and -inf - -inf is NaN"
                    )
                )
        seen = [torch.cat(parts, dim) for parts, dim in zip(_columns(blocks, masks, number), (-1, 0, -1), strict=True)]
        want = _state(*seen)
        dead = want[1][:, 0] == 0
        expect.that(
            not found[1][dead].any(),
            "l is not 0 for a row that has seen nothing. Are hidden scores filled with a large negative number? "
            "In a row of nothing else they weigh exp(0) = 1",
        )
        hidden_too = torch.maximum(state[0], scores.amax(-1, keepdim=True))
        expect.close(
            found[0][~dead], want[0][~dead], "m",
            mistakes={"Hidden scores count in the maximum.": hidden_too[~dead]},
        )  # fmt: skip
        expect.that(
            bool((found[0][dead] == -torch.inf).all()), "m is not -inf any more for a row that has seen nothing"
        )
        expect.close(found[1], want[1], "l")
        expect.close(found[2], want[2], "acc")
        state = want
    out = expect.tensor(call(finish, state[1], state[2]), "the output", shape=(rows, head_dim), finite=False)
    expect.that(not out.isnan().any(), "the output holds NaN for the row that saw nothing: 0 / 0. It shall be zeros")
    expect.close(out, (state[2] / state[1]).nan_to_num(0), "the output")


def _columns(blocks: list[tuple[Tensor, Tensor]], masks: list[Tensor], number: int) -> tuple[list[Tensor], ...]:
    """Scores, values and masks of the blocks up to `number`."""
    upto = slice(number + 1)
    return [scores for scores, _ in blocks[upto]], [values for _, values in blocks[upto]], masks[upto]
