"""Checks of the exercises to notebook 01: events, median and spread, a benchmark with four faults."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable

from every_millisecond.checks import expect
from every_millisecond.checks.call import call, call_raising
from every_millisecond.checks.draw import Answers, Draw
from every_millisecond.checks.exercise import exercise
from every_millisecond.checks.failure import CheckFailed, how_often
from every_millisecond.checks.virtual_device import VirtualStream, only_launched

CHAPTER = "01_correct_timing"
STAGES = ("prefill", "decode", "decode", "detokenise", "decode")
EARLIER_MS = 30  # of work that is in the queue already


@exercise(CHAPTER, "stage times by events")
def check_stage_times(learners: Callable, draw: Draw) -> None:
    """Known durations on a device that is still busy with something else when the first stage is launched."""
    durations = draw.until(
        lambda: draw.numbers(len(STAGES), 3, 9), lambda drawn: (_stage_answers(drawn, name) for name in set(STAGES))
    )
    stream = VirtualStream()
    stream.launch(EARLIER_MS)
    stream.log.clear()
    works = list(map(stream.work, durations))
    stages = list(zip(STAGES, works, strict=True))
    times = call(stream.on_its_clock(learners), stream, stages, limit_s=2.0)
    expect.kind(times, dict, "the result")
    launched = stream.log.count("launch")
    expect.that(
        launched == len(durations),
        f"{launched} pieces of work were launched for {len(durations)} stages; launch each exactly once",
    )
    expect.that(
        stream.launched[-len(works) :] == works,
        "the stages were launched in another order than they are listed in: a request is not reordered to be measured",
    )
    expect.that(
        stream.waits_between == 0,
        f"you waited {how_often(stream.waits_between)} between the stages: the queue runs dry and the request gets "
        "slower. Record events on the way, and wait once, after the last stage",
    )
    expect.that(
        set(times) == set(STAGES), f"the result names {sorted(map(str, times))}; expected each of {sorted(set(STAGES))}"
    )
    for name in dict.fromkeys(STAGES):
        want, mistakes = _stage_answers(durations, name)
        found = expect.number(times[name], f"the time of {name!r}")
        expect.that(
            not only_launched(found, want),
            f"the time of {name!r}: {found:.2g}, but the work takes {want:.3f} ms: that is the launch. The clock did "
            "not wait",
        )
        expect.near(found, want, f"the time of {name!r}", rel=2e-3, mistakes=mistakes)


def _stage_answers(durations: list[float], name: str) -> Answers:
    mine = [ms for stage, ms in zip(STAGES, durations, strict=True) if stage == name]
    want, first = sum(mine), STAGES.index(name)
    last = len(STAGES) - 1 - STAGES[::-1].index(name)
    repeated = {
        "The stage comes several times: add its times up. That is the last one alone.": mine[-1],
        "The stage comes several times: add its times up. That is the first one alone.": mine[0],
        "The stage comes several times: add its times up. That is their mean.": want / len(mine),
        "That is from its first start to its last end: what ran in between is counted.": sum(
            durations[first : last + 1]
        ),
    }
    later = {
        "Does every stage count from the first one's start? Each needs a start mark of its own.": sum(
            durations[: last + 1]
        ),
        "All that was launched before it is counted, even before your first stage.": sum(
            durations[: last + 1], EARLIER_MS
        ),
    }
    return want, {
        "Is it in seconds? Milliseconds were asked for.": want / 1000,
        "Is it in microseconds? Milliseconds were asked for.": want * 1000,
        "Is it in nanoseconds? Milliseconds were asked for.": want * 1e6,
        "The marks have changed places: begin.elapsed_time(end), not the other way round.": -want,
        "Work that was in the queue before your first stage is counted. The host's clock cannot tell it apart; an "
        "event recorded before the stage can.": want + EARLIER_MS,
        **(repeated if len(mine) > 1 else {}),
        **(later if first > 0 else {}),
    }


@exercise(CHAPTER, "median and spread of noisy samples")
def check_median_and_spread(learners: Callable, draw: Draw) -> None:
    """Odd and even counts, warm-up samples quick and slow, an outlier, unsorted; one sample; nothing left."""
    for even, slow in ((False, 2), (True, 3)):
        samples = draw.until(
            lambda even=even, slow=slow: _samples(draw, even, [(1, 5), *[(100, 300)] * slow]),
            lambda drawn, slow=slow: _summary_answers(drawn, 1 + slow).values(),
        )
        _check_summary(call(learners, samples, 1 + slow), samples, 1 + slow)
    for warmup in ([(200, 300)], [(1, 5), (2, 9)], []):
        samples = _samples(draw, False, warmup)
        _check_summary(call(learners, samples, len(warmup)), samples, len(warmup))
    one = draw.number(1, 2)
    _check_summary(call(learners, [9.0, one], 1), [9.0, one], 1)
    call_raising(ValueError, learners, [1.0, 2.0], 2, why="no sample is left after two warm-up samples")


def _samples(draw: Draw, even: bool, warmups: list[tuple[float, float]]) -> list[float]:
    count = 2 * draw.integer(4, 7) + (0 if even else 1)
    count += 2 * (count % 10 == 1)  # p10 would be a sample, and not between two
    kept = [*draw.numbers(count - 1, 10, 30), draw.number(60, 90)]
    return [*(draw.number(*limits) for limits in warmups), *draw.shuffled(kept)]


def _summary_answers(samples: list[float], warmup: int) -> dict[str, Answers]:
    kept = samples[warmup:]
    ordered = sorted(kept)
    median, n = statistics.median(kept), len(kept)
    before = "Were the samples sorted before the warm-up was cut off?"
    middle = {
        "With an even number of samples the median lies between the two in the middle.": ordered[n // 2],
        "That is the lower one of the two in the middle; the median lies between them.": ordered[n // 2 - 1],
    }
    answers = {
        "the median": (median, {
            "That is the mean: one outlier moves it.": statistics.mean(kept),
            "Are the warm-up samples still in it?": statistics.median(samples),
            f"{before} Then the fastest were cut.": statistics.median(sorted(samples)[warmup:]),
            f"{before} Then the slowest were cut.": statistics.median(sorted(samples)[: len(samples) - warmup]),
            "Were the samples sorted first?": kept[n // 2],
            "That is p10: the order is median, p10, p90.": _between(ordered, (n - 1) / 10),
            **(middle if n % 2 == 0 else {}),
        }),
    }  # fmt: skip
    other = statistics.quantiles(kept * (1 + (n == 1)), n=10)  # the "exclusive" method
    for percent in (10, 90):
        place = percent / 100 * (n - 1)
        answers[f"p{percent}"] = (
            _between(ordered, place),
            {
                "That is the median.": median,
                "Is it another convention? (statistics: method='inclusive')": other[percent // 10 - 1],
                "p10 and p90 have changed places, or stand elsewhere than in (median, p10, p90).": _between(
                    ordered, n - 1 - place
                ),
                "Were the samples sorted first?": _between(kept, place),
                "Are the warm-up samples still in it?": _between(sorted(samples), percent / 100 * (len(samples) - 1)),
                "The place is cut off: between two samples we interpolate.": ordered[int(place)],
                "The place is rounded up: between two samples we interpolate.": ordered[min(int(place) + 1, n - 1)],
            },
        )
    return answers


def _check_summary(result: object, samples: list[float], warmup: int) -> None:
    result = expect.items(result, 3, "the result", "median, p10, p90")
    for (what, (want, mistakes)), found in zip(_summary_answers(samples, warmup).items(), result, strict=True):
        expect.near(found, want, what, mistakes=mistakes)


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
    lines = call(learners)
    lines = expect.kind(set(lines) if isinstance(lines, frozenset) else lines, (set, list, tuple), "the result")
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
    """Two versions whose calls take known times, the first call long; what was called, awaited and read is logged."""
    repeats = draw.odd(7, 9)
    versions = {name: _durations(draw, ms, repeats) for name, ms in (("before", 9.0), ("after", 3.0))}
    calls: list[str] = []
    stream = VirtualStream()
    functions = {name: _version(name, durations, calls) for name, durations in versions.items()}
    medians = call(stream.on_its_clock(learners), stream, functions, repeats)
    expect.kind(medians, dict, "the result")
    expect.that(
        set(medians) == set(versions), f"the result names {sorted(map(str, medians))}; expected {sorted(versions)}"
    )
    for name in versions:
        count = calls.count(name)
        expect.that(
            count > repeats,
            f"{name!r} was called {how_often(count)} for {repeats} samples: no call was left for warming up",
        )
    changes = sum(a != b for a, b in itertools.pairwise(calls))
    expect.that(
        changes >= repeats,
        "the versions were measured one after the other: a machine that drifts favours one of them. "
        "Let them take turns: all versions within each round",
    )
    found = {name: expect.number(medians[name], f"the time of {name!r}") for name in versions}
    answers = {name: _benchmark_answers(durations) for name, durations in versions.items()}
    for name, (want, _) in answers.items():
        expect.that(
            found[name] > 0.01 or abs(found[name] - want / 1000) < 1e-4,
            f"the time of {name!r}: {found[name]:.3f}; the work takes {want:.3f} ms. The clock is read before the work "
            "is done",
        )
    expect.that(
        not _begins_busy(stream.log),
        "a sample begins while work is still in the queue (is the warm-up awaited?), and pays for it: wait before the "
        "first reading of the clock, not after it",
    )
    for name, (want, mistakes) in answers.items():
        expect.near(found[name], want, f"the time of {name!r}", rel=1e-2, mistakes=mistakes)


def _begins_busy(log: list[str]) -> bool:
    """Whether the last reading of a clock before some launch was taken with work in the queue."""
    queued = busy = False
    for what in log:
        if what == "launch":
            if busy:
                return True
            queued = True
        elif what == "wait":
            queued = False
        elif what == "read":
            busy = queued
    return False


def _durations(draw: Draw, ms: float, repeats: int) -> list[float]:
    """Times of the first call, and of `repeats` later ones, after which these come again: so any round has them all."""
    half = repeats // 2

    def make() -> list[float]:
        quick, slow = draw.numbers(half, 0.3 * ms, 0.6 * ms), draw.numbers(half, 3 * ms, 6 * ms)
        return [8 * ms, *draw.shuffled([*quick, ms * draw.number(0.9, 1.1), *slow])]

    return draw.until(make, lambda drawn: [_benchmark_answers(drawn)], rel=0.03)


def _benchmark_answers(durations: list[float]) -> Answers:
    later = durations[1:]
    ordered = sorted(later)
    want, half = statistics.median(later), len(later) // 2
    return want, {
        "Is it in seconds? Milliseconds were asked for.": want / 1000,
        "Is it in microseconds? Milliseconds were asked for.": want * 1000,
        "The least sample follows the quick calls; the median does not.": min(later),
        "The largest sample follows the slow calls; the median does not.": max(later),
        "A mean follows the few slow calls; the median does not.": statistics.mean(later),
        "A mean follows the few slow calls; the median does not. And the warm-up is no sample.": statistics.mean(
            durations
        ),
        "Is the warm-up among the samples? Its time belongs to none.": (ordered[half] + ordered[half + 1]) / 2,
    }


def _version(name: str, durations: list[float], calls: list[str]) -> Callable:
    """A version under test: launches work that takes the next of the durations."""
    times = itertools.chain(durations[:1], itertools.cycle(durations[1:]))

    def launch(stream: VirtualStream) -> None:
        calls.append(name)
        stream.launch(next(times))

    return launch
