"""Sentences that a measurement chooses: every text that depends on the machine comes from here.

A notebook writes two or three plain sentences and a figure picks one. The sentences of one call cover the number line,
so that each can be reached: a verdict that cannot be false has no place in the course.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from llm_latency.timing.compare import Ratio


@dataclass(frozen=True, slots=True)
class Interval:
    """A measured figure with its spread, such as a median with its 10th and 90th percentile."""

    median: float
    low: float
    high: float

    def __post_init__(self) -> None:
        if not all(map(math.isfinite, (self.median, self.low, self.high))) or not self.low <= self.median <= self.high:
            raise ValueError(f"{self}: expected finite figures with low <= median <= high")

    def __str__(self) -> str:
        return f"{self.median:.3g} ({self.low:.3g} to {self.high:.3g})"


def miss(said: float, found: Ratio | Interval) -> str:
    """By how much a prediction misses what was measured: "within the spread", or "off by 29%" of the median.

    An interval that holds the prediction does not show that it is off.
    """
    return "within the spread" if found.low <= said <= found.high else f"off by {abs(said / found.median - 1):.0%}"


def choose(
    value: float | Ratio | Interval,
    *,
    above: str,
    below: str,
    between: str = "",
    at: float | tuple[float, float] = 1.0,
) -> str:
    """The sentence that a figure calls for.

    value: an interval (what `Comparison.ratio` gives, or an `Interval`), or a bare number. at: the mark, or two marks
    (low, high). An interval that lies wholly beyond the upper mark takes `above`, one wholly under the lower `below`;
    what straddles a mark or lies between the two takes `between`. It is judged as it prints: a spread whose end prints
    as 1.00 touches 1. A bare number knows nothing of its spread: it takes `between` only when there are two marks.
    `{value}` in a sentence stands for the figure as it prints.

    Raises ValueError for a figure that is not finite, a missing sentence, two that are the same, marks in the wrong
    order, or a `between` that the figure can never reach.
    """
    low_mark, high_mark = at if isinstance(at, tuple) else (at, at)
    if not (math.isfinite(low_mark) and math.isfinite(high_mark)) or low_mark > high_mark:
        raise ValueError(f"at={at!r}; expected a finite mark, or two in order")
    bare = isinstance(value, int | float) and not isinstance(value, bool)
    low, high = (value, value) if bare else _as_printed(value)
    if not (math.isfinite(low) and math.isfinite(high)):
        raise ValueError(f"value={value!r}; expected finite figures: was the measurement made?")
    wanted = {"above": above, "below": below}
    if bare and low_mark == high_mark:
        if between:
            raise ValueError(
                f"between={between!r} would never be printed: a bare number is above or below at={at!r}. "
                "Pass the interval that was measured, or two marks"
            )
    else:
        wanted["between"] = between
    missing = [name for name, sentence in wanted.items() if not sentence.strip()]
    if missing:
        raise ValueError(f"no sentence for {' and '.join(missing)}: every result of a measurement needs one")
    if len({*wanted.values()}) < len(wanted):
        raise ValueError("two of the sentences are the same, so the measurement decides nothing")
    met = bare and low_mark == high_mark == value  # a bare number that is the mark itself
    chosen = below if high < low_mark else above if low > high_mark or met else between
    return chosen.replace("{value}", f"{value:.3g}" if bare else str(value))


def _as_printed(value: Ratio | Interval) -> tuple[float, float]:
    """The ends of a spread, rounded as `str(value)` rounds them."""
    if isinstance(value, Ratio):
        return round(value.low, 2), round(value.high, 2)
    return float(f"{value.low:.3g}"), float(f"{value.high:.3g}")


def outcome(
    value: float | Ratio | Interval,
    *,
    above: str,
    below: str,
    between: str = "",
    at: float | tuple[float, float] = 1.0,
) -> None:
    """Print the sentence that a figure of this machine calls for; arguments and errors as `choose`."""
    print(f"on this machine: {choose(value, above=above, below=below, between=between, at=at)}")


def against_physics(what: str, measured: float, least: float, unit: str = "ms", *, margin: float = 0.05) -> None:
    """Print how far a measured time is from the least that physics allows, or an alarm if it is under it.

    margin: by how much a figure may lie under its bound before it counts as impossible, as a share: the bound itself
    rests on a measured bandwidth. Raises ValueError for figures that are not positive.
    """
    for name, figure in (("measured", measured), ("least", least)):
        if not math.isfinite(figure) or figure <= 0:
            raise ValueError(f"{name}={figure!r}; expected a positive figure")
    outcome(
        measured / least,
        above=f"{what}: {measured:.3g} {unit}, {measured / least:.2f} times the {least:.3g} {unit} its limit allows",
        below=f"ALARM: {what}: {measured:.3g} {unit} beats physics, which allows no less than {least:.3g} {unit}. "
        "Suspect the clock (was the work done when it stopped?), the count of bytes, or the bandwidth it is compared "
        "with",
        at=1 - margin,
    )
