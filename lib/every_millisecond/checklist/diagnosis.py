"""`diagnose`: what binds each stage of a model on this machine, and what to do first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from rich.markup import escape
from rich.table import Table

from every_millisecond.checklist.advice import AS_FAST, ITEMS, Advice
from every_millisecond.laboratory.counting import matmul_rate
from every_millisecond.request import NEW_TOKENS, PROMPT_TOKENS
from every_millisecond.subject import Subject
from llm_latency import hardware, roofline


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage as measured, and what explains it. Times in ms, of the whole prefill or of one decode step.

    work_ms: the least time of its FLOPs and bytes. limit: "compute" or "bandwidth", whichever sets work_ms.
    launch_ms: issuing its operators. rest_ms: what neither explains.
    bound: the largest of them: "compute", "bandwidth", "launch" or "rest".
    """

    name: str
    measured_ms: float
    work_ms: float
    launch_ms: float
    limit: str

    @property
    def rest_ms(self) -> float:
        return max(0.0, self.measured_ms - self.work_ms - self.launch_ms)

    @property
    def bound(self) -> str:
        parts = {self.limit: self.work_ms, "launch": self.launch_ms, "rest": self.rest_ms}
        return max(parts, key=parts.__getitem__)

    def __str__(self) -> str:
        words = {"compute": "arithmetic", "bandwidth": "bytes", "launch": "issuing operators", "rest": "neither"}
        beaten = self.work_ms > 1.05 * self.measured_ms
        alarm = " ALARM: sooner than its own limit allows; was another load on when the limit was measured?" * beaten
        return (
            f"{self.name}: {self.measured_ms:.1f} ms, bound by {words[self.bound]} ({words[self.limit]} "
            f"{self.work_ms:.1f} ms, issuing operators {self.launch_ms:.1f} ms, the rest {self.rest_ms:.1f} ms){alarm}"
        )


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """stages: prefill of the standard prompt and one decode step. advice: the checklist, the largest gain first."""

    model: str
    machine: str
    weights: str
    parameters: int
    weight_bytes: int
    cache_bytes_per_token: int
    stages: tuple[Stage, ...]
    total_ms: float
    advice: tuple[Advice, ...]

    def summary(self) -> str:
        """Lines for `print`: the model, the request, the stages with their bounds."""
        lines = [
            f"{self.model} on {self.machine}: {self.parameters / 1e6:.0f} million parameters in {self.weights}, "
            f"{self.weight_bytes / 1e6:.0f} MB, {self.cache_bytes_per_token:,} bytes of cache a token",
            f"{PROMPT_TOKENS} tokens in, {NEW_TOKENS} out: {self.total_ms:.0f} ms without the two ends",
        ]
        return "\n".join(lines + [str(stage) for stage in self.stages])

    def rows(self) -> list[list[str]]:
        """One row per item of the checklist."""
        return [
            [
                str(advice.priority),
                advice.title + (" (in use)" if advice.in_use else ""),
                "-" if advice.gain is None else f"{advice.gain:.2f} {advice.unit}",
                advice.how,
                advice.why,
                advice.quality,
                advice.notebook,
            ]
            for advice in self.advice
        ]

    def table(self) -> Table:
        """The checklist as a rich table."""
        shown = Table(title="Your checklist, by what it gains", title_justify="left")
        for header in ("priority", "item", "gain", "how", "why", "cost in quality", "notebook"):
            shown.add_column(header, overflow="fold")
        for row in self.rows():
            shown.add_row(*map(escape, row))
        return shown


def ranked(advice: list[Advice]) -> tuple[Advice, ...]:
    """What is not in use yet first, the largest gain first; what shortens one request before what helps many; what
    cannot be measured last; then what is in use, by what would be lost without it."""

    def key(entry: Advice) -> tuple:
        return entry.in_use, entry.gain is None, entry.unit != AS_FAST, -(entry.gain or 0.0), entry.priority

    return tuple(sorted(advice, key=key))


def diagnose(
    profile: str | None = None, *, progress: Callable[[str, int, int], None] = lambda name, done, of: None
) -> Diagnosis:
    """Measure a model for some seconds: prefill, decode step, launches, and the items that can be tried at once.

    profile: a profile's name, a folder with a Llama-, Qwen2- or Mistral-like model, or None for the default.

    Raises ValueError for an unknown profile or another architecture, and RuntimeError if it cannot be fetched.
    """
    from every_millisecond.ladder.runner import check_model

    profile = check_model(profile)
    progress("the model as it is", 0, len(ITEMS) + 1)
    subject = Subject(profile)
    peak = roofline.measured_peak(hardware.ceilings(subject.device), subject.weights)
    rate = matmul_rate(subject.shape, subject.ids.shape[1], subject.weights, subject.device)
    predicted = roofline.predict_request(
        subject.shape, peak, prompt_tokens=subject.ids.shape[1], new_tokens=2, weights=subject.weights,
        prefill_peak=replace(peak, flops_per_s=rate),
    )  # fmt: skip
    measured = {"prefill": subject.times.prefill_ms, "decode": subject.times.step_ms}
    names = {"prefill": "prefill", "decode": "decode step"}
    stages = tuple(
        Stage(names[key], ms, predicted[key].ms, subject.launch_ms, predicted[key].bound)
        for key, ms in measured.items()
    )
    advice = []
    for done, item in enumerate(ITEMS, start=1):
        progress(item.title, done, len(ITEMS) + 1)
        advice.append(item.advise(subject))
    progress("done", len(ITEMS) + 1, len(ITEMS) + 1)
    facts = hardware.machine_facts()
    return Diagnosis(
        model=profile,
        machine=str(facts["gpu"] or f"{facts['cpu']}, {facts['threads']} threads"),
        weights=subject.weights,
        parameters=subject.shape.parameters,
        weight_bytes=roofline.parameter_bytes(subject.shape, subject.weights),
        cache_bytes_per_token=roofline.cache_bytes(subject.shape, 1, cache=subject.weights),
        stages=stages,
        total_ms=subject.times.total_ms(),
        advice=ranked(advice),
    )
