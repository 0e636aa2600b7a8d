"""The waterfall: a request's time, and what each step took away from it, in milliseconds that add up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from every_millisecond.notebook.plots import OTHER_COLOUR

SAVES, SLOWER, UNSURE, TOTAL = "#56B4E9", "#CC79A7", "#F0E442", OTHER_COLOUR
SHARED = "//"  # the one meaning of hatching
ENLARGED = 2.2  # the second panel reaches this many times as far as the last total


@dataclass(frozen=True, slots=True)
class Fall:
    """One step: ms of the whole request before and after it. overlaps: it shares milliseconds with an earlier step.
    quality: what it costs, in words; empty where it costs nothing. judged: whether it could be seen to share any, which
    takes a measurement of the step alone. spread: of its change in ms, below 0 where it saves; None: unknown."""

    title: str
    before_ms: float
    after_ms: float
    overlaps: bool = False
    quality: str = ""
    judged: bool = True
    spread: tuple[float, float] | None = None

    @property
    def unsure(self) -> bool:
        """The spread of the change contains none at all."""
        return self.spread is not None and self.spread[0] < 0 < self.spread[1]

    @property
    def colour(self) -> str:
        return UNSURE if self.unsure else SAVES if self.after_ms <= self.before_ms else SLOWER


def waterfall(fig: Figure, first: str, falls: Sequence[Fall], *, last: str = "now") -> None:
    """Draw steps from the top down: the first total, what each step took away, the last total.

    Twice, side by side: to the scale of the whole, and enlarged to `ENLARGED` times the last total, so that 10 ms of
    some hundred can be seen. What costs quality says so beside its bar. Raises ValueError without a step.
    """
    if not falls:
        raise ValueError("no steps; expected at least one")
    whole, near = fig.subplots(1, 2, sharey=True, width_ratios=(3, 2))
    highest = max(fall.before_ms for fall in falls)
    limits = highest * 1.18, min(highest, ENLARGED * falls[-1].after_ms) * 1.18
    for ax, limit in zip((whole, near), limits, strict=True):
        _panel(ax, falls, limit)
    titles = [first, *(fall.title if fall.judged else f"{fall.title} (?)" for fall in falls), last]
    whole.set_yticks(range(len(titles)), titles)
    whole.invert_yaxis()
    whole.set_xlabel("time of the request (ms)")
    near.set_xlabel("the same, enlarged (ms)")
    if any(fall.quality for fall in falls):
        near.annotate(
            "what it costs in quality",
            (1.02, 1.01),  # above the axes: no row's entry
            xycoords="axes fraction",
            va="bottom",
            fontsize=10,
            fontweight="bold",
        )
    for row, fall in enumerate(falls, start=1):
        if fall.quality:
            near.annotate(fall.quality, (1.02, row), xycoords=near.get_yaxis_transform(), va="center", fontsize=10)
    kinds = {SAVES: "saves time here", SLOWER: "costs time here", UNSURE: "cannot be told from no change"}
    shown = [(colour, "", label) for colour, label in kinds.items() if any(fall.colour == colour for fall in falls)]
    if any(fall.overlaps for fall in falls):
        shown.append(("white", SHARED, "shares milliseconds with an earlier step"))
    if not all(fall.judged for fall in falls):
        shown.append(("none", "", "(?): not measured alone, nobody can say what it shares"))
    handles = [
        Patch(facecolor=colour, hatch=hatch, edgecolor="black" if hatch else colour, label=label)
        for colour, hatch, label in shown
    ]
    fig.legend(handles=handles, loc="outside lower center", ncols=2, fontsize=10)


def _panel(ax: Axes, falls: Sequence[Fall], limit: float) -> None:
    totals = [falls[0].before_ms, *(fall.after_ms for fall in falls)]
    ends = {0: totals[0], len(falls) + 1: totals[-1]}
    for row, ms in ends.items():
        ax.barh(row, min(ms, limit), color=TOTAL, height=0.7)
        _label(ax, row, ms, f"{ms:.0f} ms", limit, bold=True)
    for row, fall in enumerate(falls, start=1):
        left, right = sorted((fall.before_ms, fall.after_ms))
        ax.plot([fall.before_ms] * 2, [row - 1 + 0.35, row - 0.35], color="black", linewidth=0.8, marker="")
        if left < limit:
            hatch = SHARED if fall.overlaps else ""
            ax.barh(row, min(right, limit) - left, left=left, color=fall.colour, hatch=hatch, edgecolor="black",
                    linewidth=0.4, height=0.7)  # fmt: skip
        _label(ax, row, right, f"{fall.after_ms - fall.before_ms:+.0f} ms", limit)
    ax.plot([totals[-1]] * 2, [len(falls) + 0.35, len(falls) + 0.65], color="black", linewidth=0.8, marker="")
    ax.set_xlim(0, limit)
    ax.grid(axis="y", visible=False)


def _label(ax: Axes, row: int, end: float, text: str, limit: float, *, bold: bool = False) -> None:
    """Beside the bar's end; at the panel's edge, with an arrow, where the bar goes on beyond it."""
    beyond = end > 0.9 * limit
    place = (0.985 * limit, "right") if beyond else (end + 0.012 * limit, "left")
    box = {"facecolor": "white", "edgecolor": "none", "pad": 1, "alpha": 0.85} if beyond else None
    text = f"{text} →" if end > limit else text
    ax.text(place[0], row, text, ha=place[1], va="center", fontsize=10, fontweight="bold" if bold else None, bbox=box)
