"""Drawing a roofline: both limits of a machine, and points under them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes

from llm_latency.roofline.predict import Peak


class RooflinePoint(NamedTuple):
    """A stage in the picture: FLOPs per byte, the FLOP/s it reached (or may reach), and how to draw it."""

    label: str
    intensity: float
    flops_per_s: float
    colour: str
    marker: str = "o"


def draw_roofline(ax: Axes, peak: Peak, points: Sequence[RooflinePoint], *, colour: str = "0.25") -> None:
    """Draw a machine's roofline with points on log axes, labelled directly.

    Raises ValueError for a point at or below 0, which has no place on log axes.
    """
    for point in points:
        if point.intensity <= 0 or point.flops_per_s <= 0:
            raise ValueError(f"{point.label}: intensity and rate must be above 0, got {point}")
    low = min([point.intensity for point in points] + [peak.ridge]) / 4
    high = max([point.intensity for point in points] + [peak.ridge]) * 8
    intensities = np.array([low, peak.ridge, high])
    roof = np.minimum(intensities * peak.bandwidth_bytes_per_s, peak.flops_per_s) / 1e9
    ax.loglog(intensities, roof, color=colour, marker="")
    ax.set_ylim(min([roof[0]] + [point.flops_per_s / 1e9 for point in points]) / 2, roof[-1] * 3)
    middle = (low * peak.ridge) ** 0.5
    ax.annotate(
        "memory bandwidth",
        (middle, middle * peak.bandwidth_bytes_per_s / 1e9),
        xytext=(-6, 6),
        textcoords="offset points",
        ha="right",
        color=colour,
    )
    ax.annotate(
        "arithmetic",
        (high, peak.flops_per_s / 1e9),
        xytext=(-4, 6),
        textcoords="offset points",
        ha="right",
        color=colour,
    )
    for point in points:
        rate = point.flops_per_s / 1e9
        ax.plot(point.intensity, rate, point.marker, color=point.colour, markersize=9, markeredgecolor="0.2")
        box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1}
        place = {"xytext": (9, -4), "textcoords": "offset points", "va": "top"}
        ax.annotate(point.label, (point.intensity, rate), **place, fontsize=10, bbox=box)
    ax.set_xlabel("arithmetic intensity, FLOP per byte moved (log axis: it spans a thousandfold)")
    ax.set_ylabel("GFLOP/s (log axis)")
    ax.set_title(f"Roofline of {peak.name}")
