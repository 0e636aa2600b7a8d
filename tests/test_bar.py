"""The bar that is carried from notebook to notebook."""

from __future__ import annotations

import dataclasses
import json
import types
from pathlib import Path

import pytest
import torch

from every_millisecond.ladder import rungs
from every_millisecond.notebook import bar, plots


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """Rungs that take a known time; the list of those that were measured."""
    monkeypatch.setenv("LLM_LATENCY_SCORECARD", str(tmp_path / "scorecard.json"))
    asked, ms = [], {"kv-cache": 2000.0, "half": 900.0, "compiled": 800.0, "sdpa": 1500.0}

    def measure(name, profile):
        asked.append(name)
        if name == "half" and ms["half"] is None:
            return None
        total = ms.get(name, 500.0)
        return bar.Bar(name, name, dict.fromkeys(plots.STAGES, total / 4), total, total)

    monkeypatch.setattr(bar, "_measure", measure)
    monkeypatch.setattr(bar, "_runs_here", lambda name: name != "compiled")
    return asked, ms


def test_a_notebook_opens_with_what_the_last_one_ended_with(measured, capsys):
    """Bars of different minutes and decoders told a story that no run had measured (K4, K12)."""
    asked, _ = measured
    ended = bar.ends("05")
    assert bar.opens("06") == ended == bar.ends("06") and ended.rung == "half"
    assert asked == ["kv-cache", "half"]  # each measured once
    assert capsys.readouterr().out.count("on this machine: the bar") == 3


def test_the_first_notebook_opens_with_its_own(measured):
    assert bar.opens("00").rung == "kv-cache" == bar.opens("01").rung == bar.ends("04").rung


def test_what_is_too_slow_here_is_passed_over(measured):
    """16 bits on a processor without units: the next way down is tried, and the bar stays if that is slower."""
    asked, ms = measured
    ms["half"] = None
    assert bar.ends("05").rung == "sdpa" and asked == ["kv-cache", "half", "sdpa"]
    ms["int4"] = 1600.0
    assert bar.ends("08").rung == "sdpa"


@pytest.mark.parametrize(
    ("half_ms", "says"), [(9000.0, "was slower: 9000 ms"), (2000.0, "was not faster beyond the spreads: 2000 ms")]
)
def test_a_bar_that_stays_says_so(measured, capsys, half_ms, says):
    """Two equal bars without a word looked like a fault of the notebook."""
    _, ms = measured
    ms["half"] = half_ms
    assert bar.ends("05").rung == "kv-cache" and says in capsys.readouterr().out
    assert bar.tried("05").rung == "half" and bar.tried("04") is None
    assert bar.ends("06").rung == "kv-cache" and "own decoder" not in capsys.readouterr().out  # it has no other


def test_spreads_that_overlap_change_no_bar(measured, monkeypatch, capsys):
    """A decoder that lost when both took turns had become the bar: minutes apart, a median was the lower by luck."""
    steady = bar._measure

    def noisy(name, profile):
        found = steady(name, profile)
        return dataclasses.replace(found, low_ms=found.low_ms - 700, high_ms=found.high_ms + 700)

    monkeypatch.setattr(bar, "_measure", noisy)
    assert bar.ends("05").rung == "kv-cache" and "not faster beyond the spreads" in capsys.readouterr().out
    assert bar.ends("08").rung == "int4"  # clear of it: 500 + 700 < 2,000 - 700


@pytest.mark.parametrize(
    ("won", "own"),
    [("kernel", "kernel-prefix"), ("kernel-speculation", "kernel-everything"), ("half", "kernel-prefix")],
)
def test_the_kept_prefix_comes_to_the_decoder_that_won(measured, won, own):
    """Where guessing had lost, the bar behind it guessed again, and its slower decode looked like the prefix's."""
    asked, ms = measured
    ms |= {name: 900.0 for name in ("int4", "kernel", "kernel-speculation", own)} | {won: 800.0, own: 700.0}
    assert bar.opens("12").rung == won and bar.ends("12").rung == own == bar.opens("13").rung
    assert asked[-1] == own and set(bar.KEEPS_PREFIX.values()) <= set(bar.ENDS["12"])


def test_every_bar_is_a_rung_and_unknown_notebooks_are_refused():
    for names in bar.ENDS.values():
        for name in names:
            rungs.rung(name)
    with pytest.raises(KeyError, match="99"):
        bar.opens("99")


def test_another_machine_or_profile_measures_anew(measured, monkeypatch):
    """A bar of two threads beside one of eight is no story."""
    asked, _ = measured
    bar.ends("04")
    monkeypatch.setattr(bar, "_machine", lambda profile: "another")
    bar.ends("04")
    assert asked == ["kv-cache", "kv-cache"]


@pytest.mark.parametrize("answer_ms, answers", [(2_000.0, bar.REPEATS), (40_000.0, 1)])
def test_a_slow_machine_has_a_first_bar(monkeypatch, answer_ms, answers):
    """The first thing that a newcomer saw on a slow machine was an error, after minutes: its baseline is measured
    however slow it is, once where an answer takes long; only what should be an improvement may be passed over."""
    entry, asked = types.SimpleNamespace(build=lambda profile: object(), title="+ a rung"), []

    def respond(stepper, tokenizer, prompt, new_tokens):
        asked.append(new_tokens)
        return types.SimpleNamespace(breakdown=dict.fromkeys(plots.STAGES, answer_ms / 4))

    for name, fake in {
        "respond": respond, "with_room": lambda stepper, tokens: stepper, "prefill_seconds": lambda stepper: 60.0,
        "standard_prompt": lambda tokenizer: "",
    }.items():  # fmt: skip
        monkeypatch.setattr(bar, name, fake)
    monkeypatch.setattr(bar.rungs, "rung", lambda name: entry)
    monkeypatch.setattr(bar.models, "load_tokenizer", lambda profile: None)
    assert bar._measure("half", None) is None and asked == []
    first = bar._measure(rungs.BASELINE, None)
    assert first.total_ms == answer_ms and asked.count(bar.NEW_TOKENS) == answers


@pytest.mark.cuda
@pytest.mark.skipif(torch.cuda.is_available(), reason="fills a pretended card")
@pytest.mark.pretend_card("T4")
def test_a_card_too_small_is_refused_before_a_bar_is_measured(gpu, measured, monkeypatch):
    """Guards against a notebook whose first cells run and whose middle dies of CUDA's out-of-memory error."""
    asked, _ = measured
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (int(1e9), int(15.8e9)))
    for number in bar.ENDS:
        with pytest.raises(RuntimeError, match=rf"notebook {number} on profile smollm2-135m needs .* GB"):
            bar.opens(number)
    assert not asked and gpu.allocated == 0


def test_every_notebook_opens_its_bar_before_it_loads():
    """Guards against a check of the card that comes after the models."""
    for path in (Path(__file__).parents[1] / "notebooks").glob("[0-9]*.ipynb"):
        if path.name[:2] == "14":
            continue  # has no bar, and holds the default model alone, whichever the profile
        cells = [cell["source"] for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
        source = "".join("".join(cell) for cell in cells)
        check = min(source.find(f'{name}("{path.name[:2]}")') % (1 << 40) for name in ("bar.opens", "check_card"))
        assert check < source.find("load_target(") % (1 << 40), path.name
