"""Figures of notebook 13 that take more lines to draw than to understand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from every_millisecond.notebook.plots import OTHER_COLOUR

PARTS = {"physics": ("#56B4E9", ""), "own kernels": ("#CC79A7", "//"), "launches": ("#F0E442", ".."),
         "draft": (OTHER_COLOUR, "xx")}  # fmt: skip
SAYS = {
    "physics": "physics: bytes or arithmetic",
    "own kernels": "its own matrix kernels, beyond physics",
    "launches": "issuing operators",
    "draft": "draft",
}
OURS, OTHERS = "#56B4E9", "#CC79A7"
ENLARGED_FROM = 4.0  # a second panel where the longest bar is so many times as long as the middle one


def parts_and_measured(rows: Mapping[str, tuple[Mapping[str, float], float, tuple[float, float]]]) -> Figure:
    """For each title what physics allows, what its own parts add to that, and a mark where the clock stopped.

    rows: title -> (ms by part as in `PARTS`, measured ms, its 10th and 90th percentile). Where some bars are far longer
    than most, a second panel shows the others enlarged. Raises ValueError without a row.
    """
    if not rows:
        raise ValueError("no rungs; expected at least one")
    ends = sorted(max(sum(parts.values()), measured, spread[1]) for parts, measured, spread in rows.values())
    near = [end for end in ends if end * ENLARGED_FROM < ends[-1]]
    limits = [1.04 * ends[-1]] + ([1.25 * near[-1]] if near else [])
    fig, axes = plt.subplots(1, len(limits), figsize=(12, 1.8 + 0.36 * len(rows)), sharey=True, squeeze=False)
    for ax, limit in zip(axes[0], limits, strict=True):
        _parts_panel(ax, list(rows.values()), limit)
    whole = axes[0][0]
    for name, (colour, hatch) in PARTS.items():
        whole.barh(0, 0, color=colour, hatch=hatch, edgecolor="black", linewidth=0.3, label=SAYS[name])
    whole.plot([], [], "D", color="black", label="measured, with its spread")
    whole.set_yticks(range(len(rows)), list(rows))
    whole.invert_yaxis()
    for ax, label in zip(axes[0], ("time of decode (ms)", "the same, enlarged (ms)"), strict=False):
        ax.set_xlabel(label)
    fig.legend(loc="outside lower center", ncols=3, fontsize=10)
    return fig


def _parts_panel(ax: Axes, rows: Sequence, limit: float) -> None:
    for y, (found, measured, spread) in enumerate(rows):
        left = 0.0
        for name, (colour, hatch) in PARTS.items():
            width = min(found[name], max(0.0, limit - left))
            ax.barh(y, width, left=left, color=colour, hatch=hatch, edgecolor="black", linewidth=0.3, height=0.7)
            left += found[name]
        if measured <= limit:
            ax.plot(spread, (y, y), color="black", marker="|", markersize=9, linewidth=1.5)
            ax.plot(measured, y, "D", color="black", markersize=5)
        else:
            box = {"facecolor": "white", "edgecolor": "none", "pad": 1}
            ax.text(
                0.98 * limit,
                y,
                f"{measured:.0f} ms \N{RIGHTWARDS ARROW}",
                ha="right",
                va="center",
                fontsize=10,
                bbox=box,
            )
    ax.set_xlim(0, limit)
    ax.grid(axis="y", visible=False)


def race(groups: Mapping[str, Mapping[str, tuple[bool, Mapping[str, float]]]], baseline: str) -> Figure:
    """How many times as fast as the race's baseline each contender decodes, with the spread over the rounds.

    groups: a panel each, such as "without a draft": title -> (ours, {"median", "low", "high"}). Raises ValueError
    without a contender.
    """
    shown = {name: group for name, group in groups.items() if group}
    if not shown:
        raise ValueError("no contender was measured; expected at least one")
    counts = [len(group) for group in shown.values()]
    fig, axes = plt.subplots(
        len(shown), 1, figsize=(11, 1.8 + 0.34 * sum(counts) + 0.4 * len(shown)), sharex=True, squeeze=False,
        height_ratios=counts,
    )  # fmt: skip
    for ax, (name, group) in zip(axes[:, 0], shown.items(), strict=True):
        ranked = dict(sorted(group.items(), key=lambda entry: entry[1][1]["median"]))
        for y, (ours, ratio) in enumerate(ranked.values()):
            ax.barh(y, ratio["median"], color=OURS if ours else OTHERS, hatch="" if ours else "//", edgecolor="white")
            ax.plot((ratio["low"], ratio["high"]), (y, y), color="black", marker="|", linewidth=1.5)
            ax.text(ratio["high"], y, f"  {ratio['median']:.2f}", va="center", fontsize=10)
        ax.set_yticks(range(len(ranked)), list(ranked))
        ax.set_ylim(-0.6, len(ranked) - 0.4)
        ax.set_title(name, fontsize=12)
        ax.grid(axis="y", visible=False)
    last = axes[-1, 0]
    last.set_xlim(0, 1.12 * max(ratio["high"] for group in shown.values() for _, ratio in group.values()))
    last.set_xlabel(f"decode rate over that of {baseline} (times)")
    handles = [Patch(facecolor=OURS, label="the course's"), Patch(facecolor=OTHERS, hatch="//", label="others'")]
    fig.legend(handles=handles, loc="outside lower center", ncols=2, fontsize=10)
    return fig
