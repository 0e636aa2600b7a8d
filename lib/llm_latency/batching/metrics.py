"""What a load did to everybody: throughput, latencies, and goodput."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from llm_latency.batching.request import Request, State


@dataclass(frozen=True, slots=True)
class Deadline:
    """What a user puts up with: first token and each further one in time (milliseconds). None: no limit.

    Raises ValueError for a limit that is not positive.
    """

    first_token_ms: float | None = None
    per_token_ms: float | None = None

    def __post_init__(self) -> None:
        for limit in (self.first_token_ms, self.per_token_ms):
            if limit is not None and not limit > 0:
                raise ValueError(f"a deadline must be positive, got {limit} ms")

    def met_by(self, request: Request) -> bool:
        if request.state is not State.FINISHED:
            return False
        per_token = request.time_per_output_token_ms
        first_in_time = self.first_token_ms is None or request.time_to_first_token_ms <= self.first_token_ms
        others_in_time = self.per_token_ms is None or per_token is None or per_token <= self.per_token_ms
        return first_in_time and others_in_time


@dataclass(frozen=True, slots=True)
class LoadReport:
    """Figures of one run. Times in milliseconds, by percentile over requests; rates per second of the whole run."""

    requests: int
    finished: int
    tokens: int
    seconds: float
    first_token_ms_p50: float
    first_token_ms_p90: float
    per_token_ms_p50: float
    per_token_ms_p90: float
    end_to_end_ms_p50: float
    end_to_end_ms_p90: float
    in_time: int

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def requests_per_second(self) -> float:
        return self.finished / self.seconds

    @property
    def goodput_per_second(self) -> float:
        """Finished requests that met the deadline, per second (DistServe, Zhong et al. 2024, arXiv 2401.09670)."""
        return self.in_time / self.seconds


def report(requests: Sequence[Request], deadline: Deadline | None = None) -> LoadReport:
    """Figures of requests that are done, from the first arrival to the last end.

    Raises ValueError if there are none or one is still under way.
    """
    if not requests:
        raise ValueError("no requests to report on")
    seconds = max(r.arrival_s + r.end_to_end_ms / 1e3 for r in requests) - min(r.arrival_s for r in requests)
    finished = [r for r in requests if r.state is State.FINISHED]
    first = [r.time_to_first_token_ms for r in finished]
    per_token = [r.time_per_output_token_ms for r in finished if r.time_per_output_token_ms is not None]
    whole = [r.end_to_end_ms for r in finished]
    return LoadReport(
        requests=len(requests),
        finished=len(finished),
        tokens=sum(len(r.generated) for r in requests),
        seconds=seconds,
        first_token_ms_p50=percentile(first, 50),
        first_token_ms_p90=percentile(first, 90),
        per_token_ms_p50=percentile(per_token, 50),
        per_token_ms_p90=percentile(per_token, 90),
        end_to_end_ms_p50=percentile(whole, 50),
        end_to_end_ms_p90=percentile(whole, 90),
        in_time=sum((deadline or Deadline()).met_by(r) for r in requests),
    )


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least so many percent of the values do not exceed; NaN for no values."""
    if not values:
        return math.nan
    return sorted(values)[max(0, math.ceil(percent / 100 * len(values)) - 1)]
