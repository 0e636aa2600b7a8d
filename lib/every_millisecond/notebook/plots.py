"""One look for every picture of the course: fixed colours, direct labels, readable in grey.

The stages' colours are Okabe and Ito's (2008), the methods' partly Paul Tol's: readers with any of the common
colour-vision deficiencies can tell them apart. Where two bars meet, hatching says it a second time.
"""

from __future__ import annotations

from collections.abc import Mapping

import matplotlib as mpl
from matplotlib.axes import Axes

from llm_latency.timing import LatencyBreakdown

STAGES = ("tokenise", "prefill", "decode", "detokenise")
STAGE_COLOURS = {"tokenise": "#E69F00", "prefill": "#0072B2", "decode": "#D55E00", "detokenise": "#009E73"}
STAGE_HATCHES = {"tokenise": "..", "prefill": "//", "decode": "", "detokenise": "xx"}
OTHER_COLOUR = "#999999"
# For what is compared, and for nothing that is a stage: indigo, olive, wine, pink, sky, black, grey.
METHOD_COLOURS = ["#332288", "#999933", "#882255", "#CC79A7", "#56B4E9", "#000000", "#777777"]
METHOD_MARKERS = ["o", "s", "^", "D", "v", "P", "X"]


def use_style() -> None:
    """Set matplotlib's defaults for the course. Call it once per notebook."""
    mpl.rcParams.update(
        {
            "figure.figsize": (10, 4.2),
            "figure.dpi": 100,
            "savefig.dpi": 100,
            "figure.constrained_layout.use": True,
            "font.size": 12,
            "axes.titlesize": 14,
            "axes.titleweight": "bold",
            "axes.titlelocation": "left",
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": True,
            "grid.alpha": 0.3,
            "axes.axisbelow": True,
            "lines.linewidth": 2.2,
            "lines.markersize": 7,
            "hatch.linewidth": 0.6,
            "legend.frameon": False,
            "axes.prop_cycle": mpl.cycler(color=METHOD_COLOURS, marker=METHOD_MARKERS),
        }
    )


def stage_values(breakdown: LatencyBreakdown | Mapping[str, float]) -> dict[str, float]:
    """Milliseconds by stage from a breakdown, a benchmark result or a mapping; KeyError names a missing stage."""
    if not isinstance(breakdown, Mapping):
        return {
            "tokenise": breakdown.tokenize_ms,
            "prefill": breakdown.prefill_ms,
            "decode": breakdown.decode_ms,
            "detokenise": breakdown.detokenize_ms,
        }
    missing = [stage for stage in STAGES if stage not in breakdown]
    if missing:
        raise KeyError(f"stages missing: {', '.join(missing)}; expected {', '.join(STAGES)}")
    return {stage: float(breakdown[stage]) for stage in STAGES}


def stage_bar(
    ax: Axes,
    bars: LatencyBreakdown | Mapping[str, LatencyBreakdown | Mapping[str, float]],
    *,
    label_share: float = 0.17,
) -> None:
    """Draw one or more requests as horizontal bars cut into the four stages, each labelled on the bar.

    bars: one breakdown, or {title: breakdown or {stage: ms}}, drawn from the top down. A piece smaller than
    `label_share` of the longest bar shows its milliseconds alone, and one smaller than a third of that nothing: it is
    named in the legend only. The legend of a single bar tells every stage's time, so that a stage too thin to see is
    not lost.
    """
    if not isinstance(bars, Mapping):
        bars = {"": bars}
    rows = {title: stage_values(bar) for title, bar in bars.items()}
    longest = max(sum(row.values()) for row in rows.values())
    named = {stage: stage for stage in STAGES}
    if len(rows) == 1:
        (only,) = rows.values()
        named = {stage: f"{stage} {ms:.0f} ms" if ms >= 100 else f"{stage} {ms:.3g} ms" for stage, ms in only.items()}
    for y, row in enumerate(rows.values()):
        left = 0.0
        for stage in STAGES:
            ms = row[stage]
            ax.barh(
                y,
                ms,
                left=left,
                color=STAGE_COLOURS[stage],
                hatch=STAGE_HATCHES[stage],
                edgecolor="white",
                label=named[stage] if y == 0 else None,
            )
            if ms > label_share / 3 * longest:
                ax.text(
                    left + ms / 2,
                    y,
                    f"{stage} {ms:.0f} ms" if ms > label_share * longest else f"{ms:.0f}",
                    ha="center",
                    va="center",
                    color="white",
                    fontsize=11,
                    bbox={"facecolor": STAGE_COLOURS[stage], "edgecolor": "none", "pad": 1.5},
                )
            left += ms
        ax.text(left + 0.01 * longest, y, f"{left:.0f} ms", va="center", fontweight="bold")
    ax.set_yticks(range(len(rows)), list(rows))
    ax.invert_yaxis()
    ax.set_xlim(0, longest * 1.12)
    ax.set_xlabel("time (ms)")
    ax.grid(axis="y", visible=False)
    # A legend of the figure, not of the axes: constrained layout keeps room for it on a flat figure too.
    ax.figure.legend(*ax.get_legend_handles_labels(), ncols=4, loc="outside lower center", fontsize=10)


def end_labels(ax: Axes, *, gap: float = 0.075) -> None:
    """Write each line's label beside its last point, in the line's colour, instead of a legend. Set the limits first.

    Labels that would come nearer than `gap`, a share of the axes' height, move apart by as little as keeps them apart
    and inside the axes.
    """
    to_axes = ax.transData + ax.transAxes.inverted()
    ends = sorted((*to_axes.transform(line.get_xydata()[-1])[::-1], i, line) for i, line in enumerate(ax.get_lines()))
    # The nearest heights that rise by `gap` or more: a regression, by pooling neighbours that are out of order.
    pools: list[tuple[float, int]] = []
    for rank, (y, *_) in enumerate(ends):
        mean, count = y - gap * rank, 1
        while pools and pools[-1][0] > mean:
            other, others = pools.pop()
            mean, count = (mean * count + other * others) / (count + others), count + others
        pools.append((mean, count))
    highest = 1 - gap * (len(ends) - 0.5)
    heights = [max(gap / 2, min(mean, highest)) for mean, count in pools for _ in range(count)]
    for rank, (height, (_, x, _, line)) in enumerate(zip(heights, ends, strict=True)):
        ax.text(x + 0.015, height + gap * rank, line.get_label(), transform=ax.transAxes, va="center",
                color=line.get_color())  # fmt: skip
