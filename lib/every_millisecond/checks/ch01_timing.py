"""Checks of the exercises to notebook 01: events, median and spread, a benchmark with four faults."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable

from every_millisecond.checks import expect
from every_millisecond.checks.call import call, call_raising
from every_millisecond.checks.draw import Draw
from every_millisecond.checks.exercise import exercise
from every_millisecond.checks.failure import CheckFailed
from every_millisecond.checks.watched_stream import WatchedStream, Work

CHAPTER = "01_correct_timing"


@exercise(CHAPTER, "stage times by events")
def check_stage_times(learners: Callable, draw: Draw) -> None:
    """Known durations on a device that is still busy with something else when the first stage is launched."""
    durations = [draw.integer(3, 9) for _ in range(5)]
    names = ["prefill", "decode", "decode", "detokenise", "decode"]
    earlier = 30  # ms; also keeps the queue filled, so that every mark is exact
    with WatchedStream() as stream:
        stream.launch(earlier)
        stream.log.clear()
        stages = list(zip(names, map(Work, durations), strict=True))
        times = call(learners, stream, stages, limit_s=2.0)
        launched, waits = stream.log.count("launch"), stream.waits_inside
    expect.kind(times, dict, "the result")
    expect.that(
        launched == len(durations),
        f"{launched} pieces of work were launched for {len(durations)} stages; launch each exactly once",
    )
    expect.that(
        waits == 0,
        f"you waited {waits} times between the stages: the queue runs dry and the request gets slower. "
        "Record events on the way, and wait once, behind the last stage",
    )
    expect.that(
        set(times) == set(names), f"the result names {sorted(map(str, times))}; expected each of {sorted(set(names))}"
    )
    ends = dict(zip(names, itertools.accumulate(durations), strict=True))  # a repeated name keeps its last
    last = dict(zip(names, durations, strict=True))
    for name in dict.fromkeys(names):
        what = f"the time of {name!r}"
        want = sum(ms for stage, ms in zip(names, durations, strict=True) if stage == name)
        found = expect.number(times[name], what)
        expect.that(
            abs(found * 1000 - want) > 1e-4 * want,
            f"{what} is {found:.4f}; expected {want}. Is it in seconds? Milliseconds were asked for",
        )
        expect.that(
            found > 0.2 * want or found > 0.9 * last[name],  # of a repeated stage the last part alone may be short
            f"{what} is {found:.3f}, but the work takes {want} ms: that is the launch. The clock did not wait",
        )
        expect.near(
            found, want, what, rel=1e-3, absolute=0.3,
            mistakes={
                "Is it microseconds or nanoseconds? Milliseconds were asked for.": want * 1000,
                "The stage comes several times: add its times up.": last[name],
                "Does every stage count from the first one's start? Each needs a start mark of its own.": ends[name],
                "Work that was in the queue before your first stage is counted. The host's clock cannot tell it "
                "apart; an event recorded in front of the stage can.": want + earlier,
            },
        )  # fmt: skip


@exercise(CHAPTER, "median and spread of noisy samples")
def check_median_and_spread(learners: Callable, draw: Draw) -> None:
    """Odd and even counts, slow warm-up samples in front, an outlier, unsorted; one sample; nothing left."""
    for count in (draw.odd(7, 15), 2 * draw.integer(4, 8)):
        warmup = draw.integer(2, 3)
        kept = [10 + place + draw.number(0, 0.5) for place in range(count - 1)] + [draw.number(60, 90)]  # no two alike
        draw.random.shuffle(kept)
        samples = [*draw.numbers(warmup, 200, 300), *kept]
        _check_summary(call(learners, samples, warmup), samples, warmup)
    one = draw.number(1, 2)
    _check_summary(call(learners, [one], 0), [one], 0)
    call_raising(ValueError, learners, [1.0, 2.0], 2, why="no sample is left behind two warm-up samples")


def _check_summary(result: object, samples: list[float], warmup: int) -> None:
    kept = samples[warmup:]
    expect.items(result, 3, "the result", "median, p10, p90")
    median, p10, p90 = result
    expect.near(
        median, statistics.median(kept), "the median",
        mistakes={
            "That is the mean: one outlier moves it.": statistics.mean(kept),
            "Are the warm-up samples still in it?": statistics.median(samples),
            "Were the samples sorted before the warm-up was cut off? Then the fastest were cut.": statistics.median(
                sorted(samples)[warmup:]
            ),
            "With an even number of samples the median lies between the two in the middle.": sorted(kept)[
                len(kept) // 2
            ],
            "Were the samples sorted first?": kept[len(kept) // 2],
        },
    )  # fmt: skip
    for percent, found in ((10, p10), (90, p90)):
        ordered, place = sorted(kept), percent / 100 * (len(kept) - 1)
        expect.near(
            found, _between(ordered, place), f"p{percent}",
            mistakes={
                "Place p in the sorted samples is p/100 * (n - 1), and between two samples we interpolate.": ordered[
                    min(int(percent / 100 * len(kept)), len(kept) - 1)
                ],
                "The place is rounded: between two samples we interpolate.": ordered[round(place)],
                "The place is cut off: between two samples we interpolate.": ordered[int(place)],
                "Were the samples sorted first?": _between(kept, place),
                "p10 and p90 have changed places.": _between(ordered, (100 - percent) / 100 * (len(kept) - 1)),
            },
        )  # fmt: skip


def _between(ordered: list[float], place: float) -> float:
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


FAULTS = {  # lines of the benchmark in the notebook, by fault; either line of a pair will do
    "one of the versions is not warmed up": {3},
    "a version is measured as a block, not in turns with the other": {5, 6},
    "the clock is read before the work is done": {8, 9},
    "one outlier decides about the result": {11},
}
INNOCENT = {
    1: "it only names the arguments",
    2: "an empty list per version is what the samples go into",
    4: "waiting once before the loop is right: nothing of the warm-up runs on into the first sample",
    7: "reading the clock before the work is right, once the work before it was awaited",
    10: "seconds times 1000 are milliseconds",
}


@exercise(CHAPTER, "four faults in a benchmark")
def check_faults(learners: Callable, draw: Draw) -> None:
    """Which lines are wrong; for an innocent line, why it is."""
    lines = expect.kind(call(learners), (set, list, tuple), "the result")
    lines = {expect.whole(line, "a line number") for line in lines}
    outside = sorted(lines - set(range(1, 12)))
    expect.that(not outside, f"the program has no line {outside}; its lines are 1 to 11")
    for line in sorted(lines & set(INNOCENT)):
        raise CheckFailed(f"line {line} is innocent: {INNOCENT[line]}")
    for where in FAULTS.values():
        expect.that(len(lines & where) < 2, f"lines {sorted(lines & where)} are one fault; name one of them")
    missing = [fault for fault, where in FAULTS.items() if not lines & where]
    expect.that(not missing, f"{len(FAULTS) - len(missing)} of 4 found. Look again: " + "; ".join(missing[:1]))


@exercise(CHAPTER, "the benchmark, mended")
def check_benchmark(learners: Callable, draw: Draw) -> None:
    """Two versions of known duration with slow first calls and outliers; what was called when is logged."""
    repeats = draw.odd(7, 9)
    typical = {"before": 5.0, "after": 3.0}
    calls: list[str] = []
    with WatchedStream() as stream:
        versions = {name: _version(name, ms, calls, repeats) for name, ms in typical.items()}
        medians = call(learners, stream, versions, repeats)
        log = list(stream.log)
        stream.synchronize()
    expect.kind(medians, dict, "the result")
    expect.that(
        set(medians) == set(typical), f"the result names {sorted(map(str, medians))}; expected {sorted(typical)}"
    )
    for name in typical:
        count = calls.count(name)
        expect.that(
            count > repeats, f"{name!r} was called {count} times for {repeats} samples: no call was left for warming up"
        )
    changes = sum(a != b for a, b in itertools.pairwise(calls))
    expect.that(
        changes >= repeats,
        "the versions were measured one after the other: a machine that drifts favours one of them. "
        "Let them take turns: all versions within each round",
    )
    for name, ms in typical.items():
        what = f"the time of {name!r}"
        found = expect.number(medians[name], what)
        expect.that(found < 1000 * ms / 2, f"{what} is {found:.0f}; expected about {ms} ms. Wrong unit?")
        expect.that(
            not 0.9 * QUICK < found / ms < 1.4 * QUICK,
            f"{what} is {found:.1f}; the work takes {ms} ms, except in a few calls, which are quick or slow. The least "
            "sample follows the quick ones; the median does not",
        )
        expect.that(
            found > 0.9 * ms,
            f"{what} is {found:.3f}; the work takes {ms} ms. "
            "The clock is read before the work is done"
            + ("; or is it right, but in seconds?" if 0.9 * ms / 1000 < found < 0.02 else ""),
        )
        expect.that(
            found < 2.2 * ms,
            f"{what} is {found:.1f}; the work takes {ms} ms, except in a few slow calls. A mean follows those; "
            "the median does not",
        )
    begun_idle = sum(pair == ("wait", "launch") for pair in itertools.pairwise(log))
    expect.that(  # events need no wait: the first stands behind the warm-up
        "elapsed" in log or begun_idle >= repeats * len(typical),
        "the first sample begins while the warm-up is still in the queue, and pays for it: wait before that reading",
    )


QUICK = 0.4  # of the usual time: what a few calls take


def _version(name: str, ms: float, calls: list[str], repeats: int) -> Callable:
    """A version under test: launches `ms` of work; the first call is slow, so are two later ones; two are quick."""
    mine = itertools.count()

    def launch(stream: WatchedStream) -> None:
        calls.append(name)
        number = next(mine)
        slow, quick = number in (3, repeats - 1), number in (2, 4)
        stream.launch(40.0 if number == 0 else 12 * ms if slow else QUICK * ms if quick else ms)

    return launch
