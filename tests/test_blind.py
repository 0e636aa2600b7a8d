"""People beside the gate: the order is hidden, the choices are counted for whoever earned them and kept."""

from __future__ import annotations

import json

import pytest
from matplotlib import pyplot as plt

from every_millisecond.notebook import blind, folded, ladder_figures, scorecard

QUESTIONS = ("q1", "q2", "q3")


@pytest.fixture
def own_scorecard(tmp_path, monkeypatch):
    monkeypatch.setenv("LLM_LATENCY_SCORECARD", str(tmp_path / "scorecard.json"))
    return tmp_path / "scorecard.json"


def pairs(flipped: tuple[bool, ...]) -> blind.Pairs:
    answers = tuple(("new", "old") if flip else ("old", "new") for flip in flipped)
    return blind.Pairs(QUESTIONS, answers, flipped)


def test_each_answer_stays_with_its_question():
    """A shuffle that mixed questions would ask which of two answers to different questions is better."""
    found = blind.pairs(QUESTIONS, ["a1", "a2", "a3"], ["b1", "b2", "b3"])
    for number, ((a, b), flip) in enumerate(zip(found.answers, found.flipped, strict=True), start=1):
        assert (a, b) == ((f"b{number}", f"a{number}") if flip else (f"a{number}", f"b{number}"))
    with pytest.raises(ValueError, match="the same number"):
        blind.pairs(QUESTIONS, ["a"], ["b"])


def test_the_order_is_drawn(monkeypatch):
    """Fault: one order for all, and a reader who has seen it once is blind no more."""
    orders = {blind.pairs(QUESTIONS * 4, ["a"] * 12, ["b"] * 12).flipped for _ in range(20)}
    assert len(orders) > 1


def test_a_choice_counts_for_whoever_wrote_it(own_scorecard, capsys):
    """Fault: counting A and B, which mean nothing, or forgetting to turn the flipped pairs round."""
    blind.judge(pairs((False, True, True)), ["A", "A", "B"])  # old, new, old
    assert "original 2 times, the optimised 1 times, neither 0" in capsys.readouterr().out
    row = json.loads(own_scorecard.read_text())["13-people"]
    assert row["choices"] == ["A", "A", "B"] and row["measured"] == 1
    scorecard.table("13-people")
    assert "Answers read blind" in capsys.readouterr().out


def test_equal_answers_decide_nothing_and_unread_ones_are_not_counted(own_scorecard, capsys):
    """A preference between two equal texts is noise; silence is no vote."""
    same = blind.Pairs(QUESTIONS, (("x", "x"), ("old", "new"), ("old", "new")), (False, False, False))
    blind.show_pairs(same)
    assert "equal to the letter" in capsys.readouterr().out
    blind.judge(same, ["A", "=", ""])
    assert "original 0 times, the optimised 0 times, neither 2" in capsys.readouterr().out


def test_blank_by_default_runs_and_keeps_nothing(own_scorecard, capsys):
    """A notebook must run without input, and must not file a judgement that nobody made."""
    blind.judge(pairs((True, True, False)), ["", "", ""])
    assert "no choices yet" in capsys.readouterr().out and not own_scorecard.exists()
    for wrong in (["A"], ["A", "C", ""]):
        with pytest.raises(ValueError, match="choices="):
            blind.judge(pairs((True, True, False)), wrong)


def test_folded_lines_are_one_line_of_this_machine():
    """nbval compares whatever stands on a second line."""
    shown = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(folded, "display", lambda bundle, raw: shown.append(bundle))
        folded.here("the ledger", [("A1 <x>", "line\nanother")])
        with pytest.raises(ValueError, match="nothing to fold"):
            folded.here("the ledger", [])
    for text in shown[0].values():
        assert "\n" not in text and "on this machine: " in text[:20]
    assert "&lt;x&gt;" in shown[0]["text/html"]


def test_every_contender_and_every_part_is_drawn():
    """Nothing is dropped in silence: a bar for each contender that ran, each part, the clock."""
    ratio = {"median": 2.0, "low": 1.8, "high": 2.1}
    groups = {
        "without a draft": {"base": (False, ratio), "own": (True, ratio)},
        "with a draft": {"guesser": (True, ratio)},
    }
    fig = ladder_figures.race(groups, "base")
    assert [[text.get_text() for text in ax.get_yticklabels()] for ax in fig.axes] == [["base", "own"], ["guesser"]]
    assert len(ladder_figures.race(groups | {"with a draft": {}}, "base").axes) == 1
    with pytest.raises(ValueError, match="no contender"):
        ladder_figures.race({"with a draft": {}}, "base")
    parts = {"physics": 5.0, "own kernels": 3.0, "launches": 2.0, "draft": 1.0}
    fig = ladder_figures.parts_and_measured({"a rung": (parts, 12.0, (11.5, 12.5))})
    assert [patch.get_width() for patch in fig.axes[0].patches][:4] == [5.0, 3.0, 2.0, 1.0]
    assert len(fig.axes) == 1 and fig.axes[0].lines[1].get_xdata()[0] == 12.0
    slow = {name: 100 * ms for name, ms in parts.items()}
    fig = ladder_figures.parts_and_measured({"slow": (slow, 1200.0, (1190, 1210)), "a rung": (parts, 12.0, (11, 13))})
    assert len(fig.axes) == 2 and fig.axes[1].get_xlim()[1] < 20
    assert any("1200 ms" in text.get_text() for text in fig.axes[1].texts)
    with pytest.raises(ValueError, match="no rungs"):
        ladder_figures.parts_and_measured({})
    plt.close("all")
