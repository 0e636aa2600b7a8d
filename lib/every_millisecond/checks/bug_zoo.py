"""Checks of the bug zoo: the learner's test tells broken programs from right ones, and the mended one is programs."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable

import torch
from torch import Tensor

from every_millisecond.checks import expect, programs, zoo
from every_millisecond.checks.call import call
from every_millisecond.checks.draw import Answers, Draw
from every_millisecond.checks.exercise import exercise
from every_millisecond.checks.failure import how_often
from every_millisecond.checks.toys import ToyTokenizer
from every_millisecond.checks.virtual_device import VirtualStream, on_a_virtual_device, only_launched

CHAPTER = "bug_zoo"


@exercise(CHAPTER, "the clock that does not wait")
def check_elapsed(test: Callable, mended: Callable, draw: Draw) -> None:
    """The fault, and the half-mended one that counts earlier work."""
    zoo.check_test(
        on_a_virtual_device(test),
        draw,
        broken={"the clock is read when the work is launched, not when it is done": programs.elapsed_ms},
        right={"by waiting": programs.elapsed_by_waiting, "by events": programs.elapsed_by_events},
    )
    ms, earlier = draw.number(8, 15), 60
    stream = VirtualStream()
    stream.launch(earlier)
    found = expect.number(call(stream.on_its_clock(mended), stream, stream.work(ms)), "the mended time")
    launched = len(stream.launched) - 1
    expect.that(launched == 1, f"the work was launched {how_often(launched)}; it is the caller's, and is done once")
    expect.near(
        found, ms, "the mended time", rel=2e-3,
        mistakes={
            f"{earlier} ms of earlier work are counted. Wait before the first reading, too.": ms + earlier,
            "That is still the launch.": found if only_launched(found, ms) else -1,
            "Is it in seconds? Milliseconds were asked for.": ms / 1000,
        },
    )  # fmt: skip


@exercise(CHAPTER, "the prefill that was counted as decode")
def check_tpot(test: Callable, mended: Callable, draw: Draw) -> None:
    """A slow first token and quick later ones."""
    zoo.check_test(
        test,
        draw,
        broken={"the time to the first token is counted as decode": programs.time_per_output_token},
        right={"last minus first": programs.tpot, "mean of the gaps": programs.tpot_by_gaps},
    )
    sent, times = draw.until(lambda: _stamps(draw), lambda drawn: [_pace_answers(*drawn)])
    want, mistakes = _pace_answers(sent, times)
    expect.near(call(mended, sent, times), want, "the mended time per output token", mistakes=mistakes)
    one = call(mended, sent, times[:1])
    expect.that(one is None, f"for one token the mended time is {one}; there is no gap, so it is None")


def _stamps(draw: Draw) -> tuple[float, list[float]]:
    sent = draw.number(5, 50)
    gaps = draw.numbers(draw.odd(5, 11), 8, 12)
    return sent, list(itertools.accumulate(gaps, initial=sent + draw.number(80, 120)))


def _pace_answers(sent: float, times: list[float]) -> Answers:
    whole, decode, gaps = times[-1] - sent, times[-1] - times[0], len(times) - 1
    return decode / gaps, {
        "The time to the first token is still in it.": whole / len(times),
        "The time to the first token is still in it, over one token less.": whole / gaps,
        "The time to the first token is still in it, and the wait until it was sent.": times[-1] / len(times),
        "n tokens have n - 1 gaps between them.": decode / len(times),
        "That is a median; the mean was asked for.": statistics.median(
            later - sooner for sooner, later in itertools.pairwise(times)
        ),
    }


@exercise(CHAPTER, "the acceptance against a constant")
def check_accepts(test: Callable, mended: Callable, draw: Draw) -> None:
    """min(1, p / q) against u, drawn on both sides of the edge."""
    zoo.check_test(
        test,
        draw,
        broken={
            "it does not look at u": programs.accepts,
            "it compares p with u and forgets q": lambda p, q, u: u < p,
            "it turns the ratio upside down": lambda p, q, u: u < q / p if p else False,
        },
        right={"u < p / q": lambda p, q, u: u < p / q, "u q < p": lambda p, q, u: u * q < min(p, q)},
    )
    for _ in range(200):
        p, q, u = draw.number(0.01, 0.9), draw.number(0.01, 0.9), draw.number(0, 1)
        if abs(u - p / q) < 1e-6:
            continue
        found, want = expect.truth(call(mended, p, q, u), "the mended answer"), u < p / q
        expect.that(
            found == want,
            f"p={p:.3f}, q={q:.3f}, u={u:.3f}: {found}; expected {want}. "
            "A token is kept with probability min(1, p / q)",
        )
    found = expect.truth(call(mended, 0.0, 0.5, 0.0), "the mended answer")
    expect.that(not found, "p=0, q=0.5, u=0: True; expected False. A token that the target never says is never kept")


@exercise(CHAPTER, "the logits that were read one late")
def check_accepted_prefix(test: Callable, mended: Callable, draw: Draw) -> None:
    """None, some and all accepted, and a match after the first miss."""
    zoo.check_test(
        test,
        draw,
        broken={
            "row i + 1 is compared with token i": programs.accepted_prefix,
            "matches after the first miss are counted": lambda draft, logits: int(
                (draft == logits.argmax(-1)[:-1]).sum()
            ),
        },
        right={"one after the other": programs.prefix, "all at once": programs.prefix_at_once},
    )
    for keep in (0, 2, 5):
        draft, logits = draw.until(lambda keep=keep: _drafted(draw, keep), lambda drawn: _prefix_answers(*drawn))
        found = expect.whole(call(mended, draft, logits), "the mended count")
        expect.that(
            found == keep,
            f"{found} tokens accepted; expected {keep}. Row 0 of the logits, at the last committed token, predicts "
            "token 0 of the draft; and nothing after the first miss counts",
        )


def _drafted(draw: Draw, keep: int) -> tuple[Tensor, Tensor]:
    """A draft whose token number `keep` is the only one that is not the target's choice."""
    logits = draw.normal(6, 31)
    draft = logits.argmax(-1)[:5]
    if keep < 5:
        draft[keep] = (draft[keep] + draw.integer(1, 30)) % 31
    return draft, logits


def _prefix_answers(draft: Tensor, logits: Tensor) -> list[Answers]:
    right = programs.prefix(draft, logits)
    matches = int((draft == logits.argmax(-1)[:-1]).sum())
    late = {"late": programs.accepted_prefix(draft, logits)}
    return [(right, late if right else {}), (right, {"all": matches} if right < len(draft) else {})]


@exercise(CHAPTER, "the row that turned into NaN")
def check_masked_softmax(test: Callable, mended: Callable, draw: Draw) -> None:
    """A row that may see nothing, beside others."""
    zoo.check_test(
        test,
        draw,
        broken={
            "a row that may see nothing is NaN": programs.masked_softmax,
            "a row that may see nothing is uniform": lambda s, a: s.masked_fill(~a, -1e9).softmax(-1),
        },
        right={"zeros filled in afterwards": programs.softmax, "by sums": programs.softmax_by_sums},
    )
    rows, keys = draw.odd(5, 9), draw.odd(11, 15)
    scores, allowed = 3 * draw.normal(rows, keys), draw.uniform(rows, keys) < 0.5
    allowed[0], allowed[1, 2] = False, True
    found = expect.tensor(call(mended, scores, allowed), "the mended weights", shape=(rows, keys), finite=False)
    expect.that(not found.isnan().any(), "the mended weights hold NaN in a row that may see nothing; expected zeros")
    expect.close(
        found, programs.softmax(scores, allowed), "the mended weights",
        mistakes={
            "A row that may see nothing is uniform: a large negative number is not -inf.": scores.masked_fill(
                ~allowed, -1e9
            ).softmax(-1)
        },
    )  # fmt: skip
    scores = 300 * scores
    scores[~allowed] = float(scores.max()) + 1000  # e^-1000 is 0 in every format
    found = expect.tensor(call(mended, scores, allowed), "the mended weights", shape=(rows, keys), finite=False)
    expect.close(
        found, programs.softmax(scores, allowed), "the mended weights of large scores, the hidden ones the largest",
        mistakes={
            "All are zeros: is the maximum taken over the hidden scores, too?": torch.zeros_like(scores),
        },
    )  # fmt: skip


@exercise(CHAPTER, "the scales that clipped")
def check_quantise(test: Callable, mended: Callable, draw: Draw) -> None:
    """Rows with an outlier of either sign, rows of different size, a row of zeros."""
    zoo.check_test(
        test,
        draw,
        broken={
            "an outlier is clipped": programs.quantise,
            "the largest value is coded as 128, which wraps round to -128": programs.quantise_wrapping,
        },
        right={
            "largest value over 127": programs.quantise_rightly,
            "the same, otherwise": programs.quantise_otherwise,
        },
    )
    x = draw.normal(5, draw.odd(31, 63)) * torch.tensor([1.0, 10, 1e-4, 1, 0])[:, None]
    x[0, 3], x[3, 5] = 20.0, -20.0
    codes, scale = expect.items(call(mended, x), 2, "the result", "codes, scale")
    expect.tensor(codes, "the codes", shape=x.shape, dtype=torch.int8)
    expect.tensor(scale, "the scale", shape=(5, 1))
    error = (codes.float() * scale - x).abs()
    expect.that(not error[4].any(), "a row of zeros does not come back as zeros")
    worst = (error[:4] / (x[:4].abs().amax(-1, keepdim=True) / 127)).max().item()
    expect.that(
        worst < 0.51,
        f"a value is off by {worst:.1f} steps; expected half a step at most. "
        "Does the largest value of a row get code 127?",
    )


@exercise(CHAPTER, "the text that began twice")
def check_encode_chat(test: Callable, mended: Callable, draw: Draw) -> None:
    """Exactly one beginning of text, and every other token as it was."""
    zoo.check_test(
        test,
        draw,
        broken={
            "the text begins twice": programs.encode_chat,
            "the text does not begin at all": lambda tokenizer, question: programs.encode(tokenizer, question)[1:],
        },
        right={
            "no special tokens added": programs.encode,
            "the template's removed": programs.encode_stripped,
        },
    )
    question = "".join(draw.random.choices("abc d", k=draw.odd(7, 15)))
    found = expect.sequence(call(mended, ToyTokenizer(), question), "the mended ids")
    begins = found.count(ToyTokenizer.bos_token_id)
    expect.that(begins == 1, f"beginning-of-text stands {begins} times in the mended ids; expected once")
    expect.that(
        found == programs.encode(ToyTokenizer(), question),
        "the mended ids differ from the chat's in another place",
    )
