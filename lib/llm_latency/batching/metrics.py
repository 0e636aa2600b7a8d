"""What a load did to everybody: throughput, latencies, and goodput."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from llm_latency.arguments import check_number
from llm_latency.batching.request import Request, State


@dataclass(frozen=True, slots=True)
class Deadline:
    """What a user puts up with: first token and each further one in time (milliseconds). None: no limit.

    Raises TypeError or ValueError for a limit that is not positive and finite.
    """

    first_token_ms: float | None = None
    per_token_ms: float | None = None

    def __post_init__(self) -> None:
        for name in ("first_token_ms", "per_token_ms"):
            limit = getattr(self, name)
            if limit is not None and check_number(name, limit, 0) == 0:
                raise ValueError(f"{name}=0; expected a positive time, or None for no limit")

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
    times = {"first_token_ms": first, "per_token_ms": per_token, "end_to_end_ms": whole}
    percentiles = {
        f"{name}_p{percent}": float(np.percentile(values, percent)) if values else math.nan
        for name, values in times.items()
        for percent in (50, 90)
    }
    return LoadReport(
        requests=len(requests),
        finished=len(finished),
        tokens=sum(len(r.generated) for r in requests),
        seconds=seconds,
        in_time=sum((deadline or Deadline()).met_by(r) for r in requests),
        **percentiles,
    )
