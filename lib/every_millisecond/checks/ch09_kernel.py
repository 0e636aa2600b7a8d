"""Checks of the exercises to notebook 09: an integer matmul, a step's launches, the price of a barrier, how many."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from every_millisecond.checks import expect
from every_millisecond.checks.call import call
from every_millisecond.checks.draw import Answers, Draw
from every_millisecond.checks.exercise import exercise

CHAPTER = "09_one_kernel"
GROUP = 32
PROFILER_S = 60.0  # its first start loads a library

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or the profiler prints its start and stop among the answers


# -- 1 ----------------------------------------------------------------------------------------------------------------


def _nearest(groups: Tensor, scales: Tensor) -> Tensor:
    return torch.where(scales > 0, groups / scales.where(scales > 0, 1.0), 0.0).round()


def _rounded(x: Tensor) -> dict[str, Answers]:
    """Codes and scales of a vector, and what mistakes make of them."""
    groups = x.view(-1, GROUP)
    peaks = groups.abs().amax(dim=1, keepdim=True)
    scales = peaks / 127
    codes = _nearest(groups, scales)
    cut, wide = (groups / scales).trunc(), _nearest(groups, peaks / 128).clamp(-128, 127)
    signed, whole = groups.amax(dim=1) / 127, peaks.max().expand(len(peaks)) / 127
    return {
        "the scales": (scales[:, 0], {
            "The largest magnitude of a group stands for 127, not for 128.": peaks[:, 0] / 128,
            "A large negative number counts as well: take the magnitudes first.": signed,
            "One scale for the whole vector: each group of 32 has one of its own.": whole,
            "That is the largest magnitude; the scale is what one step of the codes is worth.": peaks[:, 0],
            "The reciprocal: a number is its code times the scale.": 127 / peaks[:, 0],
        }),
        "the codes": (codes.flatten().to(torch.int8), {
            "They are cut off; round to the nearest.": cut.flatten().to(torch.int8),
            "The largest magnitude of a group stands for 127, not for 128.": wide.flatten().to(torch.int8),
            "One scale for the whole vector: each group of 32 has one of its own.": _nearest(
                groups, whole[:, None]).flatten().to(torch.int8),
        }),
    }  # fmt: skip


def _products(q: Tensor, scales: Tensor, minima: Tensor, codes: Tensor, t: Tensor) -> Answers:
    q, x = q.view(len(q), -1, GROUP).long(), codes.view(-1, GROUP).long()
    dots, sums = (q * x).sum(dim=2), x.sum(dim=1)  # [out, groups], [groups]
    s, m, t = scales.double(), minima.double(), t.double()
    wrapped = ((q * x + 128) % 256 - 128).sum(dim=2)
    return (t * (s * dots + m * sums)).sum(dim=1).float(), {
        "The minima are missing: each weight is scale * q + minimum.": (t * s * dots).sum(dim=1).float(),
        "A minimum belongs to each of the 32 weights, so it meets the sum of the vector's codes, not 1.": (
            t * (s * dots + m)).sum(dim=1).float(),
        "A minimum is counted 32 times over the sum of the vector's codes.": (
            t * (s * dots + 32 * m * sums)).sum(dim=1).float(),
        "The vector's scales are missing.": (s * dots + m * sums).sum(dim=1).float(),
        "The minima's part lacks the vector's scale.": (t * s * dots + m * sums).sum(dim=1).float(),
        "The minima's part is scaled by the weights' scale, too: m stands beside s, not behind it.": (
            t * s * (dots + m * sums)).sum(dim=1).float(),
        "The products wrap around: 15 * 127 does not fit into 8 bits. Widen before you multiply.": (
            t * (s * wrapped + m * sums)).sum(dim=1).float(),
        "The centre of the codes is subtracted; these codes begin at the minimum.": (
            t * (s * (dots - 8 * sums) + m * sums)).sum(dim=1).float(),
    }  # fmt: skip


def _case(draw: Draw) -> tuple[Tensor, ...]:
    rows, groups = draw.odd(5, 9), draw.odd(3, 7)
    x = draw.normal(groups * GROUP) * torch.linspace(1, 4, groups).repeat_interleave(GROUP)
    x[::GROUP] = -4.5 * torch.linspace(1, 4, groups)  # the largest of each group is negative
    q = torch.randint(16, (rows, groups * GROUP), generator=draw.generator).to(torch.uint8)
    scales, minima = 0.05 + draw.uniform(rows, groups), draw.normal(rows, groups) - 2
    return x, q, scales, minima


def _case_answers(case: tuple[Tensor, ...]) -> list[Answers]:
    x, q, scales, minima = case
    found = _rounded(x)
    return [*found.values(), _products(q, scales, minima, found["the codes"][0], found["the scales"][0])]


@exercise(CHAPTER, "a matmul in integers")
def check_integer_matmul(round_vector: Callable, integer_matmul: Callable, draw: Draw) -> None:
    """Each by itself; a group of zeros; the largest codes of all, whose sum needs more than 16 bits."""
    x, q, scales, minima = draw.until(lambda: _case(draw), _case_answers, fit=lambda case: _no_ties(case[0]))
    answers = _rounded(x)
    for vector, told in ((x, answers), (x * 1e-3, None)):
        codes, t = expect.items(call(round_vector, vector), 2, "the result", "codes, scales")
        (want_t, wrong_t), (want_codes, wrong_codes) = (told or _rounded(vector)).values()
        expect.close(t, want_t, "the scales", mistakes=wrong_t, absolute=1e-9)
        expect.close(codes, want_codes, "the codes", mistakes=wrong_codes)
    empty = x.clone()
    empty[GROUP : 2 * GROUP] = 0
    codes, t = expect.items(call(round_vector, empty), 2, "the result", "codes, scales")
    what = "the codes of a group of zeros"
    expect.tensor(codes, what, shape=x.shape, dtype=torch.int8)
    expect.that(
        not codes[GROUP : 2 * GROUP].any(), f"{what}: {codes[GROUP : GROUP + 4].tolist()}...; expected zeros. 0 / 0?"
    )
    expect.tensor(t, "the scales with a group of zeros", shape=[len(x) // GROUP])
    codes, t = answers["the codes"][0], answers["the scales"][0]
    want, wrong = _products(q, scales, minima, codes, t)
    expect.close(call(integer_matmul, q, scales, minima, codes, t), want, "the product", mistakes=wrong, rel=1e-3,
                 absolute=1e-3)  # fmt: skip
    q, codes = torch.full_like(q, 15), torch.full_like(codes, 127)
    want, wrong = _products(q, scales, minima, codes, t)
    wrong = {"The sum of a group's products, 32 * 15 * 127 = 60,960, does not fit into 16 bits.": _in_16_bits(
        q, scales, minima, codes, t)}  # fmt: skip
    expect.close(call(integer_matmul, q, scales, minima, codes, t), want, "the product of the largest codes",
                 mistakes=wrong, rel=1e-3, absolute=1e-3)  # fmt: skip


def _no_ties(x: Tensor) -> bool:
    """No number lies so near the middle between two codes that rounding of the quotient decides."""
    groups = x.view(-1, GROUP)
    steps = groups / (groups.abs().amax(dim=1, keepdim=True) / 127)
    return bool(((steps.frac().abs() - 0.5).abs() > 1e-3).all())


def _in_16_bits(q: Tensor, scales: Tensor, minima: Tensor, codes: Tensor, t: Tensor) -> Tensor:
    x = codes.view(-1, GROUP).long()
    dots = (q.view(len(q), -1, GROUP).long() * x).sum(dim=2)
    dots = (dots + 32768) % 65536 - 32768
    return (t.double() * (scales.double() * dots + minima.double() * x.sum(dim=1))).sum(dim=1).float()


# -- 2 ----------------------------------------------------------------------------------------------------------------

VIEWS = frozenset({"aten::view", "aten::t", "aten::transpose", "aten::reshape", "aten::unsqueeze", "aten::expand"})


def _step(layers: int, adds: int, views: int) -> Callable[[], Tensor]:
    """A step of `layers` times (linear, silu, `adds` additions, `views` views): its operators are known."""
    x, weight = torch.ones(3, 7), torch.ones(7, 7) / 7

    def step() -> Tensor:
        y = x
        for _ in range(layers):
            y = F.silu(F.linear(y, weight))
            for _ in range(adds):
                y = torch.add(y, 1.0)
            for _ in range(views):
                y = y.view(3, 7)
        return y

    return step


def _launches(sizes: tuple[int, int, int]) -> Answers:
    layers, adds, views = sizes
    want = layers * (2 + adds)
    return want, {
        "Views are counted as well: they move nothing and launch nothing.": want + layers * views,
        "Operators inside operators are counted as well: only the outermost are launched from Python.": want
        + 2 * layers,  # linear calls t and a matmul; which ones differs between releases, see `_nested`
        "Each kind of operator is counted once; count every call.": 3,
        "Each kind of operator is counted once, and views, too; count every call.": 4,
        "Only the matmuls are counted.": layers,
    }


def _nested(step: Callable[[], object]) -> set[int]:
    """What counting operators at every depth gives here, without views and with them."""
    with torch.no_grad(), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step()
    names = [event.name for event in profile.events() if event.name.startswith("aten::")]
    return {len(names), sum(name not in VIEWS for name in names)}


@exercise(CHAPTER, "the launches of a step")
def check_count_launches(count_launches: Callable, draw: Draw) -> None:
    """Two steps whose operators are known, with views, and with operators that call others."""
    for _ in range(2):
        sizes = draw.until(
            lambda: (draw.odd(5, 11), draw.integer(2, 4), draw.integer(1, 3)), lambda drawn: [_launches(drawn)]
        )
        step = _step(*sizes)
        found = expect.whole(call(count_launches, step, limit_s=PROFILER_S), "the launches")
        want, mistakes = _launches(sizes)
        expect.that(
            found == want or found not in _nested(step) - {want},
            f"the launches: {found}; expected {want}. Operators inside operators are counted as well: only the "
            "outermost, those with no operator around them, are launched from Python.",
        )
        expect.near(found, want, "the launches", mistakes=mistakes)
    nothing = expect.whole(
        call(count_launches, lambda: None, limit_s=PROFILER_S), "the launches of a step that does nothing"
    )
    expect.near(nothing, 0, "the launches of a step that does nothing")


# -- 3 ----------------------------------------------------------------------------------------------------------------


def _slope(drawn: tuple[list[int], float, float]) -> Answers:
    lengths, start_ms, us = drawn
    times = [start_ms + n * us / 1e3 for n in lengths]
    return us, {
        "That is in milliseconds; microseconds were asked for.": us / 1e3,
        "That is in nanoseconds; microseconds were asked for.": us * 1e3,
        "What the chain costs by itself is in it: the longest time over its length.": 1e3 * times[-1] / lengths[-1],
        "What the chain costs by itself is in it: the shortest time over its length.": 1e3 * times[0] / lengths[0],
        "What the chain costs by itself is in it: the mean of time over length.": 1e3
        * sum(t / n for t, n in zip(times, lengths, strict=True))
        / len(lengths),
        "That is what the chain costs without any barrier, the line's start.": 1e3 * start_ms,
        "The ratio is upside down: barriers per time.": 1 / us,
    }


@exercise(CHAPTER, "the price of one more")
def check_price(price_us: Callable, draw: Draw) -> None:
    """A line that does not begin at zero; then the same runs in another order."""

    def make() -> tuple[list[int], float, float]:
        first = draw.odd(101, 301)
        return [first * k for k in (1, 2, 4, 8)], draw.number(0.3, 2), draw.number(0.2, 3)

    lengths, start_ms, us = drawn = draw.until(make, lambda case: [_slope(case)], rel=1e-2)
    times = [start_ms + n * us / 1e3 for n in lengths]
    want, mistakes = _slope(drawn)
    expect.near(call(price_us, lengths, times), want, "the price", mistakes=mistakes, rel=1e-3)
    order = (2, 0, 3, 1)
    again = call(price_us, [lengths[i] for i in order], [times[i] for i in order])
    expect.near(again, want, "the price, the runs in another order", rel=1e-3)


# -- 4 ----------------------------------------------------------------------------------------------------------------

BUFFERS = ("x", "normed", "qkv", "mixed", "cache")
Phase = tuple[frozenset, frozenset]


def _greedy(phases: list[Phase], conflicts: Callable[..., bool]) -> int:
    """Barriers if one is put before each phase that conflicts with what came since the last."""
    count, read, written = 0, set(), set()
    for reads, writes in phases:
        if conflicts(read, written, reads, writes):
            count, read, written = count + 1, set(), set()
        read, written = read | reads, written | writes
    return count


def _conflict(read: set, written: set, reads: frozenset, writes: frozenset) -> bool:
    return bool(written & (reads | writes) or read & writes)


def _barriers(phases: list[Phase]) -> Answers:
    pairs = itertools.pairwise(phases)
    seen: set = set()
    kept_for_ever = 0  # what was written long ago is never forgotten
    for reads, writes in phases:
        kept_for_ever += bool(seen & (reads | writes))
        seen |= writes
    return _greedy(phases, _conflict), {
        "One after each phase is safe, and more than is needed.": len(phases),
        "One between any two phases is safe, and more than is needed.": len(phases) - 1,
        "A phase must also wait before it writes over what another may still be reading.": _greedy(
            phases, lambda read, written, reads, writes: bool(written & (reads | writes))
        ),
        "Two phases that write into the same buffer must not run into each other either.": _greedy(
            phases, lambda read, written, reads, writes: bool(written & reads or read & writes)
        ),
        "Only reading what was written is waited for; writing matters as well.": _greedy(
            phases, lambda read, written, reads, writes: bool(written & reads)
        ),
        "Only neighbours are compared: a phase may conflict with any one since the last barrier.": sum(
            _conflict(*a, *b) for a, b in pairs
        ),
        "What was written before a barrier is safe behind it: forget it there.": kept_for_ever,
        "The end of the function is a meeting point of its own: no barrier is needed after the last phase.": _greedy(
            phases, _conflict
        )
        + 1,
        "Two readers of a buffer may run at the same time.": _greedy(
            phases,
            lambda read, written, reads, writes: bool((read | written) & (reads | writes)),
        ),
    }


@exercise(CHAPTER, "how many barriers a step needs")
def check_count_barriers(count_barriers: Callable, draw: Draw) -> None:
    """Random phases on which all rules differ; then a layer of the kernel, one phase, and none."""

    def make() -> list[Phase]:
        return [
            (frozenset(draw.random.sample(BUFFERS, draw.integer(0, 2))), frozenset(draw.random.sample(BUFFERS, 1)))
            for _ in range(draw.integer(19, 29))
        ]

    phases = draw.until(make, lambda drawn: [_barriers(drawn)], rel=1e-9, tries=20_000)
    for case in (phases, [*phases[:9], *phases[:9]]):
        want, mistakes = _barriers(case)
        given = [(set(reads), set(writes)) for reads, writes in case]
        expect.near(expect.whole(call(count_barriers, given), "the barriers"), want, "the barriers", mistakes=mistakes)
    for case, want in (
        ([({"x"}, {"normed"})], 0),
        ([], 0),
        ([({"x"}, {"normed"}), ({"x"}, {"qkv"})], 0),
        ([({"x"}, {"normed"}), ({"normed"}, {"qkv"}), ({"cache"}, {"mixed"}), ({"mixed"}, {"x"})], 2),
    ):
        found = expect.whole(call(count_barriers, case), f"the barriers of {case}")
        expect.near(found, want, f"the barriers of {case}")
