"""What each step of the cumulative path gave, what it gives alone, and where the two do not add up."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from every_millisecond.ladder.record import RungRecord, load_run, machine_of, records_of

NOISE = 0.02  # of the baseline: two gains that differ by less are the same


@dataclass(frozen=True, slots=True)
class Step:
    """One step of the path. Times are medians of whole requests in ms.

    before_ms, after_ms: without and with it, on top of the steps before it. baseline_ms: where the path begins.
    over: title of the leaner rung that it was measured alone on, "" for the baseline. over_ms, alone_ms: that rung
    without this step and with it alone; None where that was not measured, or is the very rung on the path.
    changed: what differs from the rung before, beside the code, in words.
    """

    name: str
    title: str
    before_ms: float
    after_ms: float
    baseline_ms: float
    over_ms: float | None = None
    alone_ms: float | None = None
    over: str = ""
    changed: str = ""

    @property
    def gain_ms(self) -> float:
        """ms that the step took away where it stands on the path; below 0 where it added some."""
        return self.before_ms - self.after_ms

    @property
    def share(self) -> float:
        """The gain as a share of the baseline. The shares of all steps and of what is left add up to 1."""
        return self.gain_ms / self.baseline_ms

    @property
    def alone_gain_ms(self) -> float | None:
        """ms that the step alone takes away."""
        return None if self.alone_ms is None or self.over_ms is None else self.over_ms - self.alone_ms

    @property
    def alone_factor(self) -> float | None:
        """How many times faster the step alone is."""
        return None if self.alone_ms is None or self.over_ms is None else self.over_ms / self.alone_ms

    @property
    def loses(self) -> bool:
        """It made the request slower where it stands."""
        return self.gain_ms < 0

    @property
    def overlaps(self) -> bool:
        """Alone it saves more than here: a step before it has already saved some of the same milliseconds."""
        return self.alone_gain_ms is not None and self.alone_gain_ms - self.gain_ms > NOISE * self.baseline_ms


def way(records: Sequence[RungRecord], baseline: str) -> list[RungRecord]:
    """The measured rungs of the cumulative path in order, from the baseline on: what stands before it, such as the rung
    without a KV cache, is not part of any ratio. Empty if the baseline was not measured."""
    names = [record.name for record in records]
    if baseline not in names:
        return []
    after = records[names.index(baseline) :]
    if not after[0].measured:
        return []
    return [after[0], *(record for record in after[1:] if record.on_path and record.measured)]


def steps(records: Sequence[RungRecord], baseline: str) -> list[Step]:
    """Each step of the path. Their gains add up to the first total less the last, by construction from medians."""
    path = way(records, baseline)
    measured = {record.name: record.median_ms("wall") for record in records if record.measured}
    titles = {record.name: record.title for record in records}
    return [
        Step(
            name=record.name,
            title=record.title,
            before_ms=before.median_ms("wall"),
            after_ms=record.median_ms("wall"),
            baseline_ms=path[0].median_ms("wall"),
            over_ms=measured.get(record.over or baseline),
            alone_ms=measured.get(record.alone) if record.alone != record.name else None,
            changed=_changed(before, record),
            over="" if record.over in ("", baseline) else titles.get(record.over, record.over),
        )
        for before, record in pairwise(path)
    ]


def _changed(before: RungRecord, after: RungRecord) -> str:
    """What the records of two rungs tell apart: formats, the activations' rounding, guesses, what is kept."""
    words = [
        f"{name} {getattr(before, name)} -> {getattr(after, name)}"
        for name in ("weights", "cache")
        if getattr(before, name) != getattr(after, name)
    ]
    if before.activations != after.activations:
        words.append(f"activations {before.activations or 'unrounded'} -> {after.activations or 'unrounded'}")
    if before.kept_tokens != after.kept_tokens:
        words.append(f"prompt tokens read beforehand {before.kept_tokens} -> {after.kept_tokens}")
    if _guesses(before) != _guesses(after):
        words.append(f"tokens a pass {before.tokens_per_pass or 1:.3g} -> {after.tokens_per_pass or 1:.3g}")
    return ", ".join(words)


def _guesses(record: RungRecord) -> bool:
    return record.tokens_per_pass is not None


def best(records: Sequence[RungRecord]) -> RungRecord | None:
    """The fastest measured rung, on the path or beside it, of those that answer the standard request."""
    measured = [record for record in records if record.measured and not record.own_request]
    return min(measured, key=lambda record: record.median_ms("wall"), default=None)


def best_order(records: Sequence[RungRecord], baseline: str) -> list[RungRecord]:
    """The path without the steps that lose on this machine: each rung faster than all before it.

    Where the step that brought the guesses lost, a later rung that still guesses stands for its twin that does not, if
    that was measured.
    """
    path = way(records, baseline)
    losers = [
        after
        for before, after in pairwise(path)
        if _guesses(after) > _guesses(before) and after.median_ms("wall") > before.median_ms("wall")
    ]
    kept: list[RungRecord] = []
    for found in path:
        record = (_without_guesses(found, records) or found) if losers and found not in losers else found
        if not kept or record.median_ms("wall") < kept[-1].median_ms("wall"):
            kept.append(record)
    return kept


def _without_guesses(record: RungRecord, records: Sequence[RungRecord]) -> RungRecord | None:
    def key(entry: RungRecord) -> tuple:
        return entry.weights, entry.cache, entry.activations, entry.kept_tokens

    twins = (r for r in records if r.measured and not _guesses(r) and not r.own_request and key(r) == key(record))
    return next(twins, None) if _guesses(record) else None


def factors(found: Sequence[Step]) -> list[Step]:
    """The steps that were measured twice: in their place, and by another rung alone on the baseline."""
    return [step for step in found if step.alone_factor is not None and not step.over]


def run_with_factors(whose: str, run: dict, results: Path) -> tuple[str, dict]:
    """Whose ladder it is, and the ladder, in which two steps or more were measured twice: the given, else the newest.

    whose, run: as `nearest_run` returns them. Raises ValueError if there is none.
    """
    if len(_factors_of(run)) >= 2:
        return whose, run
    recorded = [load_run(path) for path in sorted(results.glob("*ladder*.json"))]
    found = [r for r in recorded if r["profile"] == run["profile"] and len(_factors_of(r)) >= 2]
    if not found:
        raise ValueError(f"no ladder in {results} measured two steps alone; `make run` measures one with all rungs")
    newest = max(found, key=lambda r: (r["date"], len(_factors_of(r))))
    return f"a recorded run: {machine_of(newest)}, {newest['date']}", newest


def _factors_of(run: dict) -> list[Step]:
    return factors(steps(records_of(run), run["baseline"]))


def product_of_factors(found: Sequence[Step]) -> tuple[float, float]:
    """(what the steps' factors alone multiply to, what they reached together), over steps that were measured alone on
    the baseline, too; one measured alone on another rung says nothing of the baseline.

    Raises ValueError if fewer than two were: a single factor is no product.
    """
    both = factors(found)
    if len(both) < 2:
        raise ValueError(
            f"{len(both)} steps of the path were measured alone on the baseline, too; expected two or more: run the "
            "rungs named `...-alone`"
        )
    return math.prod(step.alone_factor for step in both), math.prod(step.before_ms / step.after_ms for step in both)
