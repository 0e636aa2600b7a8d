"""The schematics of notebooks 04 and 05: their counts are arithmetic's, their bars in the order that the text gives."""

from __future__ import annotations

import pytest
from matplotlib import pyplot as plt

from every_millisecond.notebook import schematics


def texts(fig) -> list[str]:
    return [text.get_text() for text in fig.axes[0].texts]


@pytest.mark.parametrize("prompt, steps, without, kept", [(4, 3, 4 + 5 + 6 + 7, 7), (3, 2, 3 + 4 + 5, 5)])
def test_slots_count_what_is_computed(prompt, steps, without, kept):
    """Guards against a picture whose sum is another than that of its squares: the lesson's whole point."""
    fig = schematics.slots_filling(prompt, steps)
    totals = [text for text in texts(fig) if "computed" in text and text[0].isdigit()]
    assert totals == [f"{without} tokens computed", f"{kept} tokens computed"]
    plt.close(fig)


def test_a_replay_is_done_before_compiled_code_and_that_before_eager():
    """Guards against a picture that contradicts its text after a change of its measures."""
    fig = schematics.three_ways_to_issue()
    done = [text.get_position()[0] for text in fig.axes[0].texts if text.get_text() == "done"]
    assert len(done) == 3 and done[0] > done[1] > done[2]
    assert [texts(fig).count(word) for word in ("launch", "replay")] == [8 + 5, 1]
    plt.close(fig)
