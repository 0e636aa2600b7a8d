"""Checks of the exercises to notebook 02: two figures from stamps, the crossover, a module's time, a rate."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from every_millisecond.checks import expect, zoo
from every_millisecond.checks.call import call, call_raising
from every_millisecond.checks.draw import Answers, Draw
from every_millisecond.checks.exercise import exercise
from every_millisecond.checks.failure import how_often
from every_millisecond.checks.virtual_device import VirtualStream, only_launched

CHAPTER = "02_anatomy_of_a_request"
EARLIER_MS = 25  # of work that is in the queue already


@exercise(CHAPTER, "two figures from time stamps")
def check_first_and_pace(learners: Callable, draw: Draw) -> None:
    """A slow first token, uneven gaps with one pause; a single token; none."""
    sent, stamps = draw.until(lambda: _stamps(draw), lambda drawn: _pace_answers(*drawn).values())
    result = call(learners, sent, stamps)
    result = expect.items(result, 2, "the result", "time to first token, time per output token")
    for (what, (want, mistakes)), found in zip(_pace_answers(sent, stamps).items(), result, strict=True):
        expect.near(found, want, what, mistakes=mistakes)
    first, pace = expect.items(call(learners, sent, stamps[:1]), 2, "the result for one token", "the time, None")
    expect.near(first, 1000 * (stamps[0] - sent), "the time to first token of an answer of one token")
    expect.that(pace is None, f"for one token the time per output token is {pace}; there is no gap, so it is None")
    call_raising(ValueError, learners, sent, [], why="no token arrived, so there is nothing to report")


def _stamps(draw: Draw) -> tuple[float, list[float]]:
    sent = draw.number(100, 900)
    gaps = draw.numbers(draw.odd(7, 13), 0.008, 0.012)
    gaps[draw.integer(1, 5)] = draw.number(0.04, 0.06)
    return sent, list(itertools.accumulate(gaps, initial=sent + draw.number(0.1, 0.2)))


def _pace_answers(sent: float, stamps: list[float]) -> dict[str, Answers]:
    whole, decode, count = 1000 * (stamps[-1] - sent), 1000 * (stamps[-1] - stamps[0]), len(stamps)
    first, pace = whole - decode, decode / (count - 1)
    gaps = [1000 * (later - sooner) for sooner, later in itertools.pairwise(stamps)]
    return {
        "the time to first token": (first, {
            "Is it in seconds? Milliseconds were asked for.": first / 1000,
            "That is the stamp itself: the request was sent at another time than 0.": 1000 * stamps[0],
            "That is the time to the last token.": whole,
            "That is the second token's time.": 1000 * (stamps[1] - sent),
            "The two figures have changed places.": pace,
        }),
        "the time per output token": (pace, {
            "Is it in seconds? Milliseconds were asked for.": pace / 1000,
            "The time to first token is still in it, divided by all tokens.": whole / count,
            "The time to first token is still in it.": whole / (count - 1),
            "n tokens have n - 1 gaps between them.": decode / count,
            "That is the median gap: it forgets the pause that the user saw.": statistics.median(gaps),
            "That is the last gap; the mean of all was asked for.": gaps[-1],
            "That is the longest gap; the mean of all was asked for.": max(gaps),
            "That is a rate in tokens per second, not a time per token.": 1000 / pace,
        }),
    }  # fmt: skip


@exercise(CHAPTER, "when decode overtakes prefill")
def check_crossover(decode_share: Callable, crossover: Callable, draw: Draw) -> None:
    """Quarters of a millisecond, exact in floats; a prefill that is a whole number of steps, and one that is not."""
    step, steps = draw.odd(11, 39) / 4, draw.odd(7, 31)
    prefill = (steps + 0.5) * step
    few = draw.until(lambda: draw.odd(5, 19), lambda tokens: [_share_answers(prefill, step, tokens)])
    for tokens in (few, draw.odd(101, 301), 1):
        want, mistakes = _share_answers(prefill, step, tokens)
        found = call(decode_share, prefill, step, tokens)
        expect.near(found, want, f"decode's share of {tokens} tokens", mistakes=mistakes)
    for steps_in_prefill, why in (
        (steps + 0.5, f"{steps} steps fit into the prefill, so one step more is longer"),
        (steps, f"{steps} steps take as long as the prefill, and equally long is not longer"),
        (0.5, "the prefill is shorter than a step"),
    ):
        prefill, want = steps_in_prefill * step, int(steps_in_prefill) + 2
        found = expect.whole(call(crossover, prefill, step), "the crossover")
        given = f"prefill {prefill:g} ms, a step {step:g} ms: the crossover is {found}; expected {want}. "
        first = "n tokens are n - 1 steps: is the first token counted as a step? "
        expect.that(found == want, given + (first if steps_in_prefill != steps and found == want - 1 else "") + why)


def _share_answers(prefill: float, step: float, tokens: int) -> Answers:
    done = (tokens - 1) * step
    return done / (prefill + done), {
        "n tokens are n - 1 steps: the first comes out of the prefill.": tokens * step / (prefill + tokens * step),
        "Is it in percent? A share between 0 and 1 was asked for.": 100 * done / (prefill + done),
        "That is decode over prefill, not decode over both.": done / prefill,
        "That is prefill's share.": prefill / (prefill + done),
    }


class _Part(nn.Module):
    """Launches work of the next duration, from the first again after the last, and adds 1 to its input.

    What it knows is private: its time must be measured, not looked up.
    """

    def __init__(self, stream: VirtualStream, durations: list[float], fail_at: int | None = None) -> None:
        super().__init__()
        self.__stream, self.__durations, self.__fail_at, self.__calls = stream, durations, fail_at, 0

    def forward(self, x: Tensor) -> Tensor:
        if not isinstance(x, Tensor):
            raise TypeError(
                "a module got something that is no tensor. What a hook returns takes the place of the input or of the "
                "output: let your hooks return nothing"
            )
        if self.__calls == self.__fail_at:
            raise _OutOfMemory("the device ran out of memory")
        self.__stream.launch(self.__durations[self.__calls % len(self.__durations)])
        self.__calls += 1
        return x + 1


class _OutOfMemory(RuntimeError):
    pass


@exercise(CHAPTER, "a hook that does not lie")
def check_time_module(learners: Callable, draw: Draw) -> None:
    """A module called three times among others, never, and one that fails in its second call."""
    mine, others = draw.until(
        lambda: (draw.numbers(3, 2, 12), draw.numbers(4, 3, 9)), lambda drawn: [_module_answers(*drawn)]
    )
    stream = VirtualStream()
    learners = stream.on_its_clock(learners)
    part, other = _Part(stream, mine), _Part(stream, others)
    foreign = part.register_forward_hook(lambda *_: None)
    before = _hooks(part)
    results: list[Tensor] = []

    def run() -> None:
        x = other(torch.zeros(3))
        for _ in mine:
            x = other(part(x))
        results.append(x)

    stream.launch(EARLIER_MS)
    stream.log.clear()
    result = call(learners, part, stream, run, limit_s=2.0)
    _check_traces(part, before, results, stream, launches=len(mine) + len(others))
    foreign.remove()
    ms, calls = expect.items(result, 2, "the result", "milliseconds, number of calls")
    want, mistakes = _module_answers(mine, others)
    found = expect.number(ms, "the time")
    expect.that(
        not only_launched(found, want),
        f"the time: {found:.2g} ms, but the work takes {want:.3f} ms: that is the launch. The clock did not wait; an "
        "event need not",
    )
    expect.near(found, want, "the time", rel=2e-3, mistakes=mistakes)
    found = expect.whole(calls, "the number of calls")
    expect.that(found == len(mine), f"the number of calls is {found}; the module was called {len(mine)} times")
    never = expect.items(call(learners, part, stream, lambda: None), 2, "the result", "milliseconds, calls")
    expect.that(
        expect.number(never[0], "the time of a module that was never called") == 0 and never[1] == 0,
        f"a module that was never called gives {tuple(never)}; expected 0 ms and 0 calls",
    )
    failing = _Part(stream, mine, fail_at=1)
    before = _hooks(failing)
    why = "run() raised, and its error belongs to the caller"
    call_raising(_OutOfMemory, learners, failing, stream, lambda: failing(failing(torch.zeros(3))), why=why)
    expect.that(
        _hooks(failing) == before,
        "run() raised an error, and your hooks are still on the module: they would time every later request. "
        "Remove them in `finally`",
    )


def _check_traces(part: nn.Module, before: list, results: list[Tensor], stream: VirtualStream, launches: int) -> None:
    expect.that(
        len(results) == 1, f"run() was called {len(results)} times; call it exactly once: a request is not repeated"
    )
    expect.that(
        torch.equal(results[0], torch.full((3,), float(launches))),
        "the model's output changed while you looked: does a hook write into its tensor?",
    )
    waits = stream.waits_between
    expect.that(
        waits == 0,
        f"you waited {how_often(waits)} before run() had launched all its work: the queue runs dry and the request "
        "gets slower. Record events in the hooks, and wait once, after run()",
    )
    left = _hooks(part)
    added = [hook for hook in left if hook not in before]
    expect.that(not added, f"of your hooks are left on the module: {len(added)}. Remove each through its handle")
    expect.that(left == before, "a hook of somebody else is gone: remove your own through their handles, no others")


def _hooks(part: nn.Module) -> list:
    tables = (part._forward_pre_hooks, part._forward_hooks, part._backward_hooks)
    everywhere = (torch_module._global_forward_pre_hooks, torch_module._global_forward_hooks)
    replaced = [part.__dict__["forward"]] if "forward" in part.__dict__ else []
    return [hook for table in (*tables, *everywhere) for hook in table.values()] + replaced


def _module_answers(mine: list[float], others: list[float]) -> Answers:
    want, inner = sum(mine), sum(others[1:-1])
    return want, {
        "Is it in seconds? Milliseconds were asked for.": want / 1000,
        "The marks have changed places: begin.elapsed_time(end), not the other way round.": -want,
        "That is the last call alone: add up all calls.": mine[-1],
        "That is the first call alone: add up all calls.": mine[0],
        "That is the mean of the calls; their sum was asked for.": want / len(mine),
        "Other modules' work between the first call and the last is counted: mark each call's begin and end.": want
        + inner,
        "That is the whole of run(): other modules are counted.": want + sum(others),
        "That is the whole of run(), and work that was in the queue before it.": want + sum(others) + EARLIER_MS,
    }


def broken_decode_rate(ids: list[int], prompt_tokens: int, prefill_ms: float, total_ms: float) -> float | None:
    """Tokens per second of the decode steps.

    ids: the sequence that `generate` returned, prompt and answer. prompt_tokens: how many of them are the prompt's.
    prefill_ms: the time until the first token of the answer, of the request's total_ms. None for an answer of one
    token, which has no decode step.
    """
    if len(ids) - prompt_tokens < 2:
        return None
    return 1000 * (len(ids) - 1) / (total_ms - prefill_ms)


def _rate(ids: list[int], prompt: int, prefill_ms: float, total_ms: float) -> float | None:
    steps = len(ids) - prompt - 1
    return steps / (total_ms - prefill_ms) * 1000 if steps else None


def _rate_by_answer(ids: list[int], prompt: int, prefill_ms: float, total_ms: float) -> float | None:
    answer = ids[prompt:]
    if len(answer) == 1:
        return None
    step_ms = (total_ms - prefill_ms) / len(answer[1:])
    return 1000 / step_ms


_NEIGHBOURS = {
    "the prompt's tokens are counted": broken_decode_rate,
    "the first token, which is the prefill's, is counted as a step": lambda ids, prompt, prefill_ms, total_ms: (
        None if len(ids) - prompt < 2 else 1000 * (len(ids) - prompt) / (total_ms - prefill_ms)
    ),
    "the prefill's time is in it": lambda ids, prompt, prefill_ms, total_ms: (
        None if len(ids) - prompt < 2 else 1000 * (len(ids) - prompt - 1) / total_ms
    ),
    "a token that comes twice is counted once": lambda ids, prompt, prefill_ms, total_ms: (
        None if len(ids) - prompt < 2 else 1000 * (len(set(ids[prompt:])) - 1) / (total_ms - prefill_ms)
    ),
    "an answer of one token gets a rate": lambda ids, prompt, prefill_ms, total_ms: (
        1000 * (len(ids) - prompt - 1) / max(1e-9, total_ms - prefill_ms)
    ),
}


@exercise(CHAPTER, "the rate that counted too much")
def check_decode_rate(test: Callable, mended: Callable, draw: Draw) -> None:
    """Repeated ids, and one token: the answer's ids less one, over decode's time."""
    zoo.check_test(
        test, draw, broken=_NEIGHBOURS, right={"by steps": _rate, "by the time of a step": _rate_by_answer}
    )  # fmt: skip
    ids, prompt, prefill, total = draw.until(lambda: _sequence(draw), lambda drawn: [_rate_answers(*drawn)])
    want, mistakes = _rate_answers(ids, prompt, prefill, total)
    expect.near(call(mended, ids, prompt, prefill, total), want, "the mended rate", mistakes=mistakes)
    two = call(mended, ids[: prompt + 2], prompt, prefill, prefill + 8.0)
    expect.that(two is not None, "for two tokens the mended rate is None; there is one decode step, so there is a rate")
    expect.near(two, 125.0, "the mended rate of two tokens, whose one step takes 8 ms")
    one = call(mended, ids[: prompt + 1], prompt, prefill, prefill + 0.5)
    expect.that(one is None, f"for one token the mended rate is {one}; there is no decode step, so it is None")


def _sequence(draw: Draw) -> tuple[list[int], int, float, float]:
    prompt, prefill = draw.odd(31, 61), draw.number(80, 120)
    return draw.ids(prompt + draw.odd(7, 21), 5).tolist(), prompt, prefill, prefill + draw.number(60, 100)


def _rate_answers(ids: list[int], prompt: int, prefill: float, total: float) -> Answers:
    new, per_s = len(ids) - prompt, 1000 / (total - prefill)
    return (new - 1) * per_s, {
        "The prompt's tokens are still counted.": (prompt + new - 1) * per_s,
        "The prompt's tokens are counted, all of them.": (prompt + new) * per_s,
        "The first token is not decode's: n tokens are n - 1 steps.": new * per_s,
        "The prefill's time is in it.": 1000 * (new - 1) / total,
        "The prefill's time is in it, and its token.": 1000 * new / total,
        "Is it per millisecond? Tokens per second were asked for.": (new - 1) * per_s / 1000,
        "That is the time per token, not a rate.": 1000 / ((new - 1) * per_s),
        "A token that comes twice counts twice.": (len(set(ids[prompt:])) - 1) * per_s,
    }
