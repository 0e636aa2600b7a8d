"""What notebooks show: figures with alternative text, the stage colours, the reader's scorecard."""

from __future__ import annotations

import itertools
import json
import math

import matplotlib as mpl
import pytest
from at_once import run_at_once

mpl.use("Agg")

from matplotlib import colors
from matplotlib import pyplot as plt

from every_millisecond import claims
from every_millisecond.notebook import plots, scorecard, show
from every_millisecond.notebook.waterfall import Fall, waterfall


def test_a_figure_carries_its_alternative_text(monkeypatch):
    """An image without alternative text is closed to a reader who cannot see it."""
    shown = []
    monkeypatch.setattr(show, "display", lambda bundle, raw: shown.append(bundle))
    fig, ax = plt.subplots()
    ax.plot([1, 2])
    with pytest.raises(ValueError, match="alt='a plot'"):
        show.figure(fig, alt="a plot")
    show.figure(fig, alt='The line rises "fast" & never falls')
    assert 'alt="The line rises &quot;fast&quot; &amp; never falls"' in shown[0]["text/html"]
    assert shown[0]["text/plain"].endswith('rises "fast" & never falls') and shown[0]["image/png"]
    assert not plt.fignum_exists(fig.number)


def test_stage_colours_differ_in_grey():
    """Colours that only differ in hue are one colour in print; hatching tells the closest pair apart."""

    def grey(colour):
        red, green, blue = colors.to_rgb(colour)
        return 0.299 * red + 0.587 * green + 0.114 * blue

    for a, b in itertools.combinations(plots.STAGES, 2):
        apart = abs(grey(plots.STAGE_COLOURS[a]) - grey(plots.STAGE_COLOURS[b]))
        assert apart > 0.1 or plots.STAGE_HATCHES[a] != plots.STAGE_HATCHES[b]


def test_stage_bar_draws_every_millisecond():
    """The bar's length is the sum of its stages, and a missing stage is an error, not a shorter bar."""
    _, ax = plt.subplots()
    plots.stage_bar(ax, {"before": {"tokenise": 1, "prefill": 20, "decode": 30, "detokenise": 2}})
    assert max(patch.get_x() + patch.get_width() for patch in ax.patches) == 53
    with pytest.raises(KeyError, match="decode"):
        plots.stage_bar(ax, {"x": {"tokenise": 1, "prefill": 20, "detokenise": 2}})
    plt.close("all")


def test_a_thin_piece_of_a_bar_shows_its_number():
    """The one stage that got slower could not be read off, since it was too thin for its name."""
    _, ax = plt.subplots()
    plots.stage_bar(ax, {"a": dict(zip(plots.STAGES, (1, 10, 90, 2), strict=True))})
    assert {"10", "decode 90 ms", "103 ms"} == {text.get_text() for text in ax.texts}
    plt.close("all")


def test_labels_at_the_ends_of_lines_move_apart_and_keep_their_order():
    """Labels printed over each other, or so far from their lines that a reader took one for another's."""
    _, ax = plt.subplots()
    for name, end in {"b": 5.0, "d": 90.0, "a": 4.9, "c": 5.1}.items():
        ax.plot([0, 1], [0, end], label=name)
    ax.set(xlim=(0, 2), ylim=(0, 100))
    plots.end_labels(ax, gap=0.1)
    places = {text.get_text(): text.get_position() for text in ax.texts}
    heights = [places[name][1] for name in "abcd"]
    assert heights == pytest.approx([0.05, 0.15, 0.25, 0.9])  # as near as gap and axes allow; the lone one stays
    assert places["a"][0] == pytest.approx(0.515)
    assert {t.get_text(): t.get_color() for t in ax.texts} == {x.get_label(): x.get_color() for x in ax.get_lines()}
    plt.close("all")


def test_waterfall_ends_where_the_last_total_does():
    """Steps must lead from the first total to the last, one that costs time included; 10 ms must not vanish; hatching
    means one thing, and what costs quality says so."""
    fig = plt.figure()
    falls = [Fall("b", 1000, 40, quality="perplexity +2%"), Fall("c", 40, 50), Fall("d", 50, 42, overlaps=True)]
    waterfall(fig, "a", falls)
    whole, near = fig.axes
    widths = [round(patch.get_width(), 6) for patch in whole.patches]
    lefts = [round(patch.get_x(), 6) for patch in whole.patches]
    assert widths == [1000, 42, 960, 10, 8] and lefts == [0, 0, 40, 40, 42]
    assert [bool(patch.get_hatch()) for patch in whole.patches] == [False] * 4 + [True]
    assert 10 / near.get_xlim()[1] > 0.05 and near.patches[-1].get_width() == pytest.approx(8)
    assert "perplexity +2%" in [text.get_text() for text in near.texts]
    with pytest.raises(ValueError, match="no steps"):
        waterfall(fig, "a", [])
    unsure = Fall("b", 1000, 900, spread=(-300, 120))
    waterfall(plt.figure(), "a", [unsure])
    assert unsure.unsure and "cannot be told from no change" in [t.get_text() for t in plt.gcf().legends[0].texts]
    assert not Fall("b", 1000, 900, spread=(-300, -20)).unsure and not Fall("b", 1000, 900).unsure
    plt.close("all")


@pytest.fixture
def card(tmp_path, monkeypatch):
    monkeypatch.setenv("LLM_LATENCY_SCORECARD", str(tmp_path / "card.json"))


def test_scorecard_grows_and_tells_how_far_off(card, capsys):
    """The table must show what was guessed before what was measured."""
    scorecard.guess("01-x", 10, "ms", "How long?")
    with pytest.raises(KeyError, match="01-y"):
        scorecard.measured("01-y", 3)
    scorecard.physics("01-x", 18)
    scorecard.measured("01-x", 20)
    capsys.readouterr()
    scorecard.table()
    line = capsys.readouterr().out.splitlines()[1]
    assert "10 ms" in line and "18 ms" in line and "20 ms" in line and line.endswith("2.0 times")
    scorecard.guess("01-x", 30, "ms", "How long?")
    scorecard.table("01-x")
    assert capsys.readouterr().out.splitlines()[-1].split()[-2:] == ["-", "-"]


@pytest.mark.parametrize("value", [math.nan, math.inf, "3", None, True])
def test_scorecard_refuses_what_is_no_number(card, value):
    """A guess must be a number that can be compared."""
    with pytest.raises(ValueError, match="finite number"):
        scorecard.guess("k", value, "ms", "?")


def write_rows(name: str, claim: str, figure: str) -> None:
    for i in range(20):
        scorecard.guess(f"{name}-{i}", i, "ms", "How long?")
        claims.settle(claim, **{figure: 1.0 + i})


def test_a_stages_colour_is_nobody_elses():
    """A method in decode's orange reads as decode (first edition: attention in a breakdown, lines by format)."""
    stages = {colour.lower() for colour in plots.STAGE_COLOURS.values()}
    methods = [colour.lower() for colour in plots.METHOD_COLOURS]
    assert stages.isdisjoint(methods) and len(set(methods)) == len(plots.METHOD_MARKERS) == len(methods)


def test_two_writers_lose_nothing(card, tmp_path):
    """Kind 36: two notebooks at once, each of which read the card, added its row and wrote it back without the other's;
    and a card of mode 0600, which the next user of the folder cannot read."""
    run_at_once(write_rows, ("a", "A4", "power"), ("b", "B14", "gain"))
    rows = json.loads((tmp_path / "card.json").read_text())
    assert set(rows) == {f"{name}-{i}" for name in "ab" for i in range(20)}
    kept = json.loads((tmp_path / "claims.json").read_text())
    assert kept["A4"]["figures"] == {"power": 20.0} and kept["B14"]["figures"] == {"gain": 20.0}
    plain = tmp_path / "plain"
    plain.touch()
    assert (tmp_path / "card.json").stat().st_mode == plain.stat().st_mode


def test_the_card_means_the_same_file_from_everywhere(monkeypatch, tmp_path):
    """Kind 37: a relative path or a "~" in the variable was another card in each working directory."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for chosen in ("~/card.json", "card.json"):
        monkeypatch.setenv("LLM_LATENCY_SCORECARD", chosen)
        for folder in (tmp_path, "/"):
            monkeypatch.chdir(folder)
            assert scorecard.path() == tmp_path / "card.json"


def test_a_cell_run_twice_shows_the_same(card, capsys, monkeypatch):
    """Kind 53: rows that appear twice, a figure that is empty the second time."""
    shown = []
    monkeypatch.setattr(show, "display", lambda bundle, raw: shown.append(bundle))
    fig, ax = plt.subplots()
    ax.plot([1, 2])
    printed = []
    for _ in range(2):
        scorecard.guess("01-x", 10, "ms", "How long?")
        scorecard.measured("01-x", 20)
        scorecard.table()
        claims.settle("A4", power=0.9)
        show.figure(fig, alt="The line rises and never falls")
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1] and shown[0] == shown[1]


@pytest.mark.parametrize(("threads", "said"), [(1, ", 1 thread, torch "), (2, ", 2 threads, torch ")])
def test_the_machine_is_named_in_english(monkeypatch, capsys, threads, said):
    monkeypatch.setattr(show.hardware, "machine_facts", lambda: {**facts, "threads": threads})
    facts = {"gpu": None, "cpu": "a chip", "cpu_capability": "AVX2", "torch": "2.13.0"}
    show.machine()
    assert said in capsys.readouterr().out
