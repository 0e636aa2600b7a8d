"""What one process measured of one rung, as it is written to JSON and read again."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median

import numpy as np

from llm_latency import files

STAGES = ("tokenise", "prefill", "decode", "detokenise")


@dataclass(slots=True)
class RungRecord:
    """Raw samples and facts of one rung. Times in ms, one sample per answered request, warm-up left out."""

    name: str
    title: str
    notebook: str
    status: str  # "measured", "unavailable" or "failed"
    reason: str = ""
    weights: str = ""
    cache: str = ""
    on_path: bool = False
    own_request: bool = False  # it answers another request than the standard one: no ratio to the others but in passing
    alone: str = ""  # the rung that adds this one's step to the baseline alone, or to the rung `over`
    over: str = ""
    exact: bool = False
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
    launch_ms: float | None = None  # a step of the narrow twin: what issuing the operators takes
    weight_bytes: int | None = None
    predicted: dict[str, float] = field(default_factory=dict)  # ms by stage, from this machine's ceilings
    share_of_limit: dict[str, float] = field(default_factory=dict)  # predicted / measured, by stage

    def median_ms(self, stage: str) -> float:
        """Median of a stage's samples in ms. Raises KeyError for a stage without samples."""
        if not self.samples_ms.get(stage):
            raise KeyError(f"rung {self.name!r} has no samples of {stage!r}")
        return median(self.samples_ms[stage])

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
        parts = [sum(values) for values in zip(*(self.samples_ms[stage] for stage in STAGES), strict=True)]
        return median(1 - part / wall for part, wall in zip(parts, self.samples_ms["wall"], strict=True))

    def spread_ms(self, stage: str = "wall") -> tuple[float, float]:
        """10th and 90th percentile of a stage's samples in ms."""
        p10, p90 = np.percentile(self.samples_ms[stage], (10, 90))
        return float(p10), float(p90)

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
