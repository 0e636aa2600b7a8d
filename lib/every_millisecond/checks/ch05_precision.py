"""Checks of the exercises to notebook 05: sums and norms in 16 bits, graphs counted, lengths to pad to."""

from __future__ import annotations

import bisect
import collections
import itertools
import operator
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from every_millisecond.checks import expect
from every_millisecond.checks.call import call
from every_millisecond.checks.draw import Answers, Draw
from every_millisecond.checks.exercise import exercise
from every_millisecond.checks.failure import CheckFailed

CHAPTER = "05_precision_and_compilation"
BIASED = 0.16  # of a rounding: a row's scale is off by more only if it was rounded itself


@exercise(CHAPTER, "the mean that stands still")
def check_mean_loss(learners: Callable, draw: Draw) -> None:
    """Some thousand losses in chunks whose lengths and means differ; drawn so that every mistake shows."""
    chunks = draw.until(lambda: _losses(draw), lambda drawn: [_mean_answers(drawn)], rel=1e-4)
    want, mistakes = _mean_answers(chunks)
    found = expect.number(call(learners, chunks), "the mean loss")
    if 2e-5 < abs(found / want - 1) < 0.02:
        mistakes["Right to two or three digits: something was rounded, or added up in BF16, on the way."] = found
    expect.near(found, want, "the mean loss", rel=2e-5, mistakes=mistakes)


def _losses(draw: Draw) -> list[Tensor]:
    sizes = [draw.odd(31, 99) * (1 + 3 * (i % 2)) for i in range(draw.odd(15, 21))]
    return [(1 + i % 2 + 2 * draw.uniform(size)).bfloat16() for i, size in enumerate(sizes)]  # long ones are worse


def _mean_answers(chunks: list[Tensor]) -> Answers:
    count, want = sum(map(len, chunks)), torch.cat(chunks).double().mean().item()
    one_by_one = in_chunks = torch.zeros((), dtype=torch.bfloat16)
    for chunk in chunks:
        in_chunks = in_chunks + chunk.sum()
        for value in chunk:
            one_by_one = one_by_one + value
    return want, {
        "The sum was kept in BF16, one value after the other, and stood still: 256 + 1 is 256 there.": one_by_one.item()
        / count,
        "The sum of the chunks was kept in BF16.": in_chunks.item() / count,
        "Each chunk's sum was rounded to BF16 before it was added.": sum(c.sum().item() for c in chunks) / count,
        "The whole sum was rounded to BF16.": torch.cat(chunks).sum().item() / count,
        "The result was rounded to BF16, which keeps two or three digits.": torch.tensor(want).bfloat16().item(),
        "That is the sum; the mean was asked for.": want * count,
        "It is rounded; five digits were asked for.": round(want, 2),
        "That is a mean of means: tokens of short chunks count more than others.": sum(
            c.double().mean().item() for c in chunks
        )
        / len(chunks),
        "That is the mean of the chunks' sums: divide by the number of tokens.": want * count / len(chunks),
    }


@exercise(CHAPTER, "sixteen bits outside, thirty-two inside")
def check_rms_norm(learners: Callable, draw: Draw) -> None:
    """The formula in FP32, with small values and a row of zeros; then large values in FP16; then BF16, row by row."""
    rows, hidden, eps = draw.odd(9, 13), draw.odd(1001, 1101), 1e-4
    x = draw.normal(rows, hidden) * torch.tensor([0.01, 1.0, 30.0]).repeat(rows)[:rows, None] + 0.005
    weight = 1 + 0.2 * draw.normal(hidden)
    x[2] = 0
    want, wrong = _norm_answers(x, weight, eps)
    found = expect.tensor(
        call(learners, x, weight, eps), "the result", shape=x.shape, dtype=torch.float32, finite=False
    )
    expect.that(not found[2].isnan().any(), "a row of zeros becomes NaN, 0 / 0: eps belongs under the root")
    expect.close(found, want, "the result in FP32", rel=1e-4, absolute=1e-6, mistakes=wrong)
    for dtype, size in ((torch.float16, 300.0), (torch.bfloat16, 1.0)):
        weight16 = weight.to(dtype)
        x16 = draw.until(
            lambda dtype=dtype, size=size: (
                size * (0.5 + draw.uniform(rows, 1)) * draw.normal(rows, hidden)
            ).to(dtype),
            lambda x: [],
            fit=lambda x, weight=weight16: _tells_scales(x, weight, eps),
        )  # fmt: skip
        _check_sixteen(call(learners, x16, weight16, eps), x16, weight16, eps)


def _rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def _norm_answers(x: Tensor, weight: Tensor, eps: float) -> Answers:
    squares, w = x.double().square(), weight.double()
    spread = x - x.mean(-1, keepdim=True)
    return _rms(x, weight, eps).float(), {
        "eps belongs under the root, not outside it.": x / (squares.mean(-1, keepdim=True).sqrt() + eps) * w,
        "Is eps left out?": (x / squares.mean(-1, keepdim=True).sqrt() * w).nan_to_num(),
        "Is eps another one than you were given?": _rms(x, weight, 1e-6),
        "Is the weight left out?": _rms(x, torch.ones_like(weight), eps),
        "The mean of the squares, not their sum.": x / (squares.sum(-1, keepdim=True) + eps).sqrt() * w,
        "The mean is over the last dimension, of every row alone.": x / (squares.mean() + eps).sqrt() * w,
        "The mean is over the last dimension, not over the rows.": x / (squares.mean(0) + eps).sqrt() * w,
        "Is the root left out?": x / (squares.mean(-1, keepdim=True) + eps) * w,
        "An RMS norm does not subtract the mean.": spread
        / (spread.double().square().mean(-1, keepdim=True) + eps).sqrt()
        * w,
    }


def _tells_scales(x: Tensor, weight: Tensor, eps: float) -> bool:
    """Whether no right way makes a row too large as a whole on this x, and every scale in 16 bits does.

    Rounding before the weight, as transformers does, is right; but where a row's RMS is near 1, 3/4 or 4/3, all of its
    values round the same way.
    """
    wide = x.float()
    mean = wide.square().mean(-1, keepdim=True) + eps
    right = (wide * mean.rsqrt() * weight.float()).to(x.dtype), (wide * mean.rsqrt()).to(x.dtype) * weight
    wrong = x * mean.rsqrt().to(x.dtype) * weight, x / mean.sqrt().to(x.dtype) * weight
    want = _rms(x, weight, eps)
    worst = [_bias(found, want).abs().max().item() for found in (*right, *wrong)]
    return max(worst[:2]) < BIASED / 1.5 and min(worst[2:]) > BIASED * 1.5


def _bias(found: Tensor, want: Tensor) -> Tensor:
    """By how much each row is too large as a whole, in half steps of its format [rows].

    Roundings of single values cancel over a row of a thousand; that of the row's scale does not.
    """
    return ((found.double() * want).sum(-1) / want.square().sum(-1) - 1) / (torch.finfo(found.dtype).eps / 2)


def _check_sixteen(found: object, x: Tensor, weight: Tensor, eps: float) -> None:
    """Right to two roundings everywhere, and no row too large or too small as a whole."""
    name = {torch.float16: "FP16", torch.bfloat16: "BF16"}[x.dtype]
    expect.tensor(found, f"the result for {name}", shape=x.shape, finite=False)
    expect.that(found.dtype == x.dtype, f"the result for {name} has dtype {found.dtype}: the input's was asked for")
    expect.that(
        bool(found.isfinite().all()) and bool((found != 0).any(-1).all()),
        f"rows of {name} with values up to {x.abs().max().item():.0f} become zeros or NaN: the square overflows, "
        f"{name} ends at 65,504. Widen before you square",
    )
    want, roundoff = _rms(x, weight, eps), torch.finfo(x.dtype).eps / 2
    bias = _bias(found, want)
    row = int(bias.abs().argmax())
    worst = bias[row].item()
    expect.that(
        not BIASED < abs(worst) < 4,
        f"row {row} of {name} is {abs(100 * worst * roundoff):.2f}% too {'large' if worst > 0 else 'small'} as a "
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
    found = [expect.whole(count, "a count") for count in expect.sequence(found, "the result")]
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
    """Days where all tidy choices, and all other sums, pad more than the best; one graph; more graphs than lengths."""
    graphs = draw.integer(3, 4)

    def make() -> tuple[list[int], Answers]:
        while True:
            lengths = _day(draw)
            counts, different = collections.Counter(lengths), tuple(sorted(set(lengths)))
            one_more = _greedy(counts, different[-1:], graphs, set(different))
            one_fewer = _greedy(counts, different, graphs, set())
            if one_more and one_fewer and one_more != one_fewer:  # if the same, they are most likely the best
                return lengths, _bucket_answers(lengths, graphs, one_more, one_fewer)

    def fit(drawn: tuple[list[int], Answers]) -> bool:
        """The other sums give the best buckets, too, or some that nobody else gives."""
        best, others = _other_sums(drawn[0], graphs)
        told = [buckets for buckets in others.values() if buckets != best]
        mixed = len(set(told)) < len(told) or set(told) & set(drawn[1][1].values())
        return not mixed and _all_pad_more(*drawn)

    lengths, (_, tidy) = draw.until(make, lambda drawn: [drawn[1]], fit=fit)
    _judge_buckets(call(learners, lengths, graphs), lengths, graphs, {**tidy, **_other_sums(lengths, graphs)[1]})
    lengths = draw.until(
        lambda: _day(draw),
        lambda drawn: [_other_sums(drawn, graphs)],
        fit=lambda drawn: _all_pad_more(drawn, _other_sums(drawn, graphs)),
    )
    _judge_buckets(call(learners, lengths, graphs), lengths, graphs, _other_sums(lengths, graphs)[1])
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


def _padding(counts: Mapping[int, int], buckets: Sequence[int], of: Callable = operator.sub) -> float:
    """counts: how often each length comes. buckets: in order. of(bucket, n): what a prompt of n tokens costs."""
    return sum(count * of(buckets[bisect.bisect_left(buckets, n)], n) for n, count in counts.items())


def _best(counts: Mapping[int, int], graphs: int, of: Callable = operator.sub) -> tuple[int, ...]:
    *others, longest = sorted(counts)
    choices = itertools.combinations(others, min(graphs - 1, len(others)))
    return min(((*choice, longest) for choice in choices), key=lambda buckets: _padding(counts, buckets, of))


def _greedy(counts: Mapping[int, int], buckets: tuple[int, ...], graphs: int, more: set[int]) -> tuple[int, ...]:
    """One bucket more, or one fewer, at a time, until there are `graphs`; nothing if two choices are as good."""
    while len(buckets) != graphs:
        options = [tuple(sorted((*buckets, n))) for n in more - set(buckets)] or [
            tuple(b for b in buckets if b != gone) for gone in buckets[:-1]
        ]
        options.sort(key=lambda option: _padding(counts, option))
        if len(options) > 1 and _padding(counts, options[0]) == _padding(counts, options[1]):
            return ()  # it hangs on which comes first
        buckets = options[0]
    return buckets


def _bucket_answers(
    lengths: list[int], graphs: int, one_more: tuple[int, ...], one_fewer: tuple[int, ...]
) -> Answers:  # fmt: skip
    """The best buckets, and what people choose."""
    counts, ordered, different = collections.Counter(lengths), sorted(lengths), sorted(set(lengths))
    longest, often = ordered[-1], sorted(different, key=lengths.count, reverse=True)
    return _best(counts, graphs), {
        "Are the buckets evenly spaced? Prompts are not.": tuple(
            -(-longest * i // graphs) for i in range(1, graphs + 1)
        ),
        "As many prompts in each bucket is not as little padding.": tuple(
            ordered[-(-len(ordered) * i // graphs) - 1] for i in range(1, graphs + 1)
        ),
        "How often does each length come? Here each counts once.": _best(dict.fromkeys(different, 1), graphs),
        "The most frequent lengths alone do not decide: what falls between them is padded, too.": tuple(
            sorted([*[n for n in often if n != longest][: graphs - 1], longest])
        ),
        "Those are the longest lengths: the many short prompts are padded most.": tuple(different[-graphs:]),
        "Is only one bucket used?": (longest,),
        "Are buckets added one by one? The best set need not hold the best smaller set.": one_more,
        "Are buckets given up one by one? The best set need not lie in the best larger set.": one_fewer,
    }


def _other_sums(lengths: list[int], graphs: int) -> Answers:
    """The best buckets, and those for which something else is smallest."""
    counts = collections.Counter(lengths)
    return _best(counts, graphs), {
        "Is each prompt's padding taken as a share of its length? Add up the padded tokens themselves.": _best(
            counts, graphs, lambda bucket, n: bucket / n
        ),
        "Is each prompt's padding squared? Add up the padded tokens themselves.": _best(
            counts, graphs, lambda bucket, n: (bucket - n) ** 2
        ),
    }


def _all_pad_more(lengths: list[int], answers: Answers) -> bool:
    best, others = answers
    counts = collections.Counter(lengths)
    return all(_padding(counts, buckets) > _padding(counts, best) for buckets in others.values())


def _judge_buckets(result: object, lengths: list[int], graphs: int, tidy: Mapping[str, tuple[int, ...]]) -> None:
    result = expect.sequence(list(result) if isinstance(result, set) else result, "the result")
    buckets = sorted({expect.whole(bucket, "a bucket") for bucket in result})
    given = f"{len(set(lengths))} different lengths, {graphs} graphs: "
    expect.that(len(buckets) <= graphs, f"{given}{len(buckets)} buckets are more graphs than that")
    longest = max(lengths)
    expect.that(bool(buckets), f"{given}there is no bucket")
    expect.that(buckets[-1] >= longest, f"{given}a prompt of {longest} tokens fits into no bucket of {buckets}")
    counts = collections.Counter(lengths)
    found, best = _padding(counts, buckets), _padding(counts, _best(counts, graphs))
    if found == best:
        return
    said = f"{given}buckets {buckets} pad {found} tokens; {best} are enough. "
    why = "Does every bucket end at a length that occurs, and were all choices tried?"
    raise CheckFailed(said + next((w for w, bs in tidy.items() if sorted(set(bs)) == buckets), why))
