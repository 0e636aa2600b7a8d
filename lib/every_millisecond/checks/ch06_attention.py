"""Checks of the exercises to notebook 06: the online softmax, the blocked loop, the row that sees nothing."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from every_millisecond.checks import expect
from every_millisecond.checks.call import call
from every_millisecond.checks.draw import Answers, Draw
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
    blocks = draw.until(lambda: _blocks(draw, rows, head_dim), _second_answers)
    state = _empty(rows, head_dim)
    for number, (scores, values) in enumerate(blocks):
        want = _seen(blocks[: number + 1])
        found = _three(call(learners, *state, scores, values), rows, head_dim, first=number == 0)
        for name, value, (right, mistakes) in zip(
            "mla", found, _update_answers(want, state, scores, values), strict=True
        ):
            expect.close(value, right, "acc" if name == "a" else name, mistakes=mistakes)
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


def _seen(blocks: list[tuple[Tensor, Tensor]]) -> State:
    return _state(torch.cat([scores for scores, _ in blocks], -1), torch.cat([values for _, values in blocks]))


def _second_answers(blocks: list[tuple[Tensor, Tensor]]) -> list[Answers]:
    """Of the second block: for the first, which has no past, some rules agree."""
    return _update_answers(_seen(blocks[:2]), _seen(blocks[:1]), *blocks[1])


def _update_answers(want: State, before: State, scores: Tensor, values: Tensor) -> list[Answers]:
    """For m, l and acc."""
    (m0, l0, acc0), (m, _l, acc) = before, want
    block_m = scores.amax(-1, keepdim=True)
    weights, shrink = (scores - m).exp(), (m0 - m).exp()
    return [
        (m, {
            "It is the maximum of this block alone; a row may have seen a larger score before.": block_m,
            "It is one maximum for all rows; every row keeps its own.": m.max().expand_as(m),
        }),
        (_l, {
            "The old sum was measured from the old maximum: multiply it by exp(m - m_new).": l0
            + weights.sum(-1, keepdim=True),
            "Is m_new subtracted from the scores before exp?": l0 + scores.exp().sum(-1, keepdim=True),
            "Is the old sum left out?": weights.sum(-1, keepdim=True),
            "The new weights must be measured from the new maximum, not from the old one or the block's.": l0 * shrink
            + (scores - block_m).exp().sum(-1, keepdim=True),
        }),
        (acc, {
            "The old acc was measured from the old maximum, as l was: multiply it by exp(m - m_new).": acc0
            + weights @ values,
            "Is the old acc left out?": weights @ values,
            "It is divided by l already. Keep the plain sum, and divide once at the end.": acc / _l,
        }),
    ]  # fmt: skip


def _attention(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, scale: float) -> Tensor:
    scores = (q.double() @ k.double().T * scale).masked_fill(~allowed, -torch.inf)
    return (scores.softmax(-1) @ v.double()).float()


@exercise(CHAPTER, "the blocked loop with a causal mask")
def check_blocked(learners: Callable, draw: Draw) -> None:
    """More keys than queries, a last block that is not full; what each product took of the keys, what was made."""
    for _ in range(2):
        head_dim, block = draw.odd(5, 9), draw.odd(5, 9)
        keys = block * draw.integer(4, 6) + draw.integer(1, block - 1)
        queries = keys - draw.integer(3, 12)
        q, k, v = draw.until(
            lambda: (draw.normal(queries, head_dim), draw.normal(keys, head_dim), draw.normal(keys, head_dim)),  # noqa: B023
            lambda drawn: [_attention_answers(*drawn, block)],  # noqa: B023
        )
        watch = _Watch(k, v)

        @functools.wraps(learners)
        def watched(*args, watch=watch):
            with watch:
                return learners(*args)

        found = call(watched, q, k, v, block)
        want, mistakes = _attention_answers(q, k, v, block)
        expect.close(found, want, "the result", mistakes=mistakes)
        expect.that(
            watch.largest < queries * keys,
            f"a tensor of {watch.largest} values was made: for {queries} queries and {keys} keys that is the whole "
            "matrix of scores (or of the mask). Make one block of it at a time",
        )
        expect.that(
            not watch.left_torch,
            f"the keys or values left torch ({watch.left_torch}): what is made of them elsewhere cannot be seen here. "
            "Write the loop over blocks with torch",
        )
        expect.that(
            watch.keys_at_once == block,
            f"a product took {watch.keys_at_once} of {keys} keys (or values) at once; expected blocks of {block}, one "
            "after the other, and the running softmax over them",
        )
    q = 100 * q  # scores of some hundreds, whose exp is infinite
    found = expect.tensor(call(learners, q, k, v, block), "the result", shape=q.shape, finite=False)
    expect.that(
        bool(found.isfinite().all()),
        "the result holds NaN or infinities for scores of some hundreds: is a row's maximum subtracted before exp?",
    )
    want, _ = _attention_answers(q, k, v, block)
    expect.close(found, want, "the result for scores of some hundreds", rel=1e-2, absolute=1e-2)


def _attention_answers(q: Tensor, k: Tensor, v: Tensor, block: int) -> Answers:
    (queries, head_dim), keys = q.shape, k.shape[0]
    i, j = torch.arange(queries)[:, None], torch.arange(keys)[None]
    offset, scale = keys - queries, 1 / math.sqrt(head_dim)
    causal = j <= i + offset
    scores = (q @ k.T * scale).masked_fill(~causal, -torch.inf)
    return _attention(q, k, v, causal, scale), {
        "Queries see later keys: is the causal mask missing?": _attention(q, k, v, causal | True, scale),
        "The mask is aligned top-left: the last query, not the first, belongs to the last key.": _attention(
            q, k, v, j <= i, scale
        ),
        "Off by one: a query does not see the key after its own.": _attention(q, k, v, j <= i + offset + 1, scale),
        "Off by one: a query also sees its own key.": _attention(q, k, v, j < i + offset, scale),
        "Is the factor 1 / sqrt(head_dim) missing?": _attention(q, k, v, causal, 1.0),
        "Is it 1 / head_dim instead of 1 / sqrt(head_dim)?": _attention(q, k, v, causal, 1 / head_dim),
        "The last block, which is not full, was left out.": _attention(
            q, k, v, causal & (j < keys // block * block), scale
        ),
        "Is the division by l missing at the end?": (scores - scores.amax(-1, keepdim=True)).exp() @ v,
    }


_OUT_OF_TORCH = ("numpy", "tolist", "__array__")
_PRODUCTS = (
    "scaled_dot_product_attention",
    "matmul",
    "mm",
    "bmm",
    "mv",
    "dot",
    "einsum",
    "tensordot",
    "linear",
    "mul",
    "multiply",
    "baddbmm",
    "addmm",
)


class _Watch(TorchFunctionMode):
    """While active, sees the largest tensor that is made and how many keys a product with another tensor takes at once.

    Keys and values alike; what is made of them alone (a slice, a copy, a scaled or transposed one) counts as they do.
    """

    def __init__(self, *keys: Tensor) -> None:
        super().__init__()
        self.largest = self.keys_at_once = 0
        self.left_torch = ""
        self._head_dim = keys[0].shape[1]
        self._keys = {x.untyped_storage().data_ptr(): x for x in keys}  # held, so that no address comes twice

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given = [x for x in _flat([*args, *(kwargs or {}).values()]) if isinstance(x, Tensor) and x.dim()]
        made = [x for x in _flat([result]) if isinstance(x, Tensor)]
        self.largest = max([self.largest, *(x.numel() for x in made)])
        mine = [x for x in given if x.untyped_storage().data_ptr() in self._keys]
        name = getattr(func, "__name__", "")
        if mine and name in _OUT_OF_TORCH:
            self.left_torch = name
        if mine and len(mine) == len(given):
            self._keys |= {x.untyped_storage().data_ptr(): x for x in made}
        elif mine and name.strip("_").removeprefix("r") in _PRODUCTS:
            self.keys_at_once = max(self.keys_at_once, *(x.numel() // self._head_dim for x in mine))
        return result


def _flat(values: list | tuple) -> Iterator[object]:
    for value in values:
        if isinstance(value, list | tuple):
            yield from _flat(value)
        else:
            yield value


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
    for anything, name in ((torch.nan, "NaN"), (torch.inf, "infinity")):
        for (scores, values), mask in zip(blocks, masks, strict=True):
            mask[:, -1] = False
            scores[:, -1], values[-1] = anything, anything
        _run_masked(update, finish, blocks, masks, name)


def _run_masked(
    update: Callable, finish: Callable, blocks: list[tuple[Tensor, Tensor]], masks: list[Tensor], hidden: str = ""
) -> None:
    """hidden: what stands in slots that nobody may see."""
    rows, head_dim = blocks[0][0].shape[0], blocks[0][1].shape[-1]
    state = _empty(rows, head_dim)
    for number, ((scores, values), allowed) in enumerate(zip(blocks, masks, strict=True)):
        found = expect.items(call(update, *state, scores, values, allowed), 3, "the result", "m, l, acc")
        for name, value in zip("m l acc".split(), found, strict=True):
            expect.tensor(value, name, finite=False)
            if value.isnan().any():
                raise CheckFailed(
                    f"{name} holds NaN. "
                    + (
                        f"A hidden slot held {hidden}, and 0 * {hidden} is NaN: hidden values must not enter the "
                        "product"
                        if hidden
                        else "A row that has seen nothing has m = -inf, and -inf - -inf is NaN"
                    )
                )
        scores_so_far, values_so_far = zip(*blocks[: number + 1], strict=True)
        want = _state(torch.cat(scores_so_far, -1), torch.cat(values_so_far), torch.cat(masks[: number + 1], -1))
        dead = want[1][:, 0] == 0
        expect.that(
            not found[1][dead].any(),
            "l is not 0 for a row that has seen nothing. Are hidden scores filled with a large negative number? "
            "In a row of nothing else they weigh exp(0) = 1. (Or is `allowed` turned round?)",
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
        lost = f"A hidden slot held {hidden}, and 0 * {hidden} is NaN: to turn that into 0 afterwards loses the row"
        expect.close(found[2], want[2], "acc", mistakes={lost: torch.zeros_like(want[2])})
        state = want
    out = expect.tensor(call(finish, state[1], state[2]), "the output", shape=(rows, head_dim), finite=False)
    expect.that(not out.isnan().any(), "the output holds NaN for the row that saw nothing: 0 / 0. It shall be zeros")
    missing = {"Is the division by l missing?": state[2]}
    expect.close(out, (state[2] / state[1]).nan_to_num(0), "the output", mistakes=missing)
