"""An open load: requests arrive when users send them, whether or not the server keeps up with those before.

A closed loop, whose next request waits for the last answer, slows down with the server and so never sees the queue that
real users would stand in (coordinated omission). Here each request has its moment, drawn beforehand, and its times
count from that moment.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import aiohttp
import numpy as np

from every_millisecond.serving.client import STALL_S, Answer, ask, one_each
from llm_latency.arguments import check_count, check_number

LATE_MS = 5.0  # the client's own delay at its 99th percentile, beyond which its figures say something about itself
QUANTILES = (50, 90, 99)


def arrivals(rate: float, requests: int, seed: int = 0) -> np.ndarray:
    """Moments of a Poisson process, in seconds from the start: gaps drawn from an exponential distribution.

    rate: requests a second. Raises ValueError for a rate that is not positive.
    """
    check_count("requests", requests)
    if check_number("rate", rate, least=0) == 0:
        raise ValueError(f"rate={rate}; expected requests a second, more than 0")
    return np.cumsum(np.random.default_rng(seed).exponential(1 / rate, requests))


@dataclass(frozen=True, slots=True)
class LoadResult:
    """One load: its answers in the order of their moments, and how long it took in all.

    limits_ms: (time to first token, time per output token) within which an answer counts for goodput.
    """

    rate: float
    answers: tuple[Answer, ...]
    seconds: float
    limits_ms: tuple[float, float]

    @property
    def whole(self) -> list[Answer]:
        return [answer for answer in self.answers if answer.error is None]

    def errors(self) -> dict[str, int]:
        """How many requests failed for each reason."""
        return dict(Counter(answer.error for answer in self.answers if answer.error is not None))

    def quantiles(self, name: str) -> dict[int, float]:
        """p50, p90 and p99 of "ttft_ms", "tpot_ms" or "end_to_end_ms" over the whole answers; empty without any."""
        values = [value for answer in self.whole if (value := getattr(answer, name)) is not None]
        return {q: float(np.percentile(values, q)) for q in QUANTILES} if values else {}

    @property
    def tokens_per_second(self) -> float:
        return sum(a.tokens if a.tokens is not None else a.pieces for a in self.whole) / self.seconds

    @property
    def goodput(self) -> float:
        """Requests a second that came whole and within both limits."""
        first, pace = self.limits_ms
        good = sum(a.ttft_ms <= first and (a.tpot_ms is None or a.tpot_ms <= pace) for a in self.whole)
        return good / self.seconds

    @property
    def late_ms(self) -> float:
        """By how much the client itself was late with its requests, at the 99th percentile."""
        return float(np.percentile([(a.sent - a.due) * 1e3 for a in self.answers], 99))

    def report(self) -> str:
        """Lines for `print`."""
        first, pace = self.limits_ms
        lines = [
            f"{self.rate:g} requests/s: {len(self.whole)} of {len(self.answers)} whole in {self.seconds:.1f} s",
            f"  {self.tokens_per_second:.0f} tokens/s; goodput {self.goodput:.2f} requests/s (first token within "
            f"{first:g} ms, then {pace:g} ms a token)",
        ]
        for title, name in (("time to first token", "ttft_ms"), ("time per output token", "tpot_ms"),
                            ("end to end", "end_to_end_ms")):  # fmt: skip
            if found := self.quantiles(name):
                cells = "  ".join(f"p{q} {ms:9.1f} ms" for q, ms in found.items())
                lines.append(f"  {title:22}{cells}")
        if any(answer.tokens is None for answer in self.whole):
            lines.append("  the server does not count its tokens: pieces of text were counted instead")
        lines += [f"  {note}" for note in sorted({note for answer in self.answers for note in answer.notes})]
        lines += [f"  {count} failed: {reason}" for reason, count in self.errors().items()]
        if self.late_ms > LATE_MS:
            lines.append(
                f"  ALARM: the client was {self.late_ms:.1f} ms late with its own requests (p99): these figures are "
                "partly its own; lower the rate, or measure from another machine"
            )
        return "\n".join(lines)

    def record(self) -> dict:
        """For JSON: the raw times of every request, in ms from its own moment, and the errors."""
        return {
            "rate": self.rate,
            "seconds": self.seconds,
            "limits_ms": list(self.limits_ms),
            "late_ms_p99": self.late_ms,
            "requests": [
                {
                    "late_ms": (a.sent - a.due) * 1e3,
                    "arrivals_ms": [round((moment - a.due) * 1e3, 3) for moment in a.arrivals],
                    "tokens": a.tokens,
                    "error": a.error,
                }
                for a in self.answers
            ],
        }


async def open_load(
    url: str,
    conversations: Sequence[list[dict[str, str]]],
    *,
    rate: float,
    requests: int,
    model: str,
    max_tokens: int,
    seed: int = 0,
    limits_ms: tuple[float, float] = (1000.0, 100.0),
    stall_s: float = STALL_S,
    progress: Callable[[int], None] = lambda done: None,
    **options: object,
) -> LoadResult:
    """Send `requests` chat requests at the moments of a Poisson process and wait for all answers.

    conversations: taken in turn. limits_ms: for goodput. progress: called with the number of answers so far. options:
    further fields of each request's body. Errors are counted, never raised.
    """
    if not conversations:
        raise ValueError("conversations is empty; expected at least one list of messages")
    moments = arrivals(rate, requests, seed)
    done = 0

    async def one(session: aiohttp.ClientSession, number: int) -> Answer:
        nonlocal done
        due = begin + moments[number]
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        messages = conversations[number % len(conversations)]
        answer = await ask(
            session, url, messages, model=model, max_tokens=max_tokens, due=due, stall_s=stall_s, **options
        )
        done += 1
        progress(done)
        return answer

    async with one_each() as session:  # no queue of the client's own
        begin = time.perf_counter() + 0.05
        answers = await asyncio.gather(*(one(session, number) for number in range(requests)))
        return LoadResult(rate, tuple(answers), time.perf_counter() - begin, limits_ms)
