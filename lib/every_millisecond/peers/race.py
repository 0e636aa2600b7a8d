"""Runs the contenders side by side: each in its own long-lived process, driven in turn, so their thread pools do not
fight and a slow minute of the machine hits all alike."""

from __future__ import annotations

import contextlib
import datetime
import json
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field

from every_millisecond.openmp import process_environment
from every_millisecond.peers.contenders import Contender
from llm_latency import hardware
from llm_latency.timing import Comparison

BASELINE = "hf-fp32"
NOT_RUN, FAILED, MEASURED = "not installed", "failed", "measured"
LIMIT_S = 150.0  # for loading and for each answer; a first one may compile


class Process:
    """A contender's process. Raises RuntimeError with its last words if it dies, or if an answer takes over `limit_s`
    seconds; then it is ended."""

    def __init__(self, name: str, profile: str | None, limit_s: float) -> None:
        self.limit_s = limit_s
        self.noise = tempfile.TemporaryFile("w+")
        command = [sys.executable, "-m", "every_millisecond.peers.worker", name, profile or ""]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.noise, text=True,
            env=process_environment(),
        )  # fmt: skip
        self._read()

    def ask(self, prompt: list[int], new_tokens: int) -> dict:
        """Answer a prompt: the fields of `contenders.Answer`."""
        with contextlib.suppress(BrokenPipeError):  # it died in between; reading tells why
            self.process.stdin.write(json.dumps({"prompt": prompt, "new_tokens": new_tokens}) + "\n")
            self.process.stdin.flush()
        return self._read()

    def close(self) -> None:
        """End the process; it may be gone already."""
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()
        self.noise.close()

    def _read(self) -> dict:
        late = threading.Event()

        def end() -> None:
            late.set()
            self.process.kill()

        timer = threading.Timer(self.limit_s, end)
        timer.start()
        line = self.process.stdout.readline()
        timer.cancel()
        if late.is_set():
            raise RuntimeError(f"no answer within {self.limit_s:g} s")
        if line:
            try:
                return json.loads(line)
            except json.JSONDecodeError:
                raise RuntimeError(f"the process wrote {line[:80]!r} where an answer belongs") from None
        code = self.process.wait()
        self.noise.seek(0)
        words = self.noise.read().strip().splitlines()
        if code < 0:
            raise RuntimeError(f"the process was ended by {signal.Signals(-code).name}")
        raise RuntimeError(words[-1] if words else f"the process ended with code {code}")


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
    recorded with its reason and the others go on. Returns a
    dictionary fit for JSON: date, machine, settings, one entry per contender, and the ratios against HF FP32.
    Raises ValueError for counts and limits that measure nothing.
    """
    if not 0 < limit_s < threading.TIMEOUT_MAX:
        raise ValueError(f"limit_s={limit_s!r}; expected a number of seconds above 0, and finite")
    if rounds < 1 or warmup < 0 or new_tokens < 2:
        raise ValueError(f"expected rounds >= 1, warmup >= 0, new_tokens >= 2; got {rounds}, {warmup}, {new_tokens}")
    records = [PeerRecord(c.name, c.title, c.ours, MEASURED) for c in contenders]
    processes: dict[str, Process] = {}
    for entry, record in zip(contenders, records, strict=True):
        reason = entry.unavailable(profile)
        if reason:
            record.status, record.reason = NOT_RUN, reason
            continue
        progress(f"loading {entry.title}")
        try:
            processes[entry.name] = Process(entry.name, profile, limit_s)
        except RuntimeError as error:
            record.status, record.reason = FAILED, str(error)
    try:
        for turn in range(warmup + rounds):
            progress(f"round {turn + 1} of {warmup + rounds}" + (" (warm-up)" if turn < warmup else ""))
            for record in records if turn % 2 == 0 else reversed(records):
                if record.status != MEASURED:
                    continue
                try:
                    answer = processes[record.name].ask(prompt, new_tokens)
                except RuntimeError as error:
                    record.status, record.reason = FAILED, str(error)
                    continue
                record.ids = answer["ids"]
                if turn >= warmup:
                    record.prefill_ms.append(answer["prefill_ms"])
                    record.decode_ms.append(answer["decode_ms"])
    finally:
        for process in processes.values():
            process.close()
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
