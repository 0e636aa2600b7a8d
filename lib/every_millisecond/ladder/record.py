"""What was measured: of one rung by one process, and of a whole run, as it is written to JSON and read again."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median

import numpy as np

from llm_latency import files, hardware

STAGES = ("tokenise", "prefill", "decode", "detokenise")
MEASURED, UNAVAILABLE, FAILED = "measured", "unavailable", "failed"
FINISHED = "ladder.json"  # a folder's run, once all of it is measured
REPORT = "report.html"  # what is written last
EXPLAINED = 0.25  # a prediction that misses the clock by more than this share of it has left something out


@dataclass(slots=True)
class RungRecord:
    """Raw samples and facts of one rung. Times in ms, one sample per answered request, warm-up left out.

    Whoever asks a rung that was not measured for its figures gets a RuntimeError that says why it was not.
    """

    name: str
    title: str
    notebook: str
    status: str  # MEASURED, UNAVAILABLE or FAILED
    reason: str = ""
    weights: str = ""
    cache: str = ""
    on_path: bool = False
    activations: str = ""  # in the kernel: "int16" or "int8"
    own_request: bool = False  # it answers another request than the standard one: no ratio to the others but in passing
    alone: str = ""  # the rung that adds this one's step to the baseline alone, or to the rung `over`
    over: str = ""
    exact: bool = False
    slowness: float = 1.0  # of the machine, as the baseline showed it in its first steps; limits scale with it
    load_s: float | None = None
    first_ms: float | None = None
    samples_ms: dict[str, list[float]] = field(default_factory=dict)  # each stage, "total" and "wall"
    prompt_tokens: int = 0
    kept_tokens: int = 0  # of the prompt: read before the request came, and not again
    new_tokens: int = 0
    ids: list[int] = field(default_factory=list)
    text: str = ""
    perplexity: float | None = None
    agreement: float | None = None
    tokens_per_pass: float | None = None  # of a speculative decoder: new tokens over passes of the target
    acceptance: float | None = None  # of a speculative decoder: accepted tokens over those that were tested
    draft_cost: float | None = None  # of a speculative decoder: time of a draft step over a pass of the target
    rows_per_pass: float | None = None  # of a speculative decoder: tokens that a pass of the target reads
    draft_bytes: int | None = None  # of a speculative decoder: weight bytes that a guess reads
    launch_ms: float | None = None  # a step of the narrow twin (speculative: a cycle): what issuing the operators takes
    draft_prefill_ms: float | None = None  # of a speculative decoder, in the shallow twin: the draft reads the prompt
    rates: dict[str, float] = field(default_factory=dict)  # FLOP/s of the shallow twin's "prefill" and of its "pass"
    step_bytes: int | None = None  # weight bytes that a pass reads, as the decoder itself counts them
    weight_bytes: int | None = None
    predicted: dict[str, float] = field(default_factory=dict)  # ms by stage, from this machine's ceilings
    share_of_limit: dict[str, float] = field(default_factory=dict)  # predicted / measured, by stage

    @property
    def measured(self) -> bool:
        return self.status == MEASURED

    @property
    def not_finished(self) -> str:
        """Why there are no figures, for a table or a notebook; empty if there are."""
        words = {MEASURED: "", UNAVAILABLE: "not available here: ", FAILED: "not finished here: "}[self.status]
        return words and words + self.reason

    def samples(self, stage: str) -> list[float]:
        """A stage's samples in ms. Raises KeyError for a stage without any."""
        if not self.measured:
            raise RuntimeError(f"rung {self.name!r} is {self.not_finished}")
        if not self.samples_ms.get(stage):
            raise KeyError(f"rung {self.name!r} has no samples of {stage!r}")
        return self.samples_ms[stage]

    def median_ms(self, stage: str) -> float:
        """Median of a stage's samples in ms."""
        return median(self.samples(stage))

    def stages(self) -> dict[str, float]:
        """Median ms of each of the four stages."""
        return {stage: self.median_ms(stage) for stage in STAGES}

    @property
    def tokens_per_second(self) -> float:
        """Decode rate: the first token comes from the prefill, so n tokens are n - 1 decode steps."""
        return (self.new_tokens - 1) / (self.median_ms("decode") / 1e3)

    @property
    def unaccounted_share(self) -> float:
        """Share of the wall clock that no stage holds, from the same requests' own clocks."""
        parts = [sum(values) for values in zip(*(self.samples(stage) for stage in STAGES), strict=True)]
        return median(1 - part / wall for part, wall in zip(parts, self.samples("wall"), strict=True))

    def explains(self, stage: str) -> bool:
        """Whether the prediction of a stage is within 25% of the clock."""
        measured = self.median_ms(stage)
        return abs(self.predicted[stage] - measured) <= EXPLAINED * measured

    def spread_ms(self, stage: str = "wall") -> tuple[float, float]:
        """10th and 90th percentile of a stage's samples in ms."""
        p10, p90 = np.percentile(self.samples(stage), (10, 90))
        return float(p10), float(p90)

    def summary(self) -> str:
        """One line for `print`: the whole request and the rate of decode, or why there are none."""
        if not self.measured:
            return f"{self.title:20} {self.not_finished}"
        return f"{self.title:20} {self.median_ms('wall'):8.0f} ms   {self.tokens_per_second:6.1f} tok/s"

    def write(self, path: Path) -> None:
        files.write_atomically(path, json.dumps(asdict(self), indent=1))

    @classmethod
    def read(cls, path: Path) -> RungRecord:
        return cls(**files.read_json(path, default=None))

    def extend(self, other: RungRecord) -> None:
        """Add another process's samples of the same rung."""
        if other.name != self.name:
            raise ValueError(f"samples of rung {other.name!r} cannot be added to {self.name!r}")
        for stage, values in other.samples_ms.items():
            self.samples_ms.setdefault(stage, []).extend(values)


def load_run(path: Path) -> dict:
    """A run written by `run_ladder`: the file itself or its folder. Raises ValueError if there is none."""
    path = path / FINISHED if path.is_dir() else path
    run = files.read_json(path, default=None)
    if run is None:
        raise ValueError(f"no run at {path}; measure one with `llm-latency run`")
    return run


def newest_run(folder: Path, needed: tuple[str, ...] = ()) -> tuple[Path, dict]:
    """The newest recorded ladder of a results folder in which all `needed` rungs were measured: its path, and the run.

    Of one day's, the one with the most rungs. Raises ValueError if there is none.
    """
    found = []
    for path in folder.glob("*ladder*.json"):
        run = load_run(path)
        measured = {entry["name"] for entry in run["rungs"] if entry["status"] == MEASURED}
        if {run["baseline"], *needed} <= measured:
            found.append((run["date"], len(measured), path.name, path, run))
    if not found:
        wanted = f" with the rungs {', '.join(needed)}" if needed else ""
        raise ValueError(f"no recorded ladder{wanted} in {folder}; `make run` measures one")
    *_, path, run = max(found, key=lambda entry: entry[:3])
    return path, run


def nearest_run(results: Path, own: Path, profile: str) -> tuple[str, dict]:
    """The recorded ladder that says most about this machine, and whose it is, in words for a label.

    The newest of the reader's own under `own` (what `make run` leaves there); else the newest in `results` of a machine
    of this kind (the same GPU, or a CPU with the same vector units); else the newest of any. A run of the profile comes
    before one of another model. Raises ValueError if there is none.
    """
    here = hardware.machine_facts()
    found = []
    for path in [*own.glob(f"*/{FINISHED}"), *results.glob("*ladder*.json")]:
        run = load_run(path)
        records = records_of(run)
        if run["profile"].endswith("-shape") or not any(r.name == run["baseline"] and r.measured for r in records):
            continue
        yours, there = path.name == FINISHED, run["machine"]
        kind = all(there.get(key) == here[key] for key in ("gpu", "cpu_capability"))
        rank = run["profile"] == profile, yours, kind, run["date"], sum(r.measured for r in records), str(path)
        whose = "your own run" if yours else "a recorded run, this kind of machine" if kind else "a recorded run"
        found.append((rank, whose, run))
    if not found:
        raise ValueError(f"no recorded ladder in {results} or {own}; `make run` measures one")
    _, whose, run = max(found, key=lambda entry: entry[0])
    return f"{whose}: {machine_of(run)}, {run['date']}", run


def machine_of(run: dict) -> str:
    """A run's machine in words: its GPU, or its CPU with the vector units that tell two of one maker apart."""
    machine = run["machine"]
    return machine["gpu"] or f"{machine['cpu']} ({machine['cpu_capability']})"


def records_of(run: dict) -> list[RungRecord]:
    """The rungs of a run as records."""
    return [RungRecord(**entry) for entry in run["rungs"]]
