"""The explorer: right numbers in its picture, a reason where there is none, outputs that stay the same."""

from __future__ import annotations

import matplotlib
import pytest
from matplotlib import pyplot as plt

from every_millisecond.notebook import explorer
from llm_latency import roofline
from llm_latency.hardware import Ceilings

matplotlib.use("Agg")
GEMV, MATMUL = {"float32": 40.0, "bfloat16": 31.0}, {"float32": 218.0, "bfloat16": 901.0}
CEILINGS = Ceilings("cpu", "a CPU", 2, 49, 45, GEMV, MATMUL)


def slider(box, name: str):
    return next(control for row in box.children[:2] for control in row.children if control.description == name)


def test_the_picture_shows_the_prediction():
    """A picture drawn from other numbers than the library predicts."""
    stages = roofline.predict_request("llama-2-7b", roofline.gpu_peak("A100-80GB-SXM"))
    fig = explorer.picture()
    bars = [bar.get_width() for bar in fig.axes[0].patches]
    assert bars == pytest.approx([stages["prefill"].ms, stages["decode"].ms])
    shares = [bar.get_width() for bar in fig.axes[1].patches]
    assert sum(shares) == pytest.approx(2)
    plt.close(fig)


def test_an_answer_of_one_token_has_no_decode():
    """A division by no decode steps."""
    fig = explorer.picture(new_tokens=1)
    assert "no decode step" in [text.get_text() for text in fig.axes[0].texts]
    plt.close(fig)
    stages = explorer.predict("llama-2-7b", "int4", "T4", 256, 1)
    assert "decode" not in explorer.sentence(stages, 1)


def test_moving_a_slider_redraws_and_says_so_in_words():
    """Sliders bound to nothing; a picture without words for those who cannot see it."""
    box = explorer.controls(CEILINGS)
    before = box.children[-1].value
    assert 'alt="prefill' in before and "bandwidth-bound" in before
    slider(box, "machine").value = "H200-SXM"
    after = box.children[-1].value
    assert after != before
    slider(box, "machine").value = explorer.HERE
    slider(box, "weights").value = "float16"
    assert "no measured matrix rate" in box.children[-1].value
    slider(box, "weights").value = "float32"
    assert "<img" in box.children[-1].value


def test_what_does_not_fit_is_said():
    """A 70B model predicted on a GPU that cannot hold it, without a word."""
    assert "DOES NOT FIT into 80 GB" in explorer.memory_line("llama-3-70b", "bfloat16", "H100-SXM", 306)
    assert "fits into 80 GB" in explorer.memory_line("llama-3-70b", "int4", "H100-SXM", 306)
    assert explorer.memory_line("llama-2-7b", "bfloat16", explorer.HERE, 0) == "weights and cache: 13.5 GB"


def test_unknown_choices_are_refused():
    """A typing error answered with the default's figures."""
    with pytest.raises(KeyError, match="Z9"):
        explorer.predict("llama-2-7b", "bfloat16", "Z9", 256, 50)
    with pytest.raises(KeyError, match="llama-9"):
        explorer.predict("llama-9", "bfloat16", "T4", 256, 50)
    with pytest.raises(ValueError, match="ceilings"):
        explorer.predict("llama-2-7b", "bfloat16", explorer.HERE, 256, 50)
    with pytest.raises(ValueError, match="prompt_tokens=0"):
        explorer.predict("llama-2-7b", "bfloat16", "T4", 0, 50)


def test_the_stored_output_is_the_same_each_time(monkeypatch):
    """Random widget ids in a text output would fail every comparison of notebooks."""
    shown = []
    monkeypatch.setattr(explorer, "display", lambda data, raw: shown.append(data))
    monkeypatch.setattr(explorer.show, "figure", lambda fig, alt: plt.close(fig))
    explorer.explore()
    explorer.explore()
    texts = [{kind: value for kind, value in data.items() if kind != explorer.WIDGET} for data in shown]
    assert texts[0] == texts[1] == {"text/plain": "[sliders] run this cell to move them"}
