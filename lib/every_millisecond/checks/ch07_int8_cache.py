"""Checks of the exercises to notebook 07: scales, bytes and the window, a cache that can be cropped, a late token."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from every_millisecond.checks import expect, programs, zoo
from every_millisecond.checks.call import call, call_raising
from every_millisecond.checks.draw import Answers, Draw
from every_millisecond.checks.exercise import exercise
from every_millisecond.checks.failure import CheckFailed, describe
from every_millisecond.checks.toys import Values

CHAPTER = "07_int8_kv_cache"


@exercise(CHAPTER, "scales per token and per channel")
def check_quantise(learners: Callable, draw: Draw) -> None:
    """Both dimensions, with one towering channel, and a token and a channel of zeros."""
    x = draw.until(lambda: _towering(draw), lambda x: (_scale_answers(x, dim) for dim in (0, 1)))
    for dim in (1, 0):
        codes, scales = expect.items(call(learners, x, dim), 2, "the result", "codes, scales")
        _check_scales(scales, x, dim)
        expect.tensor(codes, "the codes", shape=x.shape, dtype=torch.int8)
        expect.close(
            codes.float() * scales, (x / scales).round() * scales, f"with dim={dim}, codes * scales",
            mistakes={
                "The codes are cut off, not rounded: .to(torch.int8) drops what follows the point.": (
                    x / scales
                ).trunc() * scales,
                "The codes are rounded down, not to the nearest.": (x / scales).floor() * scales,
            },
        )  # fmt: skip
        _check_small_lines(learners, draw, dim)


def _check_small_lines(learners: Callable, draw: Draw, dim: int) -> None:
    x = draw.normal(7, 7)
    small = x[3] if dim == 1 else x[:, 3]
    small *= 1e-4
    _, scales = call(learners, x, dim)
    want = small.abs().amax() / 127
    expect.that(
        abs(scales.flatten()[3] - want) < 1e-3 * want,
        f"with dim={dim}, a line whose largest magnitude is {want * 127:.1e} has a scale of "
        f"{scales.flatten()[3]:.1e}; expected {want:.1e}. Is the least scale, which saves the line of zeros, too "
        "large, or added to every scale?",
    )


def _towering(draw: Draw) -> Tensor:
    tokens, channels = draw.odd(9, 15), draw.odd(17, 23)
    x = draw.normal(tokens, channels)
    x[:, draw.integer(1, 5)] *= 100
    x[draw.integer(1, 5)], x[:, channels - 2] = 0, 0
    return x


def _check_scales(scales: object, x: Tensor, dim: int) -> None:
    largest = x.abs().amax(dim, keepdim=True)
    shares = "the numbers of one token" if dim == 1 else "one channel, over all tokens,"
    expect.tensor(scales, "the scales", dtype=torch.float32, finite=False)
    expect.that(
        scales.shape == largest.shape,
        f"with dim={dim} the scales have shape {list(scales.shape)}; expected {list(largest.shape)}: {shares} share "
        "one scale. Is it another dimension, one scale for all, or is keepdim=True missing?",
    )
    dead = largest == 0
    expect.that(
        bool((scales[dead] > 0).all() and scales[dead].isfinite().all()),
        f"with dim={dim} a line of zeros has a scale of {scales[dead][0]:g}, and 0 / 0 is NaN: give it one above 0",
    )
    want, mistakes = _scale_answers(x, dim)
    expect.close(scales[~dead], want, f"with dim={dim}, the scales", mistakes=mistakes)


def _scale_answers(x: Tensor, dim: int) -> Answers:
    """Of the lines that are not zeros."""
    largest, highest, lowest = (f(dim, keepdim=True) for f in (x.abs().amax, x.amax, x.amin))
    live = largest > 0
    return largest[live] / 127, {
        "The largest magnitude gets the code 127, not 128, which is no INT8.": largest[live] / 128,
        "Magnitude: a line's largest number may be negative (abs before the maximum).": highest[live] / 127,
        "It is upside down: a scale is what one step of the code is worth.": 127 / largest[live],
        "Symmetric codes: zero stays code 0, and the scale is the largest magnitude / 127, not the span / 255.": (
            highest - lowest
        )[live] / 255,
        "A scale from the standard deviation clips outliers; take the largest magnitude.": (
            3 * x.std(dim, keepdim=True)
        )[live] / 127,
    }  # fmt: skip


def _bytes(tokens: int, window: int, channels: int, group: int) -> dict[str, int]:
    """The parts of one head's cache in bytes."""
    old = max(tokens - window, 0)
    return {
        "exact": 4 * channels * (tokens - old),
        "codes": 2 * channels * old,
        "value scales": 2 * old,
        "key scales": 2 * channels * math.ceil(old / group),
        "open keys": 2 * channels * (old % group),
    }


@exercise(CHAPTER, "the residual window under a byte budget")
def check_window(cache_bytes: Callable, largest_window: Callable, draw: Draw) -> None:
    """Bytes with an open group, without, and with a window beyond the text; budgets that halving gets wrong."""
    channels, group, full = draw.until(lambda: _head(draw), lambda drawn: [_byte_answers(drawn[2] + 8, 5, *drawn[:2])])
    for tokens, window in ((full + 8, 5), (full + 6, 6), (full, 0), (full, full + 9)):
        want, mistakes = _byte_answers(tokens, window, channels, group)
        what = f"cache_bytes({tokens}, {window}, {channels}, {group})"
        expect.near(
            call(cache_bytes, tokens, window, channels, group), want, what, rel=0, absolute=0.01, mistakes=mistakes
        )
    for extra in (draw.integer(1, channels), 2 * channels - 1, 0):
        budget, tokens = draw.until(
            lambda extra=extra: _budget(draw, channels, group, extra),
            lambda drawn: _search_answers(*drawn, channels, group),
        )
        _check_window(call(largest_window, budget, tokens, channels, group), budget, tokens, channels, group)
    everything = call(largest_window, 4 * channels * tokens, tokens, channels, group)
    expect.that(everything == tokens, f"all {tokens} tokens fit exactly, but the window is {everything!r}")
    only = call(largest_window, sum(_bytes(group, 0, channels, group).values()), group, channels, group)
    expect.that(only is not None, "the result is None where a window of 0 fits: 0 is an answer, too")
    expect.that(only == 0, f"the window is {only!r} where only 0 fits the budget")
    nothing = call(largest_window, 2 * channels, tokens, channels, group)
    expect.that(nothing is None, f"the window is {nothing!r} where not even the codes fit; expected None")


def _head(draw: Draw) -> tuple[int, int, int]:
    """Channels, a group, and tokens that fill whole groups."""
    channels, group = draw.odd(21, 75), draw.odd(11, 21)
    return channels, group, group * draw.integer(5, 9)


def _budget(draw: Draw, channels: int, group: int, extra: int) -> tuple[int, int]:
    """Bytes that hold some window to the end of a group, and `extra`; tokens."""
    tokens = group * draw.integer(17, 23) + draw.integer(1, group - 1)
    target = tokens - group * draw.integer(5, 11)
    return sum(_bytes(tokens, target, channels, group).values()) + extra, tokens


def _search_answers(budget: int, tokens: int, channels: int, group: int) -> list[Answers]:
    fits = [sum(_bytes(tokens, window, channels, group).values()) <= budget for window in range(tokens + 1)]
    right = max(window for window in range(tokens + 1) if fits[window])
    low, high = 0, tokens
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits[middle] else (low, middle - 1)
    return [(right, {"upwards, to the first that does not fit": fits.index(False) - 1}), (right, {"by halving": low})]


def _byte_answers(tokens: int, window: int, channels: int, group: int) -> Answers:
    parts = _bytes(tokens, window, channels, group)
    want, old = sum(parts.values()), max(tokens - window, 0)
    begun = 2 * channels * (old % group > 0)
    beyond = {"The window cannot hold more tokens than there are.": want + 4 * channels * (window - tokens)}
    return want, {
        "The values' scales are not counted.": want - parts["value scales"],
        "The keys' scales are not counted.": want - parts["key scales"],
        "No scale is counted.": want - parts["value scales"] - parts["key scales"],
        "A group that has begun has its scales already: round the number of groups up.": want - begun,
        "The keys of the open group are kept exactly as well.": want - parts["open keys"],
        "Neither the open group's scales nor its exact keys are counted.": want - parts["open keys"] - begun,
        "Keys and values: some parts are counted for one of them only.": want - (parts["exact"] + parts["codes"]) // 2,
        "An exact number takes 2 bytes.": want - parts["exact"] // 2,
        "Tokens in the window have no codes.": sum(_bytes(tokens, 0, channels, group).values()) + parts["exact"],
        **(beyond if window > tokens else {}),
    }


def _check_window(found: object, budget: int, tokens: int, channels: int, group: int) -> None:
    sizes = [sum(_bytes(tokens, window, channels, group).values()) for window in range(tokens + 1)]
    fits = [window for window, size in enumerate(sizes) if size <= budget]
    expect.that(found is not None, f"the result is None, but a window of {fits[-1]} fits into {budget} bytes")
    window = expect.whole(found, "the window")
    expect.that(0 <= window <= tokens, f"the window is {window}; expected 0 to {tokens}")
    what = f"into {budget} bytes, for {tokens} tokens of {channels} channels in groups of {group}"
    expect.that(sizes[window] <= budget, f"a window of {window} needs {sizes[window]} bytes and does not fit {what}")
    expect.that(
        sizes[fits[-1]] < budget or window != max(fits[:-1], default=-1),
        f"a window of {window} fits {what}, but {fits[-1]} fills them exactly: at most the budget, not less",
    )
    expect.that(
        window == fits[-1] or window > fits[0],
        f"a window of {window} fits {what}, and is the smallest that does; the largest was asked for: {fits[-1]}",
    )
    expect.that(
        window == fits[-1],
        f"a window of {window} fits {what}, but so does {fits[-1]}. Does the search stop at the first that does "
        "not fit? The bytes do not rise steadily with the window: a group that becomes full drops its exact keys",
    )


@exercise(CHAPTER, "crop a quantised cache")
def check_crop(append: Callable, crop: Callable, draw: Draw) -> None:
    """Filled at once and in pieces; cropped by nothing, in the window, below it, to nothing; then no trace is left."""
    residual, channels = draw.odd(5, 9), draw.odd(11, 17)
    x = draw.normal(3 * residual + 2, channels) * torch.logspace(0, 2, 3 * residual + 2)[:, None]
    for sizes in ([1] * len(x), [2, residual + 4, len(x) - residual - 6], [len(x)]):
        cache = Values(residual, channels)
        for number, piece in enumerate(x.split(sizes)):
            _replacing(append, cache, piece)
            _check_state(cache, x[: sum(sizes[: number + 1])], residual)
    cache = Values(0, channels)
    call(append, cache, x)
    expect.that(len(cache.exact) == 0, f"with residual 0, {len(cache.exact)} tokens are exact: x[-0:] is all of x")
    _check_state(cache, x, 0)
    for n in (0, 1, residual - 1, residual, residual + 2, len(x)):
        cache, before = (_filled(x, residual) for _ in range(2))
        try:
            _replacing(crop, cache, n)
        except CheckFailed as failure:
            if n == len(x) and "raised ValueError" in str(failure):
                raise CheckFailed(f"{failure}. But {n} tokens are held, and all may be forgotten") from None
            raise
        _check_cropped(cache, before, n)
    for n in (-1, len(x) + 1):
        cache = _filled(x, residual)
        why = "nothing can be forgotten that is not held" if n > 0 else "n is how many to forget"
        call_raising(ValueError, crop, cache, n, why=why)
        expect.that(len(cache.read()) == len(x), f"crop(cache, {n}) raised, but changed the cache first")
    _check_no_trace(append, crop, x, residual)


def _replacing(fn: Callable, cache: Values, what: Tensor | int) -> None:
    """Call the learner's fn, which may give the cache other tensors, but not write into those that it has."""
    held = {name: getattr(cache, name) for name in ("codes", "scales", "exact")}
    before = {name: x.clone() for name, x in held.items()}
    call(fn, cache, what)
    written = [name for name, x in held.items() if not torch.equal(x, before[name])]
    expect.that(
        not written,
        f"{describe(fn)} wrote into the cache's {' and '.join(written)}: give the cache another tensor (a slice or a "
        "new one), for somebody may still read the old one",
    )


def _filled(x: Tensor, residual: int) -> Values:
    """What append should have made of x."""
    cache = Values(residual, x.shape[1])
    old = max(len(x) - residual, 0)
    cache.scales = x[:old].abs().amax(1, keepdim=True) / 127
    cache.codes, cache.exact = (x[:old] / cache.scales).round().to(torch.int8), x[old:].clone()
    return cache


def _shapes(cache: Values, what: str) -> None:
    channels = cache.exact.shape[-1]
    expect.tensor(cache.codes, f"{what}, codes", dtype=torch.int8)
    expect.tensor(cache.scales, f"{what}, scales", dtype=torch.float32)
    expect.tensor(cache.exact, f"{what}, exact", dtype=torch.float32)
    expect.that(
        cache.codes.shape[0] == cache.scales.shape[0],
        f"{what}, there are codes of {cache.codes.shape[0]} tokens and scales of {cache.scales.shape[0]}",
    )
    expect.tensor(cache.codes, f"{what}, codes", shape=(cache.codes.shape[0], channels))
    expect.tensor(cache.scales, f"{what}, scales", shape=(cache.codes.shape[0], 1))


def _check_state(cache: Values, x: Tensor, residual: int) -> None:
    what = f"after {len(x)} tokens with residual {residual}"
    _shapes(cache, what)
    held, window = cache.codes.shape[0] + cache.exact.shape[0], min(residual, len(x))
    expect.that(held == len(x), f"{what}, the cache holds {held} tokens. Were tokens lost, or kept twice?")
    expect.that(
        cache.exact.shape[0] == window,
        f"{what}, {cache.exact.shape[0]} tokens are exact; expected {window}: the window slides, and only those that "
        "leave it become codes",
    )
    expect.that(
        torch.equal(cache.exact, x[len(x) - window :]),
        f"{what}, the window does not hold exactly the newest {window}. Are the oldest kept, or were they quantised?",
    )
    old = x[: len(x) - window]
    steps = old.abs().amax(1, keepdim=True) / 127
    off = ((cache.codes * cache.scales - old).abs() / steps).amax() if len(old) else torch.tensor(0.0)
    expect.that(
        off < 0.51,
        f"{what}, an old token is off by {off:.2f} steps, its step being its own largest magnitude / 127. "
        "Does each token have a scale of its own, and are old tokens in order?",
    )


def _check_cropped(cache: Values, before: Values, n: int) -> None:
    what = f"after crop(cache, {n}) of {len(before.read())} tokens, {len(before.exact)} of them exact"
    _shapes(cache, what)
    left, held = len(before.read()) - n, cache.codes.shape[0] + cache.exact.shape[0]
    expect.that(n > 0 or held == left, f"{what}, only {held} are left: x[:-0] is x[:0], which is nothing")
    deep = n > len(before.exact)
    reason = "The window holds fewer than n: the others are among the codes" if deep else "Forget the newest n"
    expect.that(held == left, f"{what}, {held} are left; expected {left}. {reason}")
    exact = max(left - len(before.codes), 0)
    expect.that(
        len(cache.exact) == exact,
        f"{what}, {len(cache.exact)} are exact; expected {exact}. A code stays a code, and an exact token stays exact",
    )
    expect.that(
        torch.equal(cache.exact, before.exact[:exact]),
        f"{what}, the window holds other numbers than before. The newest are forgotten, the rest stays as it is",
    )
    expect.that(
        torch.equal(cache.codes * cache.scales, (before.codes * before.scales)[:left]),
        f"{what}, old tokens read back otherwise than before: leave their codes and scales as they are",
    )


def _check_no_trace(append: Callable, crop: Callable, x: Tensor, residual: int) -> None:
    n = residual - 2
    spoiled, clean = Values(residual, x.shape[1]), Values(residual, x.shape[1])
    call(append, spoiled, x)
    call(append, spoiled, 1000 * x[:n])
    call(crop, spoiled, n)
    call(append, spoiled, x[n:])
    call(append, clean, torch.cat([x, x[n:]]))
    expect.that(
        torch.equal(spoiled.exact, clean.exact) and spoiled.codes.shape == clean.codes.shape,
        f"{n} cropped tokens left a trace: the lengths or the window differ from a cache that never saw them",
    )
    expect.close(spoiled.read(), clean.read(), "what a cache reads after a crop and new tokens")


def _per_token(chunks: list[Tensor]) -> Tensor:
    x = torch.cat(chunks)
    step = (x.abs().amax(1, keepdim=True) / 127).clamp(min=1e-12)
    return (x / step).round() * step


def _one_by_one(chunks: list[Tensor]) -> Tensor:
    rows = [row for chunk in chunks for row in chunk]
    steps = [row.abs().max() / 127 if row.any() else torch.tensor(1.0) for row in rows]
    return torch.stack([torch.round(row / step) * step for row, step in zip(rows, steps, strict=True)])


def _per_chunk(chunks: list[Tensor]) -> Tensor:
    steps = [(chunk.abs().amax() / 127).clamp(min=1e-12) for chunk in chunks]
    return torch.cat([(chunk / step).round() * step for chunk, step in zip(chunks, steps, strict=True)])


@exercise(CHAPTER, "the scale that came too early")
def check_through_int8(test: Callable, mended: Callable, draw: Draw) -> None:
    """Chunks that grow, a small token beside a large one, a token of zeros."""
    zoo.check_test(
        test,
        draw,
        broken={
            "a later token larger than the first chunk is clipped": programs.through_int8,
            "the tokens of a chunk share a step, and the small ones vanish beside a large one": _per_chunk,
        },
        right={"all tokens at once": _per_token, "token by token": _one_by_one},
    )
    channels = draw.odd(11, 21)
    chunks = [draw.normal(draw.odd(3, 5), channels) * size for size in (1, 10, 0.1, 30)]
    chunks[1][0], chunks[3][1] = chunks[1][0] / 500, 0
    x = torch.cat(chunks)
    found = expect.tensor(call(mended, chunks), "the mended result", shape=x.shape, finite=False)
    step = (x.abs().amax(1, keepdim=True) / 127).clamp(min=1e-12)
    expect.that(not found.isnan().any(), "the mended result holds NaN: a token of zeros has a step of 0 / 127")
    expect.that(not found[(x == 0).all(1)].any(), "a token of zeros does not come back as zeros")
    late = ((found - x).abs() / step)[len(chunks[0]) :].amax()
    expect.that(
        late < 0.51,
        f"the mended result is off by {late:.1f} steps at a later token; expected half a step at most. "
        "Each token's step is its own largest magnitude / 127",
    )
    expect.that((found - x).abs().sub(0.51 * step).amax() <= 0, "the mended result is off by more than half a step")
    codes = found / step
    expect.that(
        bool((codes - codes.round()).abs().amax() < 0.01),
        "the mended result is no whole multiple of the steps: it has not been through INT8 at all",
    )
