"""Figures of notebook 13 that take more lines to draw than to understand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from every_millisecond.notebook.plots import OTHER_COLOUR

PART_COLOURS = {"bytes": "#56B4E9", "arithmetic": "#CC79A7", "launches": "#F0E442", "draft": OTHER_COLOUR}
OURS, OTHERS = "#56B4E9", "#CC79A7"


def predicted_and_measured(rows: Mapping[str, tuple[Mapping[str, float], float, tuple[float, float]]]) -> Figure:
    """A stacked bar of predicted ms for each title, and a mark with its spread where the clock stopped.

    rows: title -> (ms by part, measured ms, its 10th and 90th percentile). Of bytes and arithmetic the longer is drawn.
    """
    fig, ax = plt.subplots(figsize=(11, 1.8 + 0.36 * len(rows)))
    for y, (found, measured, spread) in enumerate(rows.values()):
        left = 0.0
        for name in (max(("bytes", "arithmetic"), key=found.__getitem__), "launches", "draft"):
            ax.barh(y, found[name], left=left, color=PART_COLOURS[name], edgecolor="black", linewidth=0.3, height=0.7)
            left += found[name]
        ax.plot(spread, (y, y), color="black", marker="|", markersize=9, linewidth=1.5)
        ax.plot(measured, y, "D", color="black", markersize=5)
    for name, colour in PART_COLOURS.items():
        ax.barh(0, 0, color=colour, edgecolor="black", linewidth=0.3, label=f"predicted: {name}")
    ax.plot([], [], "D", color="black", label="measured")
    ax.set_yticks(range(len(rows)), list(rows))
    ax.invert_yaxis()
    ax.set_xlabel("time of decode (ms); beside the mark its 10th to 90th percentile")
    ax.grid(axis="y", visible=False)
    fig.legend(loc="outside lower center", ncols=5, fontsize=10)
    return fig


def race(result: Mapping) -> Figure:
    """How many times as fast as the race's baseline each contender decodes, with the spread over the rounds."""
    base, ratios = result["baseline"], result["ratios"]
    found = {peer["title"]: (peer, ratios[peer["name"]][f"decode_vs_{base}"]) for peer in result["peers"]
             if peer["name"] in ratios}  # fmt: skip
    ranked = dict(sorted(found.items(), key=lambda entry: entry[1][1]["median"]))
    fig, ax = plt.subplots(figsize=(11, 1.6 + 0.34 * len(ranked)))
    for y, (peer, ratio) in enumerate(ranked.values()):
        ours = peer["ours"]
        ax.barh(y, ratio["median"], color=OURS if ours else OTHERS, hatch="" if ours else "//", edgecolor="white")
        ax.plot((ratio["low"], ratio["high"]), (y, y), color="black", marker="|", linewidth=1.5)
        ax.text(ratio["high"], y, f"  {ratio['median']:.2f}", va="center", fontsize=10)
    ax.barh(0, 0, color=OURS, label="the course's")
    ax.barh(0, 0, color=OTHERS, hatch="//", edgecolor="white", label="others'")
    ax.set_yticks(range(len(ranked)), list(ranked))
    ax.set_xlim(0, 1.1 * max(ratio["high"] for _, ratio in ranked.values()))
    ax.set_xlabel("decode rate over that of transformers in FP32 (times)")
    ax.grid(axis="y", visible=False)
    ax.legend(loc="lower right")
    return fig


def squares(rows: Sequence, verdicts: Sequence[str]) -> Figure:
    """A square for each claim, coloured and hatched by its verdict; what the two articles claim on two lines."""
    looks = (("#56B4E9", ""), ("#CC79A7", "xx"), ("#F0E442", "//"), ("#DDDDDD", ".."))
    look = dict(zip(verdicts, looks, strict=True))
    fig, ax = plt.subplots(figsize=(11, 2.8))
    for row in rows:
        x, y = int(row.id[1:]), "AB".index(row.id[0])
        colour, hatch = look[row.verdict]
        ax.bar(x, 0.8, bottom=y - 0.4, color=colour, hatch=hatch, edgecolor="white", width=0.9)
        ax.text(x, y, row.id, ha="center", va="center", bbox={"facecolor": "white", "edgecolor": "none", "pad": 1})
    for verdict, (colour, hatch) in look.items():
        ax.bar(0, 0, color=colour, hatch=hatch, edgecolor="white", label=verdict)
    ax.set(xlim=(0.4, 17.6), ylim=(1.6, -0.6), xticks=[])
    ax.set_yticks([0, 1], ["article A", "article B"])
    ax.grid(visible=False)
    fig.legend(loc="outside lower center", ncols=4)
    return fig
