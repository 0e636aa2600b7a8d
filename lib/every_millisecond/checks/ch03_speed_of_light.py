"""Checks of the exercises to notebook 03: work of a block, what binds it, the batch at the ridge, published figures."""

from __future__ import annotations

import math
from collections.abc import Callable

from every_millisecond.checks import expect
from every_millisecond.checks.call import call
from every_millisecond.checks.draw import Answers, Draw
from every_millisecond.checks.exercise import exercise
from every_millisecond.checks.failure import CheckFailed
from llm_latency import roofline

CHAPTER = "03_speed_of_light"


@exercise(CHAPTER, "FLOPs and bytes of a block")
def check_block_work(block_flops: Callable, block_bytes: Callable, draw: Draw) -> None:
    """A chunk after a context, a prefill, a decode step; the oracle is the library's own count."""
    shape, new, old = draw.until(lambda: _block(draw), lambda drawn: [_flops(*drawn), _bytes(*drawn)])
    for tokens, context in ((new, old), (draw.odd(101, 301), 0), (1, draw.odd(101, 301))):
        for fn, name, (want, mistakes) in (
            (block_flops, "FLOPs", _flops(shape, tokens, context)),
            (block_bytes, "bytes", _bytes(shape, tokens, context)),
        ):
            what = f"the {name} of {tokens} tokens after {context}"
            expect.near(expect.whole(call(fn, shape, tokens, context), what), want, what, rel=1e-9, mistakes=mistakes)


def _block(draw: Draw) -> tuple[dict[str, int], int, int]:
    kv_heads = draw.odd(3, 5)
    heads, head_dim = kv_heads * draw.odd(3, 5), draw.odd(17, 31)
    shape = {
        "hidden": heads * head_dim + draw.odd(31, 61), "ffn": heads * head_dim * 3 + draw.odd(31, 61),
        "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim,
    }  # fmt: skip
    return shape, draw.odd(21, 51), draw.odd(101, 301)


def _work(shape: dict[str, int], tokens: int, context: int) -> roofline.Work:
    counted = roofline.ModelShape("drawn", layers=1, vocab=11, **shape)
    parts = roofline.forward_work(counted, tokens, context=context, weights="bfloat16")
    return roofline.total({name: parts[name] for name in ("projections", "attention", "ffn")})


def _flops(shape: dict[str, int], tokens: int, context: int) -> Answers:
    want = _work(shape, tokens, context).flops
    hidden, ffn, keys = shape["hidden"], shape["ffn"], context + tokens
    query, key = shape["heads"] * shape["head_dim"], shape["kv_heads"] * shape["head_dim"]
    attention = 4 * tokens * keys * query
    return want, {
        "A product of [m, k] and [k, n] is 2 m n k: the factor 2 is missing.": want // 2,
        "Keys and values have KV heads only: their projections are narrower.": want
        + 2 * tokens * hidden * 2 * (query - key),
        "Is it hidden x hidden for query and output? heads x head_dim need not be hidden.": want
        + 2 * tokens * hidden * 2 * (hidden - query),
        "The FFN has three matrices: gate, up and down.": want - 2 * tokens * hidden * ffn,
        "The output projection is missing.": want - 2 * tokens * hidden * query,
        "Attention has two products, with the keys and with the values.": want - attention // 2,
        "Is attention's own product left out? It has no weights, but FLOPs.": want - attention,
        "The new tokens look at the context, too, not at each other alone.": want - 4 * tokens * context * query,
        "The new tokens look at each other, too, not at the context alone.": want - 4 * tokens * tokens * query,
        "Each query head has its products; only what is stored is shared.": want - 4 * tokens * keys * (query - key),
        "The half that a causal mask hides counts here.": want - 2 * tokens * (tokens - 1) * query,
        "Every new token passes the matrices.": (want - attention) // tokens + attention,
        "The context's tokens passed the matrices before.": (want - attention) // tokens * keys + attention,
    }


def _bytes(shape: dict[str, int], tokens: int, context: int) -> Answers:
    work = _work(shape, tokens, context)
    want = work.weight_bytes + work.cache_read_bytes
    hidden, ffn, keys = shape["hidden"], shape["ffn"], context + tokens
    query, key = shape["heads"] * shape["head_dim"], shape["kv_heads"] * shape["head_dim"]
    cache = 4 * keys * key
    weights = want - cache
    return want, {
        "That counts numbers; in BF16 each takes two bytes.": want // 2,
        "Is it in FP32? BF16 takes two bytes a number.": want * 2,
        "Weights are read once for all tokens of a pass, not once for each.": weights * tokens + cache,
        "Keys *and* values: both are read.": want - cache // 2,
        "Are keys and values left out?": weights,
        "The keys and values of the new tokens are read, too.": want - 4 * tokens * key,
        "The keys and values of the context are read, too.": want - 4 * context * key,
        "Only KV heads are stored.": weights + 4 * keys * query,
        "Keys and values have KV heads only: their projections are narrower.": want + 4 * hidden * (query - key),
        "The FFN has three matrices: gate, up and down.": want - 2 * hidden * ffn,
        "The output projection is missing.": want - 2 * hidden * query,
        "Is it hidden x hidden for query and output? heads x head_dim need not be hidden.": want
        + 4 * hidden * (hidden - query),
    }


@exercise(CHAPTER, "the longer of two")
def check_least_ms(learners: Callable, draw: Draw) -> None:
    """Work left of the ridge and right of it, close to it on either side, and on it."""
    for factor in ((0.01, 0.1), (10, 90), (0.8, 0.9), (1.1, 1.2)):
        flops, nbytes, tflops, gbps = draw.until(
            lambda factor=factor: _piece(draw, draw.number(*factor)), lambda drawn: [_least_answers(*drawn)]
        )
        computing, reading = flops / tflops / 1e9, nbytes / gbps / 1e6
        bound = "arithmetic" if computing >= reading else "memory"
        ms, said = expect.items(
            call(learners, flops, nbytes, tflops, gbps), 2, "the result", "milliseconds, what binds"
        )
        want, mistakes = _least_answers(flops, nbytes, tflops, gbps)
        expect.near(ms, want, "the time", mistakes=mistakes)
        _check_word(said, ("arithmetic", "memory"))
        expect.that(
            said == bound,
            f"computing takes {computing:.3g} ms, reading {reading:.3g} ms: bound by {said!r}; expected {bound!r}. "
            "The longer one binds",
        )
    _, said = expect.items(call(learners, 2 * 10**12, 4 * 10**9, 1, 2), 2, "the result", "milliseconds, what binds")
    expect.that(
        said == "arithmetic", f"2 s to compute, 2 s to read: at the ridge it is {said!r}; 'arithmetic' was asked"
    )


def _piece(draw: Draw, factor: float) -> tuple[int, int, int, int]:
    """FLOPs and bytes that lie at `factor` times the ridge of a machine; its TFLOP/s and GB/s."""
    tflops, gbps, nbytes = draw.odd(101, 999), draw.odd(1001, 4999), draw.odd(10**9 + 1, 9 * 10**9 + 1)
    return round(nbytes * factor * tflops * 1000 / gbps), nbytes, tflops, gbps


def _least_answers(flops: int, nbytes: int, tflops: int, gbps: int) -> Answers:
    computing, reading = flops / tflops / 1e9, nbytes / gbps / 1e6
    giga = {"Is a GB taken for 2^30 bytes? Here it is 10^9.": nbytes / gbps / 2**30 * 1000}
    return max(computing, reading), {
        "Arithmetic and reading overlap: the longer of the two, not their sum.": computing + reading,
        "The longer of the two decides, not the shorter.": min(computing, reading),
        "Is it in seconds? Milliseconds were asked for.": max(computing, reading) / 1000,
        "Is it in microseconds? Milliseconds were asked for.": max(computing, reading) * 1000,
        "Is a GB 10^9 bytes, and a TFLOP 10^12 FLOPs?": max(flops / tflops, nbytes / gbps),
        **(giga if reading > computing else {}),
    }


def _check_word(said: object, words: tuple[str, ...]) -> None:
    given = " or ".join(f'"{word}"' for word in words)
    expect.that(isinstance(said, str) and said in words, f"the answer in words: {said!r}; expected {given}, as written")


@exercise(CHAPTER, "what must change for decode to be bound by arithmetic")
def check_least_batch(learners: Callable, draw: Draw) -> None:
    """Lines that meet between two whole numbers and at one; a batch of one; a cache that never lets them meet."""
    for share in ((0.3, 0.5), (0.6, 0.8)):
        case = draw.until(
            lambda share=share: _decode(draw, draw.number(*share), draw.integer(31, 301) + draw.number(0.2, 0.45)),
            lambda drawn: [_batch_answers(*drawn)],
        )
        _check_batch(learners, case)
    whole = draw.integer(31, 301)  # and all numbers of few bits, so that every way to compute them is exact
    tflops, gbps, step = 2 ** draw.integer(7, 9), 2 ** draw.integer(10, 12), 5**9
    found = call(learners, 2 * tflops * 1000 * step, gbps * step, whole * gbps * step, tflops, gbps)
    expect.that(
        found == whole,
        f"a batch of {whole} computes exactly as long as it reads, which is enough: the batch is {found}; expected "
        f"{whole}",
    )
    flops, _, _, tflops, gbps = case
    computing = flops / tflops / 1e9
    found = call(learners, flops, 0.1 * computing * gbps * 1e6, 0.3 * computing * gbps * 1e6, tflops, gbps)
    expect.that(found == 1, f"one sequence alone is bound by arithmetic: the batch is {found}; expected 1")
    for share in (draw.number(1.1, 1.5), draw.number(3, 9)):
        found = call(learners, flops, share * computing * gbps * 1e6, draw.odd(10**9, 10**10), tflops, gbps)
        expect.that(
            found is None,
            f"each sequence's cache takes longer to read than its step to compute: the batch is {found}; expected "
            "None, for no batch ever is bound by arithmetic",
        )
    found = call(learners, 2 * 10**12, 4 * 10**9, 10**9, 1, 2)
    expect.that(
        found is None, f"2 s to compute, 2 s to read for each sequence, and weights besides: the batch is {found}; "
        "expected None, for the lines are parallel"
    )  # fmt: skip
    found = call(learners, flops, 0.1 * computing * gbps * 1e6, 0, tflops, gbps)
    expect.that(
        found == 1, f"without any weights the lines meet at 0, but a batch holds 1 at least: the batch is {found}; "
        "expected 1"
    )  # fmt: skip
    far = _decode(draw, draw.number(0.3, 0.5), draw.integer(20_000, 30_000) + draw.number(0.2, 0.45))
    found = call(learners, *far)
    expect.that(
        found == _batch_answers(*far)[0],
        f"the lines meet late, below a batch of {_batch_answers(*far)[0]}: the batch is {found}. Does a search end too "
        "early?",
    )


def _decode(draw: Draw, share: float, meeting: float) -> tuple[int, float, float, int, int]:
    """A step whose cache takes `share` of its computing time to read, and lines that meet at a batch of `meeting`."""
    tflops, gbps, flops = draw.odd(101, 999), draw.odd(1001, 4999), draw.odd(10**9 + 1, 9 * 10**9 + 1)
    computing = flops / tflops / 1e9
    return flops, share * computing * gbps * 1e6, meeting * (1 - share) * computing * gbps * 1e6, tflops, gbps


def _batch_answers(flops: int, cache_bytes: float, weight_bytes: float, tflops: int, gbps: int) -> Answers:
    computing, reading, weights = flops / tflops / 1e9, cache_bytes / gbps / 1e6, weight_bytes / gbps / 1e6
    meeting = weights / (computing - reading)
    return math.ceil(meeting), {
        "Each sequence reads a cache of its own: that grows with the batch.": math.ceil(weights / computing),
        "Each sequence reads a cache of its own: that grows with the batch, and a batch is whole.": weights / computing,
        "One sequence less than it takes: round up.": math.floor(meeting),
        "One sequence more than it takes.": math.ceil(meeting) + 1,
        "A batch is a whole number of sequences: round up.": meeting,
        "Each sequence reads a cache of its own, not one for all: that grows with the batch.": math.ceil(
            (weights + reading) / computing
        ),
        "The lines meet at weights / (computing - reading); is the sum taken?": math.ceil(
            weights / (computing + reading)
        ),
    }


def _check_batch(learners: Callable, case: tuple) -> None:
    want, mistakes = _batch_answers(*case)
    found = call(learners, *case)
    expect.that(found is not None, f"None, but a batch of {want} is bound by arithmetic")
    expect.near(expect.number(found, "the batch"), want, "the batch", rel=1e-9, mistakes=mistakes)


PARAMETERS, TFLOPS, GBPS = 6.74e9, 312, 2039


@exercise(CHAPTER, "three published figures")
def check_judge(judge: Callable, three_shares: Callable, draw: Draw) -> None:
    """Times on both sides of both borders and on them, bound by either; the three figures as numbers."""
    shares = {
        1.1: "impossible", 0.9: "plausible", 0.12: "plausible", 0.08: "far below", 1.0: "plausible", 0.1: "plausible",
    }  # fmt: skip
    for factor in (draw.number(0.01, 0.1), draw.number(10, 90), 0.5):
        flops, nbytes, tflops, gbps = _piece(draw, factor)
        if factor == 0.5:  # numbers of few bits, so that every way to compute them is exact
            tflops, gbps = 2 ** draw.integer(7, 9), 2 ** draw.integer(10, 12)
            flops, nbytes = tflops * 1000 * 5**9, 2 * gbps * 5**9
        limit = max(flops / tflops / 1e9, nbytes / gbps / 1e6)
        for share, want in shares.items():
            if share in (1.0, 0.1):
                if factor != 0.5:
                    continue
                published, border = (
                    limit * round(1 / share),
                    "exactly at the limit" if share == 1 else "exactly 10 times as long",
                )
            else:
                published, border = (
                    limit / (share * draw.number(0.95, 1.05)),
                    "The share of the limit is limit over time",
                )
            found = call(judge, published, flops, nbytes, tflops, gbps)
            _check_word(found, ("impossible", "far below", "plausible"))
            expect.that(
                found == want,
                f"the limit is {limit:.3g} ms, bound by {'arithmetic' if factor > 1 else 'memory'}; published are "
                f"{published:.3g} ms: judged {found!r}; expected {want!r}. {border}",
            )
    _check_shares(call(three_shares))


def _check_shares(result: object) -> None:
    shares = expect.items(result, 3, "the result of three_shares", "the shares of figures 1, 2 and 3")
    reading, computing = 2 * PARAMETERS / GBPS / 1e6, 2 * PARAMETERS / TFLOPS / 1e9  # ms of a pass; of a token
    wants = {
        1: (reading * 107 / 1000, {
            "That is the FLOPs' share: they do not bind decode.": computing * 107 / 1000,
            "Is it upside down? Limit over published time.": 1000 / (reading * 107),
            "One byte a parameter? BF16 has two.": reading * 107 / 2000,
        }),
        2: (256 / 6 * reading / 80, {
            "Each pass yields 6 tokens: fewer passes.": 256 * reading / 80,
            "How many passes lie in the 80 ms? That is one.": reading / 80,
            "Is it upside down? Limit over published time.": 80 / (256 / 6 * reading),
            "That is the FLOPs' share: they do not bind decode.": 256 * computing / 80,
        }),
        3: (256 * computing / 850, {
            "That is the time to read the weights: with 256 tokens in a pass computing takes longer.": reading / 850,
            "A prefill is one pass, not one for each token.": 256 * reading / 850,
            "Is it upside down? Limit over published time.": 850 / (256 * computing),
            "All 256 tokens are computed.": computing / 850,
            "Two FLOPs per parameter and token: the factor 2 is missing.": 128 * computing / 850,
        }),
    }  # fmt: skip
    for figure, (want, mistakes) in wants.items():
        what = f"the share of figure {figure}"
        found = expect.number(shares[figure - 1], what)
        if math.isclose(found, 100 * want, rel_tol=0.02):
            raise CheckFailed(f"{what} is {found:.4g}: is it in percent? 1.0 is the limit itself")
        expect.near(found, want, what, rel=0.02, mistakes=mistakes)  # whole passes, rounded figures: both will do
