"""`self_check`: does the clock itself cost little, and does it agree with PyTorch's own benchmark timer?"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import torch
from torch.utils import benchmark

from llm_latency.timing.latency_timer import LatencyTimer
from llm_latency.timing.measure import measure

STAGE_COST_LIMIT_US = 5.0
AGREEMENT_LIMIT = 0.05
_STAGES = 2000
_ROUNDS = 7
_REPEATS = 40
_MATRIX = 512


@dataclass(frozen=True, slots=True)
class SelfCheck:
    """What the timing costs and how well it agrees.

    Args:
        stage_cost_us: host time of one `with timer.stage(...)` around nothing, in microseconds, median over rounds.
        measure_ms, torch_timer_ms: the same matrix product by `measure` and by `torch.utils.benchmark.Timer`, medians.
        ratio: `measure` over torch's timer, median of the rounds' ratios. ratio_low, ratio_high: their p10 and p90.
        device: the clock's name.
    """

    stage_cost_us: float
    measure_ms: float
    torch_timer_ms: float
    ratio: float
    ratio_low: float
    ratio_high: float
    device: str

    @property
    def stage_is_cheap(self) -> bool:
        return self.stage_cost_us < STAGE_COST_LIMIT_US

    @property
    def agrees(self) -> bool:
        return abs(self.ratio - 1) <= AGREEMENT_LIMIT

    def report(self) -> str:
        """Two lines for `print`, each with its verdict."""
        stage = "ok" if self.stage_is_cheap else "too much"
        agreement = "ok" if self.agrees else "too far apart: is the machine busy?"
        return (
            f"one stage of LatencyTimer on {self.device}: {self.stage_cost_us:.2f} us"
            f" (limit on a CPU {STAGE_COST_LIMIT_US:.0f} us): {stage}\n"
            f"measure against torch.utils.benchmark.Timer: {self.measure_ms:.3f} ms and {self.torch_timer_ms:.3f} ms,"
            f" {self.ratio:.3f} times (limit 5 % apart): {agreement}"
        )

    def __str__(self) -> str:
        return self.report()


def self_check(device: str | None = None) -> SelfCheck:
    """Measure the timer's own cost per stage, and `measure` against torch's timer on one matrix product, in turns.

    Takes a few seconds. ValueError: an unknown device.
    """
    timer = LatencyTimer(device)
    where = torch.device(timer.device)
    a = torch.randn(_MATRIX, _MATRIX, device=where)
    work = benchmark.Timer(
        # measure's call and its freeing of the result, so that both time the same
        stmt="result = fn(); del result",
        globals={"fn": lambda: a @ a},
        num_threads=torch.get_num_threads(),
    )
    costs, ours, theirs = [], [], []
    for turn in range(_ROUNDS):
        costs.append(_stage_cost_us(timer))
        timings = {
            "ours": lambda: ours.append(measure(lambda: a @ a, repeats=_REPEATS, device=where).median_ms),
            "theirs": lambda: theirs.append(_median_of_single_calls_ms(work)),
        }
        for name in sorted(timings, reverse=turn % 2 == 1):
            timings[name]()
    ratios = sorted(a / b for a, b in zip(ours, theirs, strict=True))
    deciles = statistics.quantiles(ratios, n=10, method="inclusive")
    return SelfCheck(
        stage_cost_us=statistics.median(costs),
        measure_ms=statistics.median(ours),
        torch_timer_ms=statistics.median(theirs),
        ratio=statistics.median(ratios),
        ratio_low=deciles[0],
        ratio_high=deciles[-1],
        device=timer.device,
    )


def _stage_cost_us(timer: LatencyTimer) -> float:
    timer.reset()
    begin = time.perf_counter_ns()
    for _ in range(_STAGES):
        with timer.stage("nothing"):
            pass
    return (time.perf_counter_ns() - begin) / _STAGES / 1000


def _median_of_single_calls_ms(work: benchmark.Timer) -> float:
    return statistics.median(work.timeit(1).raw_times[0] for _ in range(_REPEATS)) * 1000
