"""Sentences that a measurement chooses: each can be reached, in the library and in every cell of every notebook."""

from __future__ import annotations

import ast
from pathlib import Path

import nbformat
import pytest

from every_millisecond.notebook import outcome, show
from llm_latency.timing.compare import Ratio

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted(ROOT.glob("notebooks/*.ipynb"))
THREE = dict(above="slower", between="no measurable difference", below="faster")
TWO = dict(above="more", below="less")


@pytest.mark.parametrize(
    ("value", "at", "sentence"),
    [
        (Ratio(1.3, 1.2, 1.4), 1.0, "slower"),
        (Ratio(0.7, 0.6, 0.8), 1.0, "faster"),
        (Ratio(1.01, 0.99, 1.04), 1.0, "no measurable difference"),  # its median is above the mark, and says nothing
        (Ratio(1.2, 1.0, 1.4), 1.0, "no measurable difference"),  # touches the mark
        (Ratio(0.95, 0.68, 0.998), 1.0, "no measurable difference"),  # prints as (0.68 to 1.00), and so touches it, too
        (Ratio(1.001, 0.999, 1.002), 1.0, "no measurable difference"),
        (Ratio(1.004, 1.003, 1.004), 1.0, "no measurable difference"),
        (outcome.Interval(1.9, 1.8, 1.996), 2.0, "no measurable difference"),  # prints as (1.8 to 2)
        (outcome.Interval(5, 4, 6), (1, 3), "slower"),
        (outcome.Interval(2, 0.5, 6), (1, 3), "no measurable difference"),
        (outcome.Interval(0.2, 0.1, 0.3), (1, 3), "faster"),
        (2.0, (1, 3), "no measurable difference"),
        (3.5, (1, 3), "slower"),
        (-1, (1, 3), "faster"),
    ],
)
def test_the_interval_chooses_and_not_the_median(value, at, sentence):
    """A tie that is called a difference is the commonest false verdict (K1)."""
    assert outcome.choose(value, **THREE, at=at) == sentence


def test_a_bare_number_takes_one_of_two():
    assert outcome.choose(1.1, **TWO) == "more" and outcome.choose(0.9, **TWO) == "less"
    assert outcome.choose(5, above="{value} of 9", below="x", at=2) == "5 of 9"
    assert (
        outcome.choose(Ratio(2.0, 1.9, 2.2), **(THREE | {"above": "takes {value}"}))
        == "takes 2.00 times (1.90 to 2.20)"
    )


@pytest.mark.parametrize(
    ("value", "arguments", "words"),
    [
        (float("nan"), TWO, "finite"),
        (1.0, TWO | {"at": (3, 1)}, "in order"),
        (1.0, TWO | {"at": float("inf")}, "mark"),
        (1.0, THREE, "never be printed"),  # a bare number is not near a mark
        (Ratio(1.0, 0.9, 1.1), TWO, "no sentence for between"),
        (1.0, TWO | {"at": (1, 2)}, "no sentence for between"),
        (1.0, {"above": "", "below": "x"}, "no sentence for above"),
        (1.0, {"above": "x", "below": "x"}, "the same"),
    ],
)
def test_a_verdict_that_cannot_say_all_is_refused(value, arguments, words):
    """A verdict whose false branch has no sentence, or cannot be reached, is no verdict."""
    with pytest.raises(ValueError, match=words):
        outcome.choose(value, **arguments)


def test_an_interval_is_in_order_and_finite():
    with pytest.raises(ValueError, match="low <= median"):
        outcome.Interval(1, 2, 3)
    with pytest.raises(ValueError, match="finite"):
        outcome.Interval(1, 0, float("inf"))


def test_what_beats_physics_raises_an_alarm(capsys):
    """A step faster than its bytes allow is a broken clock, never a success."""
    show.against_physics("a step", 10.0, 20.0)
    assert "ALARM" in capsys.readouterr().out
    show.against_physics("a step", 30.0, 20.0)
    said = capsys.readouterr().out
    assert "ALARM" not in said and "1.50 times the 20 ms" in said
    with pytest.raises(ValueError, match="measured"):
        show.against_physics("a step", 0.0, 20.0)


# -- the notebooks' own calls ------------------------------------------------------------------------------------


def calls(source: str) -> list[ast.Call]:
    """The calls of `show.outcome` and `show.choose` in a cell."""
    return [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("outcome", "choose")
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == "show"
    ]


def text_of(node: ast.expr) -> str:
    """A sentence as written; what it fills in becomes a blank of its own."""
    return "".join(
        part.value if isinstance(part, ast.Constant) else f"<{ast.unparse(part)}>"
        for whole in ([node] if not isinstance(node, ast.BinOp) else [node.left, node.right])
        for part in (whole.values if isinstance(whole, ast.JoinedStr) else [whole])
    )


def reachable(call: ast.Call) -> tuple[set[str], set[str]]:
    """The sentences that a call writes, and those that figures on every side of its marks bring out.

    Raises AssertionError for a call that decides over a constant.
    """
    measured = call.args[0]
    assert any(isinstance(node, ast.Name) for node in ast.walk(measured)), f"no measurement in {ast.unparse(call)}"
    keywords = {keyword.arg: keyword.value for keyword in call.keywords}
    sentences = {
        name: text_of(keywords[name]).replace("{value}", "<value>")  # which is another figure each time
        for name in ("above", "between", "below")
        if name in keywords
    }
    at = keywords.get("at")
    two = isinstance(at, ast.Tuple)
    marks = (1.0, 2.0) if two else 1.0  # where the marks lie does not matter, only on which side a figure falls
    inside, spread = (1.5, 0.1) if two else (1.0, 0.1)
    found = set()
    for middle in (-9.0, inside, 9.0):
        value = (
            middle if two or "between" not in sentences else outcome.Interval(middle, middle - spread, middle + spread)
        )
        found.add(outcome.choose(value, **sentences, at=marks))
    return set(sentences.values()), found


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_sentence_of_every_outcome_can_be_reached(path):
    """Walks the cells, so that none can be forgotten: figures exist that call for each written sentence."""
    for cell in nbformat.read(path, as_version=4).cells:
        if cell.cell_type == "code":
            for call in calls(cell.source):
                written, found = reachable(call)
                assert written == found, f"{path.stem}, cell {cell.id}: never printed: {written - found}"


@pytest.mark.parametrize(
    "planted",
    [
        'show.outcome(2.0, above="a", below="b")',  # a constant decides nothing
        'show.outcome(x, above="a", below="")',
        'show.outcome(x, above="a", between="b", below="a")',
        'show.outcome(x, above="a", below="b", at=(1, 2))',
    ],
)
def test_planted_a_verdict_that_cannot_be_false_is_found(planted):
    with pytest.raises((AssertionError, ValueError)):
        written, found = reachable(calls(planted)[0])
        assert written == found


def test_a_prediction_inside_the_spread_is_not_off():
    """ "off by 41%" stood beside an interval that held the prediction."""
    found = show.Interval(1.5, 0.9, 2.0)
    assert show.miss(0.9, found) == show.miss(2.0, found) == "within the spread"
    assert show.miss(3.0, found) == "off by 100%" and show.miss(0.75, found) == "off by 50%"
