"""Checks of the exercises to notebook 11: page accounting, one step of a scheduler, goodput and the knee, padding."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch

from every_millisecond.checks import broken_chapters as broken
from every_millisecond.checks import expect, zoo
from every_millisecond.checks.call import call, call_raising
from every_millisecond.checks.draw import Draw
from every_millisecond.checks.exercise import exercise
from every_millisecond.checks.toy_serving import OutOfPages, Pool, ToyModel

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
    slots = call(append, pool, name, count)
    filled[name] = before + count
    what = f"after {count} tokens for {name!r}, which had {before}, in pages of {pool.page_size},"
    _check_books(pool, filled, pages, what)
    expect.kind(slots, (list, tuple), "the result of append")
    size, table = pool.page_size, pool.tables[name]
    want = [table[i // size] * size + i % size for i in range(before, before + count)]
    expect.that(
        list(slots) == want,
        f"{what} the new slots are {list(slots)}; expected {want} for the table {table}. "
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
    expect.that(len(owners) >= pages, f"{what} {pages - len(owners)} pages are lost: neither free nor in a table")
    expect.that(
        sorted(owners) == list(range(pages)),
        f"{what} a page is twice in the books: it has two owners, or an owner and a place in the free list",
    )


def _state(pool: Pool) -> tuple:
    return sorted(pool.free), {name: list(table) for name, table in pool.tables.items()}, dict(pool.filled)


Queue = list[tuple[str, int]]


def _plan(running: Queue, waiting: Queue, places: int, budget: int) -> dict[str, int]:
    plan = {name: 1 for name, left in running if left == 1}
    budget -= len(plan)
    for name, left in [r for r in running if r[1] > 1] + waiting[: places - len(running)]:
        if budget > 0:
            plan[name] = min(left, budget)
            budget -= plan[name]
    return plan


def _prompts_first(running: Queue, waiting: Queue, places: int, budget: int) -> dict[str, int]:
    plan = {}
    for name, left in sorted(running, key=lambda r: r[1] == 1) + waiting[: places - len(running)]:
        if budget > 0:
            plan[name] = min(left, budget)
            budget -= plan[name]
    return plan


def _whole_prompts(running: Queue, waiting: Queue, places: int, budget: int) -> dict[str, int]:
    plan = {name: 1 for name, left in running if left == 1}
    budget -= len(plan)
    for name, left in [r for r in running if r[1] > 1] + waiting[: places - len(running)]:
        if left <= budget:
            plan[name] = left
            budget -= left
    return plan


def _drop_empty(plan: dict) -> dict:
    return {name: count for name, count in plan.items() if count}


@exercise(CHAPTER, "one step of the scheduler")
def check_plan_step(learners: Callable, draw: Draw) -> None:
    """Budget left for a chunk, for none, for everybody; no place free; nobody running; a prompt of one token."""
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
        _check_plan(call(learners, running, waiting, places, budget), running, waiting, places, budget)
    running = [("a", 1), ("b", 1)]
    _check_plan(call(learners, running, [("c", 5)], 3, 2), running, [("c", 5)], 3, 2)


def _check_plan(found: object, running: Queue, waiting: Queue, places: int, budget: int) -> None:
    want = _plan(running, waiting, places, budget)
    expect.kind(found, dict, "the plan")
    given = f"running {running}, waiting {waiting}, {places} places, budget {budget}: the plan is {found}"
    if found == want:
        return
    total = sum(expect.whole(count, "a number of tokens") for count in found.values())
    mistakes = {
        "Nobody computes 0 tokens: leave out who gets nothing.": _drop_empty(found) == want,
        "Prompts are read before the decodes have their token: somebody who reads an answer waits.": found
        == _prompts_first(running, waiting, places, budget),
        "A prompt that does not fit whole is left out; it is read in chunks.": found
        == _whole_prompts(running, waiting, places, budget),
        "The decodes' tokens are part of the budget.": found
        == _plan(running, waiting, places, budget + sum(left == 1 for _, left in running)),
        "Not everybody who waits has a place.": len(set(found) | {name for name, _ in running}) > places,
        "Who runs and has read the prompt computes one token in every step.": any(
            found.get(name) != 1 for name, left in running if left == 1
        ),
        f"The budget is exceeded: {total} tokens.": total > budget,
        "Nobody joins, though a place and budget are left.": found == _plan(running, [], places, budget),
        "Those who run go before those who wait.": any(
            found.get(name, 0) < want.get(name, 0) for name, _ in running
        ),
    }  # fmt: skip
    for name, holds in mistakes.items():
        expect.that(not holds, f"{given}. {name}"[:590])
    expect.that(False, f"{given}; expected {want}"[:590])


Answers = list[tuple[float, list[float]]]


def _goodput(requests: Answers, seconds: float, first_ms: float, gap_ms: float, gap=None, first=None) -> float:
    gap = gap or (lambda arrived, t: (t[-1] - t[0]) / (len(t) - 1) if len(t) > 1 else 0)
    first = first or (lambda arrived, t: t[0] - arrived)
    return sum(bool(t) and first(a, t) <= first_ms and gap(a, t) <= gap_ms for a, t in requests) / seconds


def _answers(draw: Draw, first_ms: float, gap_ms: float) -> Answers:
    """Requests of all kinds, so many of each that every mistake gives another number."""
    kinds = [  # first token and gap as shares of their limits, tokens, how many
        (0.3, 0.6, 41, 3), (0.9, 3.0, 1, 5), (1.5, 0.5, 7, 9), (0.5, 1.05, 6, 17), (0.8, 0.9, 3, 33), (0.6, 1.6, 5, 65),
    ]  # fmt: skip
    requests: Answers = []
    for first, gap, tokens, count in kinds:
        for _ in range(count):
            arrived = draw.number(1000, 90_000)
            begin = arrived + first * first_ms * draw.number(0.95, 1.05)
            requests.append((arrived, [begin + (i + 0.4 * (i % 2)) * gap * gap_ms for i in range(tokens)]))
    requests += [(draw.number(0, 100), []) for _ in range(2)]
    draw.random.shuffle(requests)
    return requests


@exercise(CHAPTER, "goodput and the knee")
def check_knee(goodput: Callable, knee: Callable, draw: Draw) -> None:
    """All kinds of requests; then sweeps in any order, with a lucky run behind the knee, and none in front of it."""
    first_ms, gap_ms, seconds = draw.number(200, 400), draw.number(30, 60), draw.number(20, 40)
    requests = _answers(draw, first_ms, gap_ms)
    args = requests, seconds, first_ms, gap_ms
    want = _goodput(*args)
    only_answered = [r for r in requests if r[1]]
    expect.near(
        call(goodput, *args), want, "the goodput",
        mistakes={
            "That is throughput: all finished requests, in time or not.": len(only_answered) / seconds,
            "That is a count; goodput is requests per second.": want * seconds,
            "That is a share of the requests; goodput is requests per second.": want * seconds / len(requests),
            "Only the first token is looked at.": _goodput(*args, gap=lambda a, t: 0),
            "Only the gaps are looked at.": _goodput(*args, first=lambda a, t: 0),
            "The first token's wait counts from the arrival of its request.": _goodput(*args, first=lambda a, t: t[0]),
            "n tokens have n - 1 gaps between them.": _goodput(
                *args, gap=lambda a, t: (t[-1] - t[0]) / len(t) if len(t) > 1 else 0
            ),
            "The wait for the first token is no gap between tokens.": _goodput(
                *args, gap=lambda a, t: (t[-1] - a) / len(t)
            ),
            "The mean gap is judged, not each gap.": _goodput(
                *args, gap=lambda a, t: max((y - x for x, y in itertools.pairwise(t)), default=0)
            ),
            "An answer of one token has no gap, and can be in time.": _goodput(
                *args, gap=lambda a, t: (t[-1] - t[0]) / (len(t) - 1) if len(t) > 1 else 1e9
            ),
        },
    )  # fmt: skip
    for case in (1, 2, 3, 0):
        _check_knee(knee, draw, good=draw.integer(2, 4) if case else 0, lucky=case % 2 == 1)


def _check_knee(knee: Callable, draw: Draw, good: int, lucky: bool) -> None:
    loads = [round(draw.number(0.9, 1.1) * 2**i, 3) for i in range(7)]
    share = draw.number(0.8, 0.9)
    rates = [0.95 * load if i < good else 0.7 * load for i, load in enumerate(loads)]
    if lucky:
        rates[good + 1] = 0.97 * loads[good + 1]
    runs = list(zip(loads, rates, strict=True))
    draw.random.shuffle(runs)
    found = call(knee, runs, share)
    want = loads[good - 1] if good else None
    if want is None:
        expect.that(found is None, f"the smallest load already falls behind, but the knee is {found!r}; expected None")
        return
    expect.that(found is not None, f"the knee is None; expected {want:g}, below which every run keeps up")
    mistakes = {"That is the load with the largest goodput; it may already fall far behind what arrives.": loads[-1]}
    if lucky:
        mistakes["A run behind the first that fell behind was lucky: every smaller load must keep up, too."] = loads[
            good + 1
        ]
    mistakes["That is the first load that falls behind; asked for is the last that does not."] = loads[good]
    mistakes["That is a goodput; asked for is the load."] = rates[good - 1]
    expect.near(found, want, f"for share={share:.2f}, the knee", mistakes=mistakes)


def _right_padded(model, prompts: list[list[int]]) -> list[int]:
    longest = max(map(len, prompts))
    logits = model(torch.tensor([prompt + [0] * (longest - len(prompt)) for prompt in prompts]))
    return [int(row[len(prompt) - 1].argmax()) for row, prompt in zip(logits, prompts, strict=True)]


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
        broken={
            "a shorter row is read at its padding": broken.next_tokens,
            "padding on the left, without a mask, changes what a row has read": _left_padded,
            "every row is read one position early, alone as well": _one_early,
        },
        right={"the last real position of each row": _right_padded, "one by one": _one_by_one},
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
