"""The schematics of notebooks 02 and 03: shapes that are the model's, lines that lie as their text says."""

from __future__ import annotations

import matplotlib
import pytest

matplotlib.use("Agg")

from matplotlib import pyplot as plt

from every_millisecond.notebook import schematics
from llm_latency import roofline


def test_a_block_shows_the_shapes_of_the_model_it_is_drawn_for():
    """Guards against the default model's numbers in a picture of another one, and query heads taken for KV heads."""
    for name in ("smollm2-135m", "llama-2-7b", "qwen2.5-7b"):
        shape = roofline.SHAPES[name]
        fig = schematics.block_with_shapes(shape, tokens=128)
        said = [text.get_text() for text in fig.axes[0].texts]
        plt.close(fig)
        assert f"k, v {shape.kv_heads * shape.head_dim} × {shape.hidden}" in said
        assert f"gate {shape.ffn} × {shape.hidden}" in said
        weights = [int(text.removesuffix(" weights").replace(",", "")) for text in said if text.endswith(" weights")]
        assert sum(weights) == sum(out * into for out, into in shape.layer_matrices())
        assert any("T = 128" in text and f"{shape.layers} such blocks" in text for text in said)


def test_the_launch_line_lies_over_memory_for_a_large_model_and_under_it_for_a_small_one():
    """Guards against a regime that binds on the wrong side of the roof."""
    fig = schematics.three_regimes()
    for ax, over in zip(fig.axes, (True, False), strict=True):
        roof, launches = (line.get_xydata() for line in ax.lines[:2])
        (x0, y0), (x1, y1) = launches
        slope = (roof[1][1] - roof[0][1]) / (roof[1][0] - roof[0][0])
        assert (y1 - y0) / (x1 - x0) == pytest.approx(slope), "parallel on log axes: both grow with a pass's FLOPs"
        assert (y0 > slope * x0) == over and y1 == roof[1][1]
    plt.close(fig)
