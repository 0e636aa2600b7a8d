"""The schematic of notebook 14: what waits and what is served add up in the picture as in its words."""

from __future__ import annotations

from matplotlib import pyplot as plt
from matplotlib.colors import to_hex

from every_millisecond.notebook import schematics


def test_both_servers_are_asked_by_as_many():
    """Guards against a picture whose two servers differ in load, so that it would compare unlike things."""
    fig = schematics.weights_to_server()
    ax = fig.axes[0]
    said = [text.get_text() for text in ax.texts if "ask" in text.get_text()]
    assert said == ["5 ask, 1 served at a time", "5 ask, 4 served at a time"]
    squares = [to_hex(patch.get_facecolor()) for patch in ax.patches if patch.get_width() == 0.45]
    pink = to_hex(schematics.METHOD_COLOURS[3])
    assert squares.count(pink) == 1 + 4 + 1 and squares.count("#dddddd") == 4 + 1 + 1  # the last of each: the key
    plt.close(fig)
