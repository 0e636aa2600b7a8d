"""Checks of the exercises to notebook 11: page accounting, one step of a scheduler, goodput and the knee, padding."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import torch

from every_millisecond.checks import expect, programs, zoo
from every_millisecond.checks.call import call, call_raising
from every_millisecond.checks.draw import Answers, Draw
from every_millisecond.checks.exercise import exercise
from every_millisecond.checks.failure import CheckFailed
from every_millisecond.checks.toys import OutOfPages, Pool, ToyModel

CHAPTER = "11_batching_and_paging"


@exercise(CHAPTER, "page accounting")
def check_pages(append: Callable, release: Callable, draw: Draw) -> None:
    """Requests that come, grow, end and leave scattered pages; one that does not fit; the books after each step."""
    size, pages = draw.odd(5, 9), draw.odd(15, 19)
    pool = Pool(pages, size)
    filled: dict[str, int] = {}
    steps = [("a", size), ("b", 2 * size + 1), ("a", 1), ("b", size - 2), ("c", size - 1), ("a", size), ("c", 0)]
    for name, count in steps:
        _append(append, pool, filled, pages, name, count)
    for name, grow in (("b", "c"), ("a", "d")):
        call(release, pool, name)
        del filled[name]
        _check_books(pool, filled, pages, f"after release(pool, {name!r})")
        _append(append, pool, filled, pages, grow, 2 * size)
    free = len(pool.free)
    room = -filled["d"] % size + free * size
    state = _state(pool)
    why = f"{free} pages are free, and {room + 1} tokens need one more"
    call_raising(OutOfPages, append, pool, "d", room + 1, why=why)
    expect.that(
        _state(pool) == state,
        "append raised OutOfPages, but took pages or changed the books first. All or nothing: count before you take",
    )
    call_raising(OutOfPages, append, pool, "new", free * size + 1, why=why)
    expect.that("new" not in pool.tables, "append raised OutOfPages, but left a table for the request that did not fit")
    _append(append, pool, filled, pages, "d", room)


def _append(append: Callable, pool: Pool, filled: dict[str, int], pages: int, name: str, count: int) -> None:
    before = filled.get(name, 0)
    need = math.ceil((before + count) / pool.page_size) - math.ceil(before / pool.page_size)
    free = len(pool.free)
    try:
        slots = call(append, pool, name, count)
    except CheckFailed as failure:
        if "raised OutOfPages" not in str(failure):
            raise
        raise CheckFailed(
            f"append raised OutOfPages for {count} tokens of {name!r}, though {need} pages are needed and {free} are "
            "free: exactly enough is enough"
        ) from None
    filled[name] = before + count
    what = f"after {count} tokens for {name!r}, which had {before}, in pages of {pool.page_size},"
    _check_books(pool, filled, pages, what)
    slots = expect.sequence(slots, "the result of append")
    size, table = pool.page_size, pool.tables[name]
    want = [table[i // size] * size + i % size for i in range(before, before + count)]
    expect.that(
        slots == want,
        f"{what} the new slots are {slots}; expected {want} for the table {table}. "
        "The i-th token of a request lies in page table[i // page_size], wherever that page is",
    )


def _check_books(pool: Pool, filled: dict[str, int], pages: int, what: str) -> None:
    expect.that(
        set(pool.tables) == set(filled), f"{what} there are tables for {sorted(pool.tables)}; expected {sorted(filled)}"
    )
    expect.that(pool.filled == filled, f"{what} filled is {pool.filled}; expected {filled}")
    for name, tokens in filled.items():
        held, need = len(pool.tables[name]), -(-tokens // pool.page_size)
        expect.that(
            held == need,
            f"{what} request {name!r} holds {held} pages for {tokens} tokens; expected {need}. "
            "A page that is partly empty is filled first, and a full one needs no successor yet",
        )
    owners = [*pool.free, *(page for table in pool.tables.values() for page in table)]
    expect.that(
        len(owners) >= pages, f"{what} pages are lost ({pages - len(owners)} of {pages}): neither free nor in a table"
    )
    expect.that(
        sorted(owners) == list(range(pages)),
        f"{what} a page is twice in the books: it has two owners, or an owner and a place in the free list",
    )


def _state(pool: Pool) -> tuple:
    return sorted(pool.free), {name: list(table) for name, table in pool.tables.items()}, dict(pool.filled)


Queue = list[tuple[str, int]]


Case = tuple[Queue, Queue, int, int]  # running, waiting, places, budget


def _plan(
    running: Queue, waiting: Queue, places: int, budget: int, *, prompts_first: bool = False, whole: bool = False,
    free_decodes: bool = False, everybody: bool = False, nobody: bool = False, each: bool = False,
    shortest: bool = False, newest: bool = False, joiners_first: bool = False, one_prompt: bool = False,
    zeros: bool = False, stops: bool = False,
) -> dict[str, int]:  # fmt: skip
    """The plan, right unless one of the mistakes is asked for."""
    decodes, readers = ([r for r in running if (r[1] == 1) is one] for one in (True, False))
    joiners = [] if nobody else waiting[: None if everybody else places - len(running)]
    prompts = [*joiners, *readers] if joiners_first else [*readers[:: -1 if newest else 1], *joiners]
    if shortest:
        prompts.sort(key=lambda r: r[1])
    plan = {}
    order = [*readers, *decodes, *joiners] if prompts_first else [*decodes, *prompts]
    for name, left in order:
        if stops and left > budget:
            break
        count = left if each and left <= budget else min(left, budget)
        if (whole and count < left) or (one_prompt and any(n > 1 for n in plan.values())):
            count = 0
        if count or zeros:
            plan[name] = count
        decodes_now = (name, left) in decodes
        budget -= 0 if (each and not decodes_now) or (free_decodes and decodes_now) else count
    return plan


def _plan_answers(cases: list[Case]) -> Answers:
    def by(**mistake: bool) -> list[dict[str, int]]:
        return [_plan(*case, **mistake) for case in cases]

    return by(), {
        "Prompts are read before the decodes have their token: somebody who reads an answer waits.": by(
            prompts_first=True
        ),
        "A prompt that does not fit whole is left out; it is read in chunks.": by(whole=True),
        "The plan ends at a prompt that does not fit whole; it is read in chunks.": by(stops=True),
        "The decodes' tokens are part of the budget.": by(free_decodes=True),
        "Not everybody who waits has a place.": by(everybody=True),
        "Nobody joins, though a place and budget are left.": by(nobody=True),
        "The budget is for all together: what one has taken, the next cannot have.": by(each=True),
        "The shortest prompt is read first; first come, first served, or a long one waits for ever.": by(shortest=True),
        "The newest reader comes first. The oldest does: the lists are in order.": by(newest=True),
        "Those who wait are served before those who run and read.": by(joiners_first=True),
        "Only one prompt is read in a step. While budget is left, the next one is read, too.": by(one_prompt=True),
        "Nobody computes 0 tokens: leave out who gets nothing.": by(zeros=True),
    }  # fmt: skip


@exercise(CHAPTER, "one step of the scheduler")
def check_plan_step(learners: Callable, draw: Draw) -> None:
    """Budget left for a chunk, for none, for everybody; no place free; nobody running; a prompt of one token."""
    cases = draw.until(lambda: _queues(draw), lambda drawn: [_plan_answers(drawn)])
    found = [expect.kind(call(learners, *case), dict, "the plan") for case in cases]
    want, mistakes = _plan_answers(cases)
    told = [_told_plan(*x) for x in zip(found, want, cases, strict=True)]
    expect.all_alike([dict(plan) for plan in found], want, mistakes, told)


def _queues(draw: Draw) -> list[Case]:
    cases = []
    for case in range(6):
        names = iter(draw.random.sample("abcdefghijklmnop", 16))
        decoding = [(next(names), 1) for _ in range(draw.integer(2, 4))]
        reading = [(next(names), draw.odd(15, 41)) for _ in range(2)]
        running = [decoding[0], reading[0], *decoding[1:], reading[1]]
        waiting = [(next(names), n) for n in (draw.odd(15, 41), 1, draw.odd(15, 41), 3)]
        places = len(running) + 2
        all_running = len(decoding) + reading[0][1] + reading[1][1]
        budget = all_running + draw.integer(3, 9)  # the first of the waiting gets a chunk
        if case == 1:
            budget = len(decoding) + draw.integer(3, 9)  # the first reader gets a chunk
        elif case == 2:
            budget = places  # hardly anything is left
        elif case == 3:
            places, budget = len(running), all_running + 50
        elif case == 4:
            running, places, budget = [], 3, waiting[0][1] + 9
        elif case == 5:
            budget = all_running + 200
        cases.append((running, waiting, places, budget))
    return [*cases, ([("a", 1), ("b", 1)], [("c", 5)], 3, 2)]


def _told_plan(found: dict, want: dict[str, int], case: Case) -> str:
    running, waiting, places, budget = case
    total = sum(expect.whole(count, "a number of tokens") for count in found.values())
    hints = {
        "Who runs and has read the prompt computes one token in every step. ": any(
            found.get(name) != 1 for name, left in running if left == 1
        ),
        "Not everybody who waits has a place. ": len(set(found) | {name for name, _ in running}) > places,
        f"The budget is exceeded: {total} tokens. ": total > budget,
    }
    hint = next((hint for hint, holds in hints.items() if holds), "")
    given = f"running {running}, waiting {waiting}, {places} places, budget {budget}: the plan is {found}"
    return f"{hint}{given}; expected {want}"[:590]


Requests = list[tuple[float, list[float]]]  # when each arrived, and when its tokens came


def _goodput(
    requests: Requests, seconds: float, first_ms: float, gap_ms: float, gap: Callable | None = None,
    first: Callable | None = None,
) -> float:  # fmt: skip
    gap = gap or (lambda arrived, t: (t[-1] - t[0]) / (len(t) - 1) if len(t) > 1 else 0)
    first = first or (lambda arrived, t: t[0] - arrived)
    return sum(bool(t) and first(a, t) <= first_ms and gap(a, t) <= gap_ms for a, t in requests) / seconds


def _load_test(draw: Draw) -> tuple[Requests, float, float, float]:
    """Requests of all kinds, so many of each that every mistake gives another number. All in quarters: exact."""
    first_ms, gap_ms, seconds = draw.integer(800, 1600) / 4, draw.integer(15, 30) * 2.0, draw.number(20, 40)
    kinds = [  # first token and gap as shares of their limits, tokens, how many
        (0.3, 0.6, 41, 3), (0.9, 3.0, 1, 5), (1.5, 0.5, 7, 9), (0.5, 1.05, 6, 17), (0.8, 0.9, 3, 33), (0.6, 1.6, 5, 65),
        (1.0, 0.5, 3, 129), (0.5, 1.0, 5, 257),
    ]  # fmt: skip
    requests: Requests = []
    for first, gap, tokens, count in kinds:
        for _ in range(count):
            arrived = float(draw.integer(1000, 90_000))
            wait = first * first_ms * (1 if first == 1 else draw.number(0.95, 1.05))
            begin = arrived + round(4 * wait) / 4
            requests.append((arrived, [begin + (i + 0.5 * (i % 2)) * gap * gap_ms for i in range(tokens)]))
    requests += [(float(draw.integer(0, 100)), []) for _ in range(2)]
    return draw.shuffled(requests), seconds, first_ms, gap_ms


def _goodput_answers(*args) -> Answers:
    requests, seconds, first_ms, gap_ms = args
    want, answered = _goodput(*args), [r for r in requests if r[1]]

    def mean(t: list[float]) -> float:
        return (t[-1] - t[0]) / (len(t) - 1) if len(t) > 1 else 0

    return want, {
        "That is throughput: all finished requests, in time or not.": len(answered) / seconds,
        "That is a count; goodput is requests per second.": want * seconds,
        "That is a share of the requests; goodput is requests per second.": want * seconds / len(requests),
        "Only the first token is looked at.": _goodput(*args, gap=lambda a, t: 0),
        "Only the gaps are looked at.": _goodput(*args, first=lambda a, t: 0),
        "The first token's wait counts from the arrival of its request.": _goodput(*args, first=lambda a, t: t[0]),
        "n tokens have n - 1 gaps between them.": _goodput(*args, gap=lambda a, t: mean(t) * (len(t) - 1) / len(t)),
        "The wait for the first token is no gap between tokens.": _goodput(
            *args, gap=lambda a, t: (t[-1] - a) / len(t)
        ),
        "The mean gap is judged, not each gap.": _goodput(
            *args, gap=lambda a, t: max((y - x for x, y in itertools.pairwise(t)), default=0)
        ),
        "An answer of one token has no gap, and can be in time.": _goodput(
            *args, gap=lambda a, t: mean(t) if len(t) > 1 else 1e9
        ),
        "A first token exactly at its limit is in time.": _goodput(
            *args, first=lambda a, t: 1e9 if t[0] - a == first_ms else t[0] - a
        ),
        "A mean gap exactly at its limit is in time.": _goodput(
            *args, gap=lambda a, t: 1e9 if mean(t) == gap_ms else mean(t)
        ),
        "A first token or a mean gap exactly at its limit is in time.": _goodput(
            *args,
            first=lambda a, t: 1e9 if t[0] - a == first_ms else t[0] - a,
            gap=lambda a, t: 1e9 if mean(t) == gap_ms else mean(t),
        ),
    }  # fmt: skip


@exercise(CHAPTER, "goodput and the knee")
def check_knee(goodput: Callable, knee: Callable, draw: Draw) -> None:
    """All kinds of requests; then sweeps in any order, with a lucky run after the knee, and none before it."""
    args = draw.until(lambda: _load_test(draw), lambda drawn: [_goodput_answers(*drawn)])
    want, mistakes = _goodput_answers(*args)
    expect.near(call(goodput, *args), want, "the goodput", mistakes=mistakes)
    for lucky in (True, False):
        runs, share = draw.until(lambda lucky=lucky: _sweep(draw, lucky), lambda drawn: [_knee_answers(*drawn)])
        want, mistakes = _knee_answers(runs, share)
        found = call(knee, runs, share)
        expect.that(found is not None, f"the knee is None; expected {want:g}, below which every run keeps up")
        expect.near(found, want, f"for share={share}, the knee", mistakes=mistakes)
    twice = [(2.0, 2.0), (4.0, 4.0), (8.0, 8.0), (8.0, 4.0)]
    for runs_twice in (twice, twice[::-1]):
        found = call(knee, runs_twice, share)
        expect.that(
            found == 4, f"two runs were made at a load of 8, and one fell behind: the knee is {found}; expected 4"
        )
    slow = [(load, 0.5 * load) for load, _ in runs]
    found = call(knee, slow, share)
    expect.that(found is None, f"the smallest load already falls behind, but the knee is {found!r}; expected None")
    found = call(knee, [(load, load) for load, _ in runs], share)
    expect.near(found, max(load for load, _ in runs), "where every run keeps up, the knee")


def _sweep(draw: Draw, lucky: bool) -> tuple[list[tuple[float, float]], float]:
    """Runs in any order, and a share that the last run before the knee reaches exactly. All in eighths: exact."""
    loads = [draw.integer(8 * 2**i - 2**i, 8 * 2**i + 2**i) / 8 for i in range(7)]
    good, share = draw.integer(2, 4), draw.random.choice((13, 14)) / 16
    rates = [0.95 * load if i < good else 0.7 * load for i, load in enumerate(loads)]
    rates[good - 1] = share * loads[good - 1]
    if lucky:
        rates[good + 1] = 0.97 * loads[good + 1]
    return draw.shuffled(zip(loads, rates, strict=True)), share


def _knee_answers(runs: list[tuple[float, float]], share: float) -> Answers:
    keeps = [(load, good) for load, good in sorted(runs) if good >= share * load]
    behind = min(load for load, good in runs if good < share * load)
    want = max(load for load, _ in keeps if load < behind)
    lucky = {"A run after the first that fell behind was lucky: every smaller load must keep up, too.": keeps[-1][0]}
    return want, {
        "That is the load with the largest goodput; it may already fall far behind what arrives.": max(
            runs, key=lambda run: run[1]
        )[0],
        "That is the first load that falls behind; asked for is the last that does not.": behind,
        "That is a goodput; asked for is the load.": dict(runs)[want],
        "A goodput of exactly the share of its load keeps up.": max(load for load, _ in keeps if load < want),
        **(lucky if keeps[-1][0] > behind else {}),
    }


def _right_padded(model, prompts: list[list[int]]) -> list[int]:
    longest = max(map(len, prompts))
    logits = model(torch.tensor([prompt + [0] * (longest - len(prompt)) for prompt in prompts]))
    return [int(row[len(prompt) - 1].argmax()) for row, prompt in zip(logits, prompts, strict=True)]


def _padded_with_its_last(model, prompts: list[list[int]]) -> list[int]:
    longest = max(map(len, prompts))
    choices = model(torch.tensor([prompt + prompt[-1:] * (longest - len(prompt)) for prompt in prompts])).argmax(-1)
    return choices[range(len(prompts)), [len(prompt) - 1 for prompt in prompts]].tolist()


def _one_by_one(model, prompts: list[list[int]]) -> list[int]:
    return [int(model(torch.tensor([prompt]))[0, -1].argmax()) for prompt in prompts]


def _left_padded(model, prompts: list[list[int]]) -> list[int]:
    longest = max(map(len, prompts))
    logits = model(torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts]))
    return logits[:, -1].argmax(-1).tolist()


def _one_early(model, prompts: list[list[int]]) -> list[int]:
    logits = [model(torch.tensor([prompt]))[0] for prompt in prompts]
    return [int(row[-2 if len(row) > 1 else -1].argmax()) for row in logits]


@exercise(CHAPTER, "the padding that was read")
def check_next_tokens(test: Callable, mended: Callable, draw: Draw) -> None:
    """Prompts of different lengths, the longest not first, in one pass."""
    zoo.check_test(
        test,
        draw,
        broken={
            "a shorter row is read at its padding": programs.next_tokens,
            "padding on the left, without a mask, changes what a row has read": _left_padded,
            "every row is read one position early, alone as well": _one_early,
        },
        right={
            "the last real position of each row": _right_padded,
            "padded with its last token": _padded_with_its_last,
        },
    )
    for _ in range(3):
        lengths = [draw.odd(3, 5), draw.odd(7, 9), draw.odd(11, 13), draw.odd(1, 3)]
        prompts = [[draw.integer(0, 90) for _ in range(n)] for n in lengths]
        prompts[0][-1] = 0  # a token like any other
        model = ToyModel()
        found = expect.items(call(mended, model, prompts), len(prompts), "the mended result", "one token per prompt")
        calls = model.calls
        want = _one_by_one(ToyModel(), prompts)
        wrong = [n for n, a, b in zip(lengths, found, want, strict=True) if expect.whole(a, "a token") != b]
        expect.that(
            not wrong,
            f"prompts of {lengths} tokens: the rows of {wrong} tokens get another token than alone. "
            "Which position of a padded row predicts its next token? And is token 0 taken for padding?",
        )
        expect.that(
            calls == 1, f"the model was called {calls} times for {len(prompts)} prompts; expected one pass for all"
        )
