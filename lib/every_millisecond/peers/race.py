"""Runs the contenders side by side: each in its own long-lived process, driven in turn, so their thread pools do not
fight and a slow minute of the machine hits all alike."""

from __future__ import annotations

import contextlib
import datetime
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field

from every_millisecond.peers.contenders import Contender
from every_millisecond.processes import Worker, WorkerFailed, ended_by_sigterm
from llm_latency import hardware
from llm_latency.timing import Comparison

BASELINE = "hf-fp32"
NOT_RUN, FAILED, MEASURED = "not installed", "failed", "measured"
LIMIT_S = 150.0  # for loading and for each answer; a first one may compile


@dataclass(slots=True)
class PeerRecord:
    """What the race found of one contender. Times in ms, one per round; ids of the last answer."""

    name: str
    title: str
    ours: bool
    status: str
    reason: str = ""
    prefill_ms: list[float] = field(default_factory=list)
    decode_ms: list[float] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)


def run_race(
    contenders: Sequence[Contender],
    prompt: list[int],
    new_tokens: int,
    *,
    profile: str | None = None,
    rounds: int = 5,
    warmup: int = 2,
    limit_s: float = LIMIT_S,
    progress: Callable[[str], None] = lambda text: None,
) -> dict:
    """Drive the contenders through `warmup` + `rounds` answers each, in turns whose order alternates.

    A contender that is not installed, fails, crashes or takes over `limit_s` seconds to load or to answer once is
    recorded with its reason and the others go on. Returns a dictionary fit for JSON: date, machine, settings, one entry
    per contender, and the ratios against HF FP32.
    Raises ValueError for counts and limits that measure nothing.
    """
    if not 0 < limit_s < threading.TIMEOUT_MAX:
        raise ValueError(f"limit_s={limit_s!r}; expected a number of seconds above 0, and finite")
    if rounds < 1 or warmup < 0 or new_tokens < 2:
        raise ValueError(f"expected rounds >= 1, warmup >= 0, new_tokens >= 2; got {rounds}, {warmup}, {new_tokens}")
    records = [PeerRecord(c.name, c.title, c.ours, MEASURED) for c in contenders]
    workers: dict[str, Worker] = {}
    with contextlib.ExitStack() as stack:
        stack.enter_context(ended_by_sigterm())
        for entry, record in zip(contenders, records, strict=True):
            reason = entry.unavailable(profile)
            if reason:
                record.status, record.reason = NOT_RUN, reason
                continue
            progress(f"loading {entry.title}")
            try:
                worker = stack.enter_context(Worker("every_millisecond.peers.worker", [entry.name, profile or ""]))
                worker.read(limit_s)
                workers[entry.name] = worker
            except WorkerFailed as error:
                record.status, record.reason = FAILED, str(error)
        for turn in range(warmup + rounds):
            progress(f"round {turn + 1} of {warmup + rounds}" + (" (warm-up)" if turn < warmup else ""))
            for record in records if turn % 2 == 0 else reversed(records):
                if record.status != MEASURED:
                    continue
                try:
                    answer = workers[record.name].ask({"prompt": prompt, "new_tokens": new_tokens}, limit_s)
                except WorkerFailed as error:
                    record.status, record.reason = FAILED, str(error)
                    continue
                record.ids = answer["ids"]
                if turn >= warmup:
                    record.prefill_ms.append(answer["prefill_ms"])
                    record.decode_ms.append(answer["decode_ms"])
    return {
        "date": datetime.date.today().isoformat(),
        "profile": profile,
        "machine": hardware.machine_facts(),
        "settings": {"prompt_tokens": len(prompt), "new_tokens": new_tokens, "rounds": rounds, "warmup": warmup},
        "baseline": BASELINE,
        "peers": [asdict(record) for record in records],
        "ratios": ratios(records, new_tokens),
    }


def ratios(records: Sequence[PeerRecord], new_tokens: int) -> dict[str, dict]:
    """Per contender: median tokens/s of decode, and how many times faster than each contender that is not ours it
    decodes and answers, round by round (median, 10th and 90th percentile)."""
    measured = {r.name: r for r in records if r.status == MEASURED}
    totals = {n: tuple(a + b for a, b in zip(r.prefill_ms, r.decode_ms, strict=True)) for n, r in measured.items()}
    decode = Comparison({n: tuple(r.decode_ms) for n, r in measured.items()}, {}, "perf_counter")
    total = Comparison(totals, {}, "perf_counter")
    found = {}
    for name in measured:
        found[name] = {"tokens_per_second": (new_tokens - 1) / decode.median_ms[name] * 1e3}
        for peer in (r for r in measured.values() if not r.ours):
            found[name][f"decode_vs_{peer.name}"] = asdict(decode.speedup(name, peer.name))
            found[name][f"total_vs_{peer.name}"] = asdict(total.speedup(name, peer.name))
    return found
