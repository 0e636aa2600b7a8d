"""Checks of the exercises to notebook 05: sums and norms in 16 bits, graphs counted, lengths to pad to."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from every_millisecond.checks import expect
from every_millisecond.checks.call import call
from every_millisecond.checks.draw import Draw
from every_millisecond.checks.exercise import exercise
from every_millisecond.checks.failure import CheckFailed

CHAPTER = "05_precision_and_compilation"


@exercise(CHAPTER, "the mean that stands still")
def check_mean_loss(learners: Callable, draw: Draw) -> None:
    """Some thousand losses in chunks whose lengths and means differ; drawn so that every mistake shows."""
    for _ in range(100):
        sizes = [draw.odd(31, 99) * (1 + 3 * (i % 2)) for i in range(draw.odd(15, 21))]
        chunks = [
            (1 + i % 2 + 2 * draw.uniform(size)).bfloat16() for i, size in enumerate(sizes)
        ]  # long chunks hold larger losses
        count = sum(sizes)
        want = torch.cat(chunks).double().mean().item()
        mistakes = _mean_mistakes(chunks, count, want)
        if all(abs(wrong / want - 1) > 2e-4 for wrong in mistakes.values()):
            break
    found = expect.number(call(learners, chunks), "the mean loss")
    near_miss = 2e-5 < abs(found / want - 1) < 0.02
    try:
        expect.near(found, want, "the mean loss", rel=2e-5, mistakes=mistakes)
    except CheckFailed as failure:
        hint = " Right to two or three digits: something was added or rounded in BF16 on the way."
        raise CheckFailed(f"{failure}{hint if near_miss and '. ' not in str(failure) else ''}") from None


def _mean_mistakes(chunks: list[Tensor], count: int, want: float) -> dict[str, float]:
    one_by_one = in_chunks = torch.zeros((), dtype=torch.bfloat16)
    for chunk in chunks:
        in_chunks = in_chunks + chunk.sum()
        for value in chunk:
            one_by_one = one_by_one + value
    return {
        "The sum was kept in BF16, one value after the other, and stood still: 256 + 1 is 256 there.": one_by_one.item()
        / count,
        "The sum of the chunks was kept in BF16.": in_chunks.item() / count,
        "The sum of the chunks was kept in BF16, and the mean rounded to it.": (in_chunks / count).item(),
        "Each chunk's sum was rounded to BF16 before it was added.": sum(c.sum().item() for c in chunks) / count,
        "The whole sum was rounded to BF16.": torch.cat(chunks).sum().item() / count,
        "The result was rounded to BF16, which keeps two or three digits.": torch.tensor(want).bfloat16().item(),
        "That is a mean of means: tokens of short chunks count more than others.": sum(
            c.double().mean().item() for c in chunks
        )
        / len(chunks),
        "That is a mean of means, each rounded to BF16.": sum(c.mean().item() for c in chunks) / len(chunks),
        "That is the mean of the chunks' sums: divide by the number of tokens.": want * count / len(chunks),
    }


@exercise(CHAPTER, "sixteen bits outside, thirty-two inside")
def check_rms_norm(learners: Callable, draw: Draw) -> None:
    """The formula in FP32, with small values and a row of zeros; then large values in FP16; then BF16, row by row."""
    rows, hidden, eps = draw.odd(9, 13), draw.odd(1001, 1101), 1e-4
    x = draw.normal(rows, hidden) * torch.tensor([0.01, 1.0, 30.0]).repeat(rows)[:rows, None] + 0.005
    weight = 1 + 0.2 * draw.normal(hidden)
    x[2] = 0
    _check_formula(call(learners, x, weight, eps), x, weight, eps)
    for dtype, size in ((torch.float16, 300.0), (torch.bfloat16, 1.0)):
        sizes = size * (0.5 + draw.uniform(rows, 1))
        x16, weight16 = (sizes * draw.normal(rows, hidden)).to(dtype), weight.to(dtype)
        _check_sixteen(call(learners, x16, weight16, eps), x16, weight16, eps)


def _rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def _check_formula(found: object, x: Tensor, weight: Tensor, eps: float) -> None:
    expect.tensor(found, "the result", shape=x.shape, dtype=torch.float32, finite=False)
    expect.that(not found[2].isnan().any(), "a row of zeros becomes NaN, 0 / 0: eps belongs under the root")
    squares, w = x.double().square(), weight.double()
    spread = x - x.mean(-1, keepdim=True)
    wrong = {
        "eps belongs under the root, not behind it.": x / (squares.mean(-1, keepdim=True).sqrt() + eps) * w,
        "Is eps left out?": (x / squares.mean(-1, keepdim=True).sqrt() * w).nan_to_num(),
        "Is eps another one than you were given?": _rms(x, weight, 1e-6),
        "Is the weight left out?": _rms(x, torch.ones_like(weight), eps),
        "The mean of the squares, not their sum.": x / (squares.sum(-1, keepdim=True) + eps).sqrt() * w,
        "The mean is over the last dimension, of every row alone.": x / (squares.mean() + eps).sqrt() * w,
        "Is the root left out?": x / (squares.mean(-1, keepdim=True) + eps) * w,
        "An RMS norm does not subtract the mean.": spread
        / (spread.double().square().mean(-1, keepdim=True) + eps).sqrt()
        * w,
    }
    expect.close(found, _rms(x, weight, eps).float(), "the result in FP32", rel=1e-4, absolute=1e-6, mistakes=wrong)


def _check_sixteen(found: object, x: Tensor, weight: Tensor, eps: float) -> None:
    """Right to two roundings everywhere, and no row too large or too small as a whole.

    Roundings of single values cancel over a row of a thousand; that of the row's scale does not.
    """
    name = {torch.float16: "FP16", torch.bfloat16: "BF16"}[x.dtype]
    expect.tensor(found, f"the result for {name}", shape=x.shape, finite=False)
    expect.that(found.dtype == x.dtype, f"the result for {name} has dtype {found.dtype}: the input's was asked for")
    expect.that(
        bool(found.isfinite().all()) and bool((found != 0).any(-1).all()),
        f"rows of {name} with values up to {x.abs().max().item():.0f} become zeros or NaN: the square overflows, "
        f"{name} ends at 65,504. Widen before you square",
    )
    want = _rms(x, weight, eps)
    roundoff = torch.finfo(x.dtype).eps / 2
    bias = (found.double() * want).sum(-1) / want.square().sum(-1) - 1  # [rows]
    row = int(bias.abs().argmax())
    expect.that(
        bias.abs().max().item() < 0.16 * roundoff or bias.abs().max().item() > 4 * roundoff,
        f"row {row} of {name} is {abs(100 * bias[row].item()):.2f}% too {'large' if bias[row] > 0 else 'small'} as a "
        f"whole: its scale itself was rounded to {name}. Square, mean and root belong into FP32",
    )
    expect.close(found, want.to(x.dtype), f"the result for {name}", rel=3.5 * roundoff, absolute=roundoff / 64)


@exercise(CHAPTER, "how often does it compile?")
def check_count_graphs(learners: Callable, draw: Draw) -> None:
    """New lengths with each setting of `dynamic`, one of them twice; a new dtype and a function of two graphs."""
    a, b, c = draw.random.sample(range(5, 40, 2), 3)
    lengths = [torch.zeros(n, 3) for n in (a, b, a, c)]
    dtypes = [torch.zeros(a, 3), torch.zeros(a, 3, dtype=torch.float64)]
    try:
        for number, (fn, inputs, dynamic) in enumerate(
            [(_whole, lengths, None), (_whole, lengths, False), (_whole, lengths, True), (_in_two, dtypes, False)]
        ):
            want = _graphs(fn, inputs, dynamic)
            torch._dynamo.reset()
            _compare_counts(call(learners, fn, inputs, dynamic, limit_s=60), want, inputs, dynamic)
            if number == 0:  # and once more, now that something is compiled
                _compare_counts(call(learners, fn, inputs, dynamic, limit_s=60), want, inputs, dynamic, again=True)
    finally:
        torch._dynamo.reset()


def _whole(x: Tensor) -> Tensor:
    return x * 2 + 1


def _in_two(x: Tensor) -> Tensor:
    x = x * 2
    torch._dynamo.graph_break()
    return x + 1


def _graphs(fn: Callable, inputs: list[Tensor], dynamic: bool | None) -> list[int]:
    torch._dynamo.reset()
    made: list[object] = []

    def backend(graph: torch.fx.GraphModule, example_inputs: list) -> Callable:
        made.append(graph)
        return graph.forward

    compiled = torch.compile(fn, backend=backend, dynamic=dynamic)
    counts = []
    for x in inputs:
        compiled(x)
        counts.append(len(made))
    return counts


def _compare_counts(
    found: object, want: list[int], inputs: list[Tensor], dynamic: bool | None, again: bool = False
) -> None:
    expect.kind(found, (list, tuple), "the result")
    found = [expect.whole(count, "a count") for count in found]
    shapes = [f"{list(x.shape)} {str(x.dtype).removeprefix('torch.')}" for x in inputs]
    said = f"inputs {', '.join(shapes)} with dynamic={dynamic}: the counts are {found}; expected {want}. "
    expect.that(len(found) == len(want), said + "One count for each input was asked for, the graphs so far")
    if found == want:
        return
    if again:
        raise CheckFailed(
            said + "The function was compiled before, and something of that was left: reset at the start of every count"
        )
    new = [count - before for before, count in itertools.pairwise([0, *want])]
    seen = [len({tuple(x.shape) for x in inputs[: i + 1]}) for i in range(len(inputs))]
    reasons = {
        "Those are the new graphs of each input; those so far were asked for": new,
        "One for every call: are calls counted, or is it compiled anew for each input?": list(range(1, len(want) + 1)),
        "Those are different shapes. Count the graphs: ask the backend": seen,
        "Is `dynamic` handed on to torch.compile?": _graphs(_whole, inputs, None),
    }
    raise CheckFailed(said + next((reason for reason, counts in reasons.items() if counts == found), ""))


@exercise(CHAPTER, "lengths to pad to")
def check_choose_buckets(learners: Callable, draw: Draw) -> None:
    """A day where all tidy choices pad more than the best; one graph; more graphs than lengths."""
    for _ in range(200):
        graphs = draw.integer(3, 4)
        lengths = _day(draw)
        tidy = _tidy(lengths, graphs)
        best = _padding(lengths, _best(lengths, graphs))
        apart = len({frozenset(buckets) for buckets in tidy.values()}) == len(
            tidy
        )  # or a message names another mistake
        if apart and all(_padding(lengths, buckets) > best for buckets in tidy.values()):
            break
    _judge_buckets(call(learners, lengths, graphs), lengths, graphs, tidy)
    _judge_buckets(call(learners, lengths, 1), lengths, 1, {})
    few = draw.random.sample(range(20, 90), 3)
    _judge_buckets(call(learners, few, 4), few, 4, {})


def _day(draw: Draw) -> list[int]:
    """Prompt lengths of a day, shuffled: ten different ones, some of which come often."""
    lengths = []
    for n in draw.random.sample(range(20, 900), 10):
        lengths += [n] * draw.random.choice((1, 2, 3, 7, 15))
    draw.random.shuffle(lengths)
    return lengths


def _padding(lengths: Sequence[int], buckets: Sequence[int]) -> int:
    return sum(min(b for b in buckets if b >= n) - n for n in lengths)


def _best(lengths: Sequence[int], graphs: int) -> tuple[int, ...]:
    *others, longest = sorted(set(lengths))
    choices = itertools.combinations(others, min(graphs - 1, len(others)))
    return min(((*choice, longest) for choice in choices), key=lambda buckets: _padding(lengths, buckets))


def _tidy(lengths: list[int], graphs: int) -> dict[str, list[int]]:
    """What people choose: by name of the mistake."""
    ordered, different = sorted(lengths), sorted(set(lengths))
    longest = ordered[-1]
    often = sorted(different, key=lengths.count, reverse=True)
    return {
        "Are the buckets evenly spaced? Prompts are not.": [-(-longest * i // graphs) for i in range(1, graphs + 1)],
        "As many prompts in each bucket is not as little padding.": [
            ordered[-(-len(ordered) * i // graphs) - 1] for i in range(1, graphs + 1)
        ],
        "How often does each length come? Here each counts once.": list(_best(different, graphs)),
        "The most frequent lengths alone do not decide: what falls between them is padded, too.": [
            *[n for n in often if n != longest][: graphs - 1],
            longest,
        ],
        "Those are the longest lengths: the many short prompts are padded most.": different[-graphs:],
        "Is only one bucket used?": [longest],
    }


def _judge_buckets(result: object, lengths: list[int], graphs: int, tidy: dict[str, list[int]]) -> None:
    expect.kind(result, (list, tuple, set), "the result")
    buckets = sorted({expect.whole(bucket, "a bucket") for bucket in result})
    given = f"{len(set(lengths))} different lengths, {graphs} graphs: "
    expect.that(len(buckets) <= graphs, f"{given}{len(buckets)} buckets are more graphs than that")
    longest = max(lengths)
    expect.that(bool(buckets), f"{given}there is no bucket")
    expect.that(buckets[-1] >= longest, f"{given}a prompt of {longest} tokens fits into no bucket of {buckets}")
    found, best = _padding(lengths, buckets), _padding(lengths, _best(lengths, graphs))
    if found == best:
        return
    said = f"{given}buckets {buckets} pad {found} tokens; {best} are enough. "
    why = "Does every bucket end at a length that occurs, and were all choices tried?"
    raise CheckFailed(said + next((w for w, bs in tidy.items() if sorted(set(bs)) == buckets), why))
