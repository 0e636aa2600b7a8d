"""Checks of the exercises to notebook 13: a regression gate, the order of a checklist."""

from __future__ import annotations

import math
from collections.abc import Callable

from every_millisecond.checks import expect
from every_millisecond.checks.call import call, call_raising
from every_millisecond.checks.draw import Answers, Draw
from every_millisecond.checks.exercise import exercise

CHAPTER = "13_two_seconds_to_200_ms"
ALL = "all cases"
FASTER = 1.5  # the speed-up of a case that nothing is wrong with
TOKENS = {"short": 31, "medium": 255, "long": 767, "repeated": 47}  # scored


@exercise(CHAPTER, "a regression gate")
def check_gate(learners: Callable, draw: Draw) -> None:
    """Sound and faulty optimisations, one fault each, from the plain to the treacherous."""
    limits = 0.05, 1.2

    def expects(cases: list[dict], want: set[str], why: str, limits: tuple[float, float] = limits) -> None:
        draw.random.shuffle(cases)
        found = expect.kind(call(learners, cases, *limits), (list, tuple, set), "the result")
        expect.that(
            set(found) == want,
            f"the gate stops {sorted(map(str, found)) or 'nothing'}; expected {sorted(want) or 'nothing'}. {why}",
        )

    expects(_cases(draw), set(), "Nothing is wrong here, and every case is faster. Is the speed-up before over after?")
    expects(_cases(draw, long=(0.0, 0.9)), {"long"}, "One case got slower; every case is judged by its own speed-up")
    expects(_cases(draw, change=0.15), {ALL}, "The perplexity rose by 15%, over all cases together")
    expects(_cases(draw, change=-0.2), set(), "The perplexity fell. That is no regression")
    expects(
        _cases(draw, ppl=40, change=0.025), set(),
        "Perplexity 40 rose to 41, by 2.5%: max_increase is relative",
    )  # fmt: skip
    expects(
        _cases(draw, ppl=33, change=0.07), {ALL},
        "The perplexity rose by 7%, and its logarithm, the loss per token, by 2%. The limit is for the perplexity",
    )  # fmt: skip
    expects(_cases(draw, change=0.053), {ALL}, "The perplexity rose by 5.3% where 5% are allowed. Is it rounded first?")
    expects(
        _cases(draw, change=0.55), {ALL},
        "The perplexity rose by 55% where 50% is allowed. Is a difference of losses compared with the limit? The ratio "
        "of perplexities is exp of it",
        limits=(0.5, 1.2),
    )  # fmt: skip
    same = _cases(draw, change=0.0)
    for case in same:
        case["after_ms"] = list(case["before_ms"])
    expects(
        same, set(), "Nothing changed, and no change was asked for: a limit that is just met is kept", limits=(0.0, 1.0)
    )
    expects(
        _cases(draw, long=(0.3, 0.9)), {"long", ALL},
        "The slowest case is also the one that got worse: it fails by its name, and counts in the perplexity, too",
    )  # fmt: skip
    _check_pooling(draw, expects)
    _check_missing(draw, expects)
    _check_times(draw, expects)
    one = _case(draw, "one token", 0, 12.0, 0.0, FASTER)
    expects([one, *_cases(draw, change=0.15)], {ALL}, "A case of one token scores none, and says nothing of perplexity")
    expects([one], set(), "A case of one token scores none, and says nothing of perplexity")
    slow = _case(draw, "one token", 0, 12.0, 0.0, 0.9)
    expects([slow, *_cases(draw)], {"one token"}, "A case of one token scores none, but it got slower: that is judged")
    call_raising(ValueError, learners, [], *limits, why="a gate that has tested nothing must not let it pass")


def _check_pooling(draw: Draw, expects: Callable) -> None:
    """One long text against several short ones."""
    short = [_case(draw, f"short {i}", 31, 25.0, -0.05, FASTER) for i in range(4)]
    expects(
        [_case(draw, "long", 901, 12.0, 0.09, FASTER), *short], {ALL},
        "The long text got worse, some short ones better. A mean over cases counts 31 tokens as much as 901: add up "
        "the losses and the tokens of all cases first",
    )  # fmt: skip
    short = [_case(draw, f"short {i}", 31, 40.0, 0.25, FASTER) for i in range(4)]
    expects(
        [_case(draw, "long", 901, 12.0, -0.01, FASTER), *short], set(),
        "Some short texts got worse, but over all tokens the perplexity rose by 2%. Is it judged case by case?",
    )  # fmt: skip
    expects(
        [_case(draw, "worse", 401, 12.0, 0.6, FASTER), _case(draw, "better", 401, 12.0, -0.3, FASTER)], set(),
        "One text's perplexity rose by 60%, another's of the same length fell by 30%: over all tokens it rose by 6%, "
        "where 10% are allowed. Add up losses, not perplexities, not even weighted by their tokens",
        limits=(0.1, 1.2),
    )  # fmt: skip


def _check_missing(draw: Draw, expects: Callable) -> None:
    """Losses that are no numbers, and a case that could not be done."""
    why = "The loss in one case is {}: that case fails by its name, and the perplexity is judged over the others"
    cases = _cases(draw)
    cases[1]["after_nll"] = math.nan
    expects(
        cases, {cases[1]["name"]},
        why.format("NaN") + ". Comparing with NaN is always False, so a plain comparison lets it pass",
    )  # fmt: skip
    cases = _cases(draw, change=0.15)
    cases[0]["after_nll"] = math.nan
    expects(
        cases, {cases[0]["name"], ALL},
        "One case is NaN, and the others rose by 15%. A sum with NaN in it is NaN, and hides them",
    )  # fmt: skip
    cases = _cases(draw, change=0.15)
    longest = max(cases, key=lambda case: case["tokens"])
    longest["after_nll"] = math.nan
    expects(
        cases, {longest["name"], ALL},
        "The longest case is NaN, and the others rose by 15%. It is left out whole: tokens and loss before, too",
    )  # fmt: skip
    for infinite in (math.inf, -math.inf):
        cases = _cases(draw)
        cases[1]["after_nll"] = infinite
        expects(cases, {cases[1]["name"]}, why.format("infinite"))
    cases = _cases(draw)
    cases[2] |= {"after_nll": None, "after_ms": []}
    expects(cases, {cases[2]["name"]}, "The optimised model could not do one case (its after_nll is None): it fails")
    for case in cases:
        case |= {"after_nll": None, "after_ms": []}
    expects(cases, {case["name"] for case in cases}, "The optimised model could do none: every case fails by its name")


def _check_times(draw: Draw, expects: Callable) -> None:
    """Rounds with an outlier, and rounds on a machine that changes its pace."""
    unit = draw.number(5, 20)

    def with_times(before: list[float], after: list[float]) -> list[dict]:
        cases, order = _cases(draw), list(range(len(before)))
        draw.random.shuffle(order)
        cases[0] |= {"before_ms": [before[i] * unit for i in order], "after_ms": [after[i] * unit for i in order]}
        return cases

    expects(
        with_times([10.0] * 5, [9.3, 9.2, 9.1, 0.5, 0.6]), {"short"},
        "In three of five rounds a case was 1.1 times faster, in two it seems to have ended at once. A mean follows "
        "those; the median does not",
    )  # fmt: skip
    expects(
        with_times([10.0] * 5, [5.1, 5.2, 5.3, 5.4, 90.0]), set(),
        "A case was twice as fast in all rounds but one. A mean, or the worst, follows that one; the median does not",
    )  # fmt: skip
    expects(
        with_times([10.0, 20.1, 30.0], [5.0, 30.0, 18.0]), set(),
        "The machine changed its pace between the rounds. Take the ratio within each round, and then the median of "
        "the ratios, not the ratio of two medians",
    )  # fmt: skip
    expects(
        with_times([10.0, 20.0, 31.0], [9.0, 15.0, 29.0]), {"short"},
        "The machine changed its pace between the rounds. Take the ratio within each round, and then the median of "
        "the ratios, not the ratio of two medians",
    )  # fmt: skip

    for after, want in (
        ([10.0, 9.1, 7.4, 5.0], set()),
        ([10.0, 9.1, 8.0, 5.0], {"short"}),
    ):  # ratios 1, 1.1, 1.35 or 1.25, 2
        expects(
            with_times([10.0] * 4, after), want,
            "With an even number of rounds the median lies between the two ratios in the middle",
        )  # fmt: skip


def _cases(draw: Draw, *, ppl: float = 12.0, change: float = 0.001, long: tuple[float, float] | None = None) -> list:
    """Four cases whose perplexity changed by `change`, all faster. long: change and speed-up of that one."""
    cases = []
    for name, tokens in TOKENS.items():
        own = long if long and name == "long" else (change, FASTER)
        cases.append(_case(draw, name, tokens, ppl, *own))
    return cases


def _case(draw: Draw, name: str, tokens: int, ppl: float, change: float, speedup: float) -> dict:
    ppl *= draw.number(0.99, 1.01)
    before = draw.numbers(5, 100, 130)
    return {
        "name": name,
        "tokens": tokens,
        "before_nll": tokens * math.log(ppl),
        "after_nll": tokens * math.log(ppl * (1 + change)),
        "before_ms": before,
        "after_ms": [ms / speedup * draw.number(0.98, 1.02) for ms in before],
    }


PARTS = ("prefill arithmetic", "prefill launches", "decode bytes", "decode launches", "text")
ITEMS = ("16 bits", "torch.compile", "INT4 weights", "INT8 KV cache", "FlashAttention", "speculation", "prefix cache")
LEAST = 0.05  # of the request as it is left


@exercise(CHAPTER, "the order of a stranger's checklist")
def check_order(learners: Callable, draw: Draw) -> None:
    """Many strangers' models; no items; none that may be had; one whose cost just fills the budget."""
    cases = draw.until(lambda: _strangers(draw), lambda drawn: [_order_answers(drawn)])
    found = [expect.sequence(call(learners, *case), "the order") for case in cases]
    want, mistakes = _order_answers(cases)
    told = [
        f"the order is {order}; expected {right}. It was asked for { {part: round(ms) for part, ms in parts.items()} }"
        f", budget {budget:.1f}, {len(items)} items"
        for order, right, (parts, items, budget) in zip(found, want, cases, strict=True)
    ]
    expect.all_alike(found, want, mistakes, told)


def _strangers(draw: Draw) -> list[tuple]:
    cases = []
    while len(cases) < 60:
        case = _stranger(draw)
        if _is_clear(*case):
            cases.append(case)
    parts, items, _ = cases[0]
    cases += [(parts, {}, 5.0), (parts, {name: (f, 3.0) for name, (f, _) in items.items()}, 1.0)]
    even = {
        "prefill arithmetic": 800,
        "prefill launches": 200,
        "decode bytes": 600,
        "decode launches": 300,
        "text": 100,
    }
    cases += [(even, {"16 bits": ({"prefill launches": 0.5}, cost)}, cost) for cost in (0.0, 1.0)]  # 5%, exactly
    return [*cases, *((parts, {"16 bits": ({"decode bytes": 0.5}, cost)}, 4.5) for cost in (4.5, 4.75))]


def _order_answers(cases: list[tuple]) -> Answers:
    untouched = (
        "Every gain is that of the untouched request. An item saves a share of what the items before it have left: "
        "work the gains out anew after each choice."
    )
    smallest = "The smallest factor comes first. A part that is hardly there cannot save much: compare milliseconds."
    overdrawn = "The budget of quality is overdrawn: costs add up over the items chosen."
    ways: dict[str, dict] = {
        untouched: {"once": True},
        f"{untouched} And stop below 5%.": {"once": True, "least": 0.0},
        smallest: {"by_factor": True},
        f"{smallest} And stop below 5%.": {"by_factor": True, "least": 0.0},
        f"{smallest} And stop where nothing is saved any more.": {"by_factor": True, "least": -math.inf},
        "Items that are hardly worth it are taken, too: stop below 5%.": {"least": 0.0},
        "Items that are hardly worth it, or make it slower, are taken, too: stop below 5%.": {"least": -math.inf},
        "5% are of what the request takes then, not of what it took at first.": {"of_first": True},
        f"{overdrawn} No cost is looked at.": {"budgeted": False},
        f"{overdrawn} Each is within it alone.": {"single": True},
        "A cost that just fills the budget does not exceed it.": {"strict": True},
        "An item that saves exactly 5% does not save less than 5%.": {"more": True},
        "The search ends at an item that costs too much. Leave that one out, and go on with the next best.": {
            "give_up": True
        },
        "A factor is what remains of a part: 0.3 saves 70%.": {"saves": True},
        "The item that saves most comes last.": {"turned": True},
    }
    return [_order(*case) for case in cases], {
        name: [_order(*case, **way) for case in cases] for name, way in ways.items()
    }


def _stranger(draw: Draw) -> tuple[dict[str, float], dict[str, tuple[dict[str, float], float]], float]:
    parts = {part: draw.number(20, 900) for part in PARTS}
    items = {}
    for name in draw.random.sample(ITEMS, draw.integer(5, 7)):
        touched = draw.random.sample(PARTS, draw.integer(1, 3))
        factors = {part: draw.number(0.15, 0.95) for part in touched}
        if draw.number(0, 1) < 0.3:
            factors[touched[0]] = draw.number(1.05, 1.4)  # some make a part slower
        items[name] = factors, draw.random.choice([0.0, draw.number(0.5, 5)])
    return parts, items, draw.number(2, 7)


def _order(
    parts: dict[str, float], items: dict, budget: float, *, once: bool = False, by_factor: bool = False,
    least: float = LEAST, of_first: bool = False, budgeted: bool = True, single: bool = False, give_up: bool = False,
    saves: bool = False, turned: bool = False, strict: bool = False, more: bool = False,
) -> list[str]:  # fmt: skip
    """The order, right unless one of the mistakes is asked for."""
    left, chosen, spent = dict(parts), [], 0.0
    while True:
        open_items = [name for name in items if name not in chosen]
        if budgeted and not give_up:
            costs = {name: (0 if single else spent) + items[name][1] for name in open_items}
            open_items = [name for name in open_items if costs[name] < budget or (costs[name] == budget and not strict)]
        gains = {name: _saved(parts if once else left, items[name][0], saves) for name in open_items}
        if not gains:
            break
        rank = (lambda name: -min(items[name][0].values())) if by_factor else gains.__getitem__
        best = max(gains, key=rank)
        whole = sum((parts if once or of_first else left).values())
        if gains[best] < least * whole or (more and gains[best] == least * whole):
            break
        if give_up and spent + items[best][1] > budget:
            break
        chosen.append(best)
        spent += items[best][1]
        for part, factor in items[best][0].items():
            left[part] *= 1 - factor if saves else factor
    return chosen[::-1] if turned else chosen


def _saved(left: dict[str, float], factors: dict[str, float], saves: bool = False) -> float:
    return sum(left[part] * (factor if saves else 1 - factor) for part, factor in factors.items())


def _is_clear(parts: dict[str, float], items: dict, budget: float) -> bool:
    """No choice hangs on rounding: neither between two items, nor at 5%, nor at the budget."""
    left, spent = dict(parts), 0.0
    for best in [*_order(parts, items, budget), None]:
        gains = {name: _saved(left, factors) for name, (factors, _) in items.items()}
        marks = [*sorted(gains.values()), LEAST * sum(left.values())]
        if any(abs(a - b) < 1e-6 for i, a in enumerate(marks) for b in marks[:i] if a or b):
            return False
        if any(abs(spent + cost - budget) < 1e-6 for _, cost in items.values()):
            return False
        if best is not None:
            spent += items[best][1]
            left = {part: ms * items[best][0].get(part, 1.0) for part, ms in left.items()}
    return True
