"""The bar: one decoder's answer to the standard request, cut into its four stages, carried from notebook to notebook.

What notebook 05 ends with, notebook 06 opens with: the same decoder, measured once on this machine and kept beside the
scorecard. Where nothing is kept (another machine, another profile, a notebook opened on its own), it is measured anew.
"""

from __future__ import annotations

import gc
import statistics
from dataclasses import asdict, dataclass

import torch
from matplotlib import pyplot as plt

from every_millisecond import gpu_memory
from every_millisecond.ladder import rungs
from every_millisecond.ladder.worker import prefill_seconds, with_room
from every_millisecond.notebook import plots, scorecard, show
from every_millisecond.request import NEW_TOKENS, PROMPT_TOKENS, standard_prompt
from llm_latency import files, hardware, models
from llm_latency.benchmark import respond

# The rungs of the ladder that a notebook may end with. The first that this machine can run is measured, and the bar
# before it stays unless that was faster, by more than the spreads of the two.
ENDS: dict[str, tuple[str, ...]] = {
    "00": ("kv-cache",),
    "01": ("kv-cache",),
    "02": ("kv-cache",),
    "03": ("kv-cache",),
    "04": ("kv-cache",),
    "05": ("compiled", "half", "sdpa"),
    "06": ("compiled", "half", "sdpa"),
    "07": ("compiled", "half", "sdpa"),
    "08": ("int4", "fast-fp32"),
    "09": ("kernel",),
    "10": ("kernel-speculation", "speculation-int4"),
    "11": ("kernel-speculation", "speculation-int4"),
    "12": ("kernel-prefix", "kernel-everything", "int4-everything"),
    "13": ("kernel-prefix", "kernel-everything", "int4-everything"),
}
# The same decoder with the exercise text kept: where the bar so far is one of these, its own is the one to measure, so
# that two bars differ by one thing alone.
KEEPS_PREFIX = {
    "kernel": "kernel-prefix",
    "kernel-speculation": "kernel-everything",
    "speculation-int4": "int4-everything",
}
REPEATS = 3
SLOW_MS = 10_000.0  # a prefill that takes longer than this is nobody's next bar
LONG_MS = 15_000.0  # an answer that takes longer than this is measured once: three would try a reader's patience


@dataclass(frozen=True, slots=True)
class Bar:
    """One decoder's times of the standard request: medians of the stages over `REPEATS` answers (a single one if it
    takes longer than `LONG_MS`), and the spread of the whole.

    rung: its name in the ladder. stages: {"prefill": ms, ...} as `plots.stage_bar` draws them.
    """

    rung: str
    title: str
    stages: dict[str, float]
    low_ms: float
    high_ms: float

    @property
    def total_ms(self) -> float:
        return sum(self.stages.values())

    @property
    def longest(self) -> str:
        """The stage that takes most of the time: what to attack next."""
        return max(self.stages, key=self.stages.__getitem__)

    def __str__(self) -> str:
        return f"{self.total_ms:.0f} ms ({self.low_ms:.0f} to {self.high_ms:.0f} ms), with the decoder '{self.title}'"


def opens(notebook: str, profile: str | None = None) -> Bar:
    """The bar that the notebook before this one ended with; "00" opens with the first.

    Printed and returned. A notebook opens its bar before it loads anything of its own, so this is also where a GPU that
    cannot hold it is refused. Raises KeyError for a notebook without a bar, RuntimeError for a GPU too small for it.
    """
    _check(notebook)
    gpu_memory.check_card(notebook, profile)
    before = max((name for name in ENDS if name < notebook), default=notebook)
    bar = _kept(profile).get(before)
    found = Bar(**bar) if bar else _reach(before, profile)
    show.here(f"the bar so far: {found}")
    return found


def ends(notebook: str, profile: str | None = None) -> Bar:
    """The bar that this notebook ends with, measured now if its decoder is another than the one it opened with, kept
    for the next, printed and returned. Free your models first: another one is loaded here."""
    _check(notebook)
    before = max((name for name in ENDS if name < notebook), default=notebook)
    found, last = _reach(notebook, profile), _reach(before, profile)
    stays = ENDS[notebook] != ENDS[before] and found == last
    own = tried(notebook, profile)
    word = "slower" if own and own.low_ms > found.high_ms else "not faster beyond the spreads"
    lost = f"; this notebook's own decoder was {word}{f': {own}' if own else ''}" if stays else ""
    show.here(f"the bar is now {found}{lost}")
    return found


def tried(notebook: str, profile: str | None = None) -> Bar | None:
    """The bar of this notebook's own decoder where it was not the faster one, and so is nobody's next."""
    bar = _kept(profile).get(f"{notebook} tried")
    return Bar(**bar) if bar else None


def draw(bars: dict[str, Bar], title: str, alt: str) -> None:
    """Draw bars below one another, each under the name that its key gives it. Their stages are told as text, too."""
    fig, ax = plt.subplots(figsize=(10, 1.6 + 0.7 * len(bars)))
    plots.stage_bar(ax, {name: bar.stages for name, bar in bars.items()})
    ax.set_title(title)
    told = {name: ", ".join(f"{stage} {ms:.0f} ms" for stage, ms in bar.stages.items()) for name, bar in bars.items()}
    show.figure(fig, alt=alt, here="; ".join(f"{name}: {stages}" for name, stages in told.items()))


def _check(notebook: str) -> None:
    if notebook not in ENDS:
        raise KeyError(f"notebook {notebook!r} has no bar; expected one of {', '.join(ENDS)}")


def _path():
    return scorecard.path().with_name("bars.json")


def _machine(profile: str | None) -> str:
    facts = hardware.machine_facts()
    name = str(profile or models.choose_profile(None)[0].name)
    return f"{name}, {facts['gpu'] or facts['cpu']}, {facts['threads']} threads, torch {facts['torch']}"


def _kept(profile: str | None) -> dict[str, dict]:
    return files.read_json(_path(), default={}).get(_machine(profile), {})


def _reach(notebook: str, profile: str | None) -> Bar:
    """The bar that a notebook ends with: kept; or its own decoder's if all its answers were faster than all those of
    the bar before it; or else that bar. Two spreads that overlap change nothing: they may be the machine's mood."""
    kept = _kept(profile)
    if notebook in kept:
        return Bar(**kept[notebook])
    before = max((name for name in ENDS if name < notebook), default=None)
    best = _reach(before, profile) if before else None
    entry = {}
    if best is None or ENDS[notebook] != ENDS[before]:
        for name in _own(notebook, best):
            found = _measure(name, profile) if _runs_here(name) else None
            if found is not None:
                if best is None or found.high_ms < best.low_ms:
                    best = found
                else:
                    entry = {f"{notebook} tried": asdict(found)}
                break
    if best is None:
        raise RuntimeError(f"no decoder of notebook {notebook} runs here; `llm-latency doctor` says why")
    machine = _machine(profile)
    entry |= {notebook: asdict(best)}
    files.update_json(_path(), lambda all: all | {machine: all.get(machine, {}) | entry}, default={})
    return best


def _own(notebook: str, best: Bar | None) -> tuple[str, ...]:
    """The rungs that a notebook may end with, behind the best bar so far."""
    same = KEEPS_PREFIX.get(best.rung) if best else None
    return (same,) if same in ENDS[notebook] else ENDS[notebook]


def _runs_here(name: str) -> bool:
    # Compiling takes minutes on a CPU and gains a tenth there: notebook 05 measures it, a bar does not wait for it.
    return rungs.rung(name).unavailable() is None and (name != "compiled" or torch.cuda.is_available())


def _measure(name: str, profile: str | None) -> Bar | None:
    """One rung's bar; None if its prefill alone takes longer than `SLOW_MS`, unless it is the ladder's baseline, which
    every machine has to begin with, however slow it is."""
    entry = rungs.rung(name)
    tokenizer = models.load_tokenizer(profile)
    prompt = standard_prompt(tokenizer)
    stepper = with_room(entry.build(profile), PROMPT_TOKENS + NEW_TOKENS)
    if name != rungs.BASELINE and prefill_seconds(stepper) * 1e3 > SLOW_MS:
        return None
    respond(stepper, tokenizer, prompt, 4)  # the first call of all allocates, and compiles
    runs: list[dict[str, float]] = []
    while not runs or (len(runs) < REPEATS and sum(runs[0].values()) <= LONG_MS):
        runs.append(plots.stage_values(respond(stepper, tokenizer, prompt, NEW_TOKENS).breakdown))
    del stepper
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    totals = [sum(run.values()) for run in runs]
    stages = {stage: statistics.median(run[stage] for run in runs) for stage in plots.STAGES}
    return Bar(name, entry.title.removeprefix("+ "), stages, min(totals), max(totals))
