"""Checks of the exercises to notebook 10: acceptance, residual, best gamma, prompt lookup, a test of rules."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from every_millisecond.checks import expect, programs, zoo
from every_millisecond.checks.call import call
from every_millisecond.checks.draw import Answers, Draw
from every_millisecond.checks.exercise import exercise

CHAPTER = "10_speculative_decoding"


@exercise(CHAPTER, "the acceptance rule")
def check_count_accepted(learners: Callable, draw: Draw) -> None:
    """Many drafts; the same under other uniforms; a token that the target rules out; no draft."""
    cases = draw.until(lambda: _drafts(draw), lambda drawn: [_count_answers(drawn)])
    found = [expect.whole(call(learners, *case), "the count") for case in cases]
    want, mistakes = _count_answers(cases)
    half = len(cases) // 2
    if found != want and found[:half] == found[half:]:
        mistakes |= {
            "The answer stays the same whatever the uniforms are. Whether a token is kept is drawn, not decided by a "
            "constant: it stands if u < p / q.": found
        }
    expect.all_alike(found, want, mistakes, [_told_count(*told) for told in zip(found, want, cases, strict=True)])
    _check_edges(learners, draw)


def _drafts(draw: Draw) -> list[tuple]:
    cases = [_draft(draw) for _ in range(40)]
    return cases + [(*case[:3], _uniforms(draw, *case[:3])) for case in cases]


def _count_answers(cases: list[tuple]) -> Answers:
    ways = {
        "That is the greedy rule, which compares the token with the target's first choice. Here the token is kept "
        "with probability min(1, p / q).": lambda t, q, p, u: t == p[:-1].argmax(-1),
        "Row i + 1 of the target is compared with token i: the logits are read one late.": lambda t, q, p, u: (
            u < _of(p[1:], t) / _of(q, t)
        ),
        "p / q is upside down: the target's probability stands above the draft's.": lambda t, q, p, u: (
            u < _of(q, t) / _of(p[:-1], t)
        ),
        "u is compared with p alone; the draft's q is missing.": lambda t, q, p, u: u < _of(p[:-1], t),
        "Those are the largest probabilities of the rows; the rule asks for those of the drafted token.": (
            lambda t, q, p, u: u < p[:-1].amax(-1) / q.amax(-1)
        ),
        "It is kept when u is the larger: then likely tokens are refused.": lambda t, q, p, u: (
            u > _of(p[:-1], t) / _of(q, t)
        ),
    }
    wrong = {name: [_prefix(way(*case)) for case in cases] for name, way in ways.items()}
    wrong[
        "Every kept token is counted, those after the first refused one too. They were drafted after a token that is "
        "not there."
    ] = [int(_kept(*case).sum()) for case in cases]
    wrong["The first refused token is counted, too."] = [min(_prefix(_kept(*case)) + 1, len(case[0])) for case in cases]
    return [_prefix(_kept(*case)) for case in cases], wrong


def _check_edges(learners: Callable, draw: Draw) -> None:
    tokens, q, p, uniforms = _draft(draw)
    p[0, tokens[0]] = 0
    p[0] /= p[0].sum()
    uniforms[0] = 0
    count = expect.whole(call(learners, tokens, q, p, uniforms), "the count")
    expect.that(
        count == 0,
        f"{count} tokens kept; expected 0: the target gives the first one no probability, and u is 0. "
        "Keep it if u < p / q, not if u <= p / q",
    )
    none = call(learners, tokens[:0], q[:0], p[:1], uniforms[:0])
    expect.that(none == 0, f"{none} tokens of an empty draft are kept; expected 0")


def _draft(draw: Draw) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """tokens [gamma], draft [gamma, vocab], target [gamma + 1, vocab], uniforms [gamma]."""
    gamma, vocab = draw.odd(3, 7), draw.odd(9, 15)
    target = (1.2 * draw.normal(gamma + 1, vocab)).softmax(-1)
    draft = (target[:-1].log() + 1.2 * draw.normal(gamma, vocab)).softmax(-1)
    tokens = torch.multinomial(draft, 1, generator=draw.generator)[:, 0]
    return tokens, draft, target, _uniforms(draw, tokens, draft, target)


def _uniforms(draw: Draw, tokens: Tensor, draft: Tensor, target: Tensor) -> Tensor:
    """Not so near to p / q that rounding decides."""
    ratio, uniforms = _of(target[:-1], tokens) / _of(draft, tokens), draw.uniform(len(tokens))
    return torch.where((uniforms - ratio).abs() < 1e-3, 0.9 * ratio.clamp(max=1), uniforms)


def _of(probs: Tensor, tokens: Tensor) -> Tensor:
    """The tokens' own probabilities [gamma]."""
    return probs.gather(1, tokens[:, None])[:, 0]


def _kept(tokens: Tensor, draft: Tensor, target: Tensor, uniforms: Tensor) -> Tensor:
    return uniforms * _of(draft, tokens) < _of(target[:-1], tokens)


def _prefix(kept: Tensor) -> int:
    return int(kept.long().cumprod(0).sum())


def _told_count(found: int, want: int, case: tuple[Tensor, Tensor, Tensor, Tensor]) -> str:
    tokens, draft, target, uniforms = case
    ratios = ", ".join(f"{r:.2f}" for r in _of(target[:-1], tokens) / _of(draft, tokens))
    return (
        f"{found} tokens kept; expected {want}. p / q of the tokens: {ratios}; u: "
        f"{', '.join(f'{u:.2f}' for u in uniforms)}. All before the first with u >= p / q stand"
    )


@exercise(CHAPTER, "the residual distribution")
def check_residual(learners: Callable, draw: Draw) -> None:
    """Different p and q, p with zeros, and p equal to q."""
    for zeros in (0, draw.integer(2, 4)):
        p, q = draw.until(lambda zeros=zeros: _two(draw, zeros), lambda drawn: [_residual_answers(*drawn)], rel=1e-2)
        found = expect.tensor(call(learners, p, q), "the residual", shape=p.shape, finite=False)
        want, mistakes = _residual_answers(p, q)
        expect.that(
            not (found < -1e-3).any(),
            f"the residual: {found.min().item():.4g} at a token; expected 0 or more. Where q is the larger, nothing is "
            "missing: cut off at 0, and then divide by the sum",
        )
        expect.close(found, want, "the residual", mistakes=mistakes, dtype=False)
    p = torch.full((8,), 0.125)
    q = p + torch.tensor(draw.shuffled([2.0**-11, -(2.0**-11), *[0.0] * 6]))
    nearly = {"They differ by 0.0005, and that is left over: is nearly equal taken for equal?": p}
    expect.close(
        call(learners, p, q), (p > q).float(), "the residual of p and q that are nearly equal", mistakes=nearly,
        dtype=False,
    )  # fmt: skip
    same = draw.until(  # what p and q share is not 1 when it is added up
        lambda: draw.normal(draw.odd(9, 15)).softmax(-1), lambda drawn: [], fit=lambda drawn: 1 - drawn.sum() != 0
    )
    found = expect.tensor(call(learners, same, same.clone()), "the residual of p = q", shape=same.shape, finite=False)
    expect.that(not found.isnan().any(), "the residual of p = q holds NaN: nothing is left over, and 0 / 0. Return p")
    expect.close(
        found, same, "the residual of p = q, which is p", dtype=False,
        mistakes={
            "All is 0: add up what is left over, and ask whether that is 0. 1 - sum(min(p, q)) seldom is, by "
            "rounding.": torch.zeros_like(same)
        },
    )  # fmt: skip


def _two(draw: Draw, zeros: int) -> tuple[Tensor, Tensor]:
    """p, whose first `zeros` tokens are impossible, and q."""
    p, q = (1.5 * draw.normal(2, draw.odd(9, 31))).softmax(-1)
    p[:zeros] = 0
    return p / p.sum(), q


def _residual_answers(p: Tensor, q: Tensor) -> Answers:
    excess = (p - q).clamp(min=0)
    return _share(excess), {
        "It is p itself. What p and q share has been given out with the kept tokens; only the rest of p is missing.": p,
        "It does not sum to 1: divide by its sum.": excess,
        "It is max(0, q - p), upside down: what the draft has too much is what must not come.": _share(
            (q - p).clamp(min=0)
        ),
        "It is the distance |p - q|. Where q is the larger, nothing is missing: cut off at 0.": _share((p - q).abs()),
        "It is a softmax: differences of probabilities are not logits. Cut off at 0 and divide by the sum.": (
            p - q
        ).softmax(-1),
        "It is a softmax: probabilities are not logits. Cut off at 0 and divide by the sum.": excess.softmax(-1),
        "It is divided by the vocabulary, not by its sum.": excess / len(p),
    }


def _share(excess: Tensor) -> Tensor:
    return excess / excess.sum()


@exercise(CHAPTER, "the best gamma")
def check_best_gamma(learners: Callable, draw: Draw) -> None:
    """Cheap and expensive drafts, good and bad ones; acceptance 0 and 1."""
    cases = draw.until(lambda: _gammas(draw), lambda drawn: [_gamma_answers(drawn)])
    found = [expect.whole(call(learners, *case), "gamma") for case in cases]
    want, mistakes = _gamma_answers(cases)
    expect.all_alike(
        found, want, mistakes,
        [
            f"gamma is {gamma} for alpha={alpha:.3f}, cost={cost:.3f}, max_gamma={most}; expected {best}"
            for gamma, best, (alpha, cost, most) in zip(found, want, cases, strict=True)
        ],
    )  # fmt: skip


def _gammas(draw: Draw) -> list[tuple[float, float, int]]:
    """Alpha, cost and max_gamma; rounding decides nowhere."""
    cases = [(0.0, draw.number(0.1, 0.3), 7), (1.0, draw.number(0.1, 0.3), draw.odd(5, 9))]
    while len(cases) < 60:
        case = draw.number(0.2, 0.97), draw.number(0.02, 0.6), draw.integer(6, 12)
        gains = sorted((_gain(gamma, *case[:2]) for gamma in range(case[2] + 1)), reverse=True)
        if gains[0] > gains[1] * (1 + 1e-6):
            cases.append(case)
    return cases


def _gamma_answers(cases: list[tuple[float, float, int]]) -> Answers:
    gains = {
        "Is a token accepted with alpha at every place, even after a refused one? The i-th stands only if all "
        "before it do: alpha ** i.": lambda g, alpha, c: (1 + g * alpha) / (g * c + 1),
        "A cycle gives one token more than it accepts: the target's own. Its tokens are 1 + alpha + ... + "
        "alpha ** gamma.": lambda g, alpha, c: (_tokens(g, alpha) - 1) / (g * c + 1),
        "The sum ends too early: its last term is alpha ** gamma, so it has gamma + 1 of them.": lambda g, alpha, c: (
            sum(alpha**i for i in range(g)) / (g * c + 1)
        ),
        "Is a draft step taken once per cycle? It is taken gamma times.": lambda g, alpha, c: (
            _tokens(g, alpha) / (c + 1)
        ),
        "That is the best of the tokens minus the cost; the speed-up is their quotient.": lambda g, alpha, c: (
            _tokens(g, alpha) - (g * c + 1)
        ),
    }
    wrong = {
        "It is always max_gamma: does a draft step cost nothing?": [most for _, _, most in cases],
        "It is never 0, though some drafts cost more than they save: try gamma = 0, too.": [
            _best(_gain, *case, least=1) for case in cases
        ],
        "max_gamma itself is never tried; it is included.": [
            _best(_gain, alpha, cost, most - 1) for alpha, cost, most in cases
        ],
        "Is the target's own pass counted? A cycle takes gamma * cost + 1.": [
            _best(lambda g, alpha, c: _tokens(g, alpha) / (g * c), *case, least=1) for case in cases
        ],
    }
    wrong |= {name: [_best(gain, *case) for case in cases] for name, gain in gains.items()}
    return [_best(_gain, *case) for case in cases], wrong


def _tokens(gamma: int, alpha: float) -> float:
    return sum(alpha**i for i in range(gamma + 1))


def _gain(gamma: int, alpha: float, cost: float) -> float:
    return _tokens(gamma, alpha) / (gamma * cost + 1)


def _best(gain: Callable, alpha: float, cost: float, most: int, least: int = 0) -> int:
    return max(range(least, most + 1), key=lambda gamma: gain(gamma, alpha, cost))


@exercise(CHAPTER, "prompt lookup")
def check_prompt_lookup(learners: Callable, draw: Draw) -> None:
    """Texts of few different ids, so that everything repeats; very short ones."""
    short = [([7, 7], 5, 3), ([3, 8, 3], 4, 2), ([3, 8, 3, 8], 9, 4)]  # shorter than max_ngram, and yet they repeat
    cases = draw.until(lambda: [*(_text(draw) for _ in range(80)), *short], lambda drawn: [_lookup_answers(drawn)])
    cases += [([7], 3, 4), ([7, 9], 5, 4), ([7, 7], 2, 3), ([5] * 4, 2, 3), ([1, 2, 3, 4], 2, 3)]
    found = [expect.sequence(call(learners, *case), "the draft") for case in cases]
    want, mistakes = _lookup_answers(cases)
    expect.all_alike(
        found, want, mistakes,
        [
            f"for text={text}, max_ngram={most}, count={count} the draft is {draft}; expected {right}"
            for draft, right, (text, most, count) in zip(found, want, cases, strict=True)
        ],
    )  # fmt: skip


def _text(draw: Draw) -> tuple[list[int], int, int]:
    words = draw.random.sample([1, 2, 11, 12, 21, 111, 112], draw.integer(3, 6))  # as digits they run together
    return draw.random.choices(words, k=draw.odd(9, 41)), draw.integer(1, 4), draw.integer(2, 6)


def _lookup_answers(cases: list[tuple[list[int], int, int]]) -> Answers:
    def by(**mistake: bool) -> list:
        return [_lookup(*case, **mistake) for case in cases]

    return by(), {
        "The end of the text was found in its own place, where nothing follows. Look for an earlier occurrence.": by(
            itself=True
        ),
        "It is the first occurrence; the latest earlier one was asked for.": by(first=True),
        "Where the text is shorter than max_ngram nothing is found: text[-n:] is the whole text then. Begin with an n "
        "that fits.": by(too_long=True),
        "The short n-grams are tried first. A longer match is better: start with max_ngram.": by(shortest=True),
        "Only n = max_ngram is tried. If it does not occur earlier, try one token less, down to 1.": by(only=True),
        "The match itself is in the draft; propose what follows it.": by(match_too=True),
        "One token after the match is left out.": by(skip=True),
        "Are ids looked for as text? In '11 1' stands '1 1'. Compare lists of ids.": [
            _lookup_as_text(*case) for case in cases
        ],
        "More than `count` tokens are proposed.": by(uncapped=True),
        "Occurrences that overlap the end of the text are left out. They count, too: 5 5 5 goes on with 5.": by(
            apart=True
        ),
    }


def _lookup(
    text: list[int], max_ngram: int, count: int, *, itself: bool = False, first: bool = False, shortest: bool = False,
    only: bool = False, match_too: bool = False, skip: bool = False, uncapped: bool = False, apart: bool = False,
    too_long: bool = False,
) -> list[int]:  # fmt: skip
    """The draft, right unless one of the mistakes is asked for."""
    sizes = range(max_ngram, max_ngram - 1 if only else 0, -1)
    if too_long and max_ngram > len(text):
        return []
    for n in reversed(sizes) if shortest else sizes:
        last = len(text) - n - (0 if itself else n if apart else 1)  # the last start that is looked at
        starts = [start for start in range(last + 1) if text[start : start + n] == text[-n:]]
        if n <= len(text) and starts:
            begin = (starts[0] if first else starts[-1]) + (0 if match_too else n) + skip
            return text[begin:] if uncapped else text[begin : begin + count]
    return []


def _lookup_as_text(text: list[int], max_ngram: int, count: int) -> list[int]:
    """The draft of someone who joins the ids by blanks and looks for a string."""
    for n in range(min(max_ngram, len(text) - 1), 0, -1):
        whole, ending = " ".join(map(str, text[:-1])), " ".join(map(str, text[-n:]))
        place = whole.rfind(ending)
        if place >= 0:
            start = whole[:place].count(" ")
            return text[start + n : start + n + count]
    return []


OTHER_NUMBERS = "with other random numbers: is the tolerance several standard errors wide?"


@exercise(CHAPTER, "a test that finds wrong rules")
def check_rule_test(test: Callable, draw: Draw) -> None:
    """The three that are shown, two that are not; right rules under ten streams of random numbers."""
    right = {"u q < p": _shifted(0.0)}
    right |= {f"{OTHER_NUMBERS} ({number})": _shifted(number / 9) for number in range(1, 9)}
    right |= {"p - min(p, q) as residual": _by_minimum}
    zoo.check_test(
        test,
        draw,
        broken={
            "it accepts against a constant and does not look at u": programs.constant,
            "a refused token is replaced from p, not from the residual": programs.no_residual,
            "token i is compared with row i + 1 of the target": programs.one_late,
            "after the first place everything is kept": _careless_later,
            "the residual is |p - q|": _distance_as_residual,
        },
        right=right,
    )


def _shifted(shift: float) -> Callable:
    return lambda *args: _right(*args, shift=shift)


def _right(place, tokens, uniforms, target, draft, *, shift: float):
    """Shifted round the circle, uniform numbers are as uniform as before, and others."""
    p, q = target[place], draft[place]
    return (uniforms + shift) % 1 * q[tokens] < p[tokens], programs.left_over(p, q)


def _by_minimum(place, tokens, uniforms, target, draft):
    p, q = target[place], draft[place]
    rest = p - p.minimum(q)
    return 1 - uniforms <= (p / q)[tokens].clamp(max=1), rest / rest.sum() if rest.any() else p


def _careless_later(place, tokens, uniforms, target, draft):
    kept, replacement = _right(place, tokens, uniforms, target, draft, shift=0.0)
    return kept | (place > 0), replacement


def _distance_as_residual(place, tokens, uniforms, target, draft):
    kept, replacement = _right(place, tokens, uniforms, target, draft, shift=0.0)
    distance = (target[place] - draft[place]).abs()
    return kept, distance / distance.sum() if distance.any() else replacement
