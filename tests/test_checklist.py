"""The checklist: bounds that follow from the parts, items in the order of their gain, and words where none is known."""

from __future__ import annotations

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel
from typer.testing import CliRunner

from every_millisecond import checklist, cli
from every_millisecond.checklist import ITEMS, MEASURED, NOT_HERE, PREDICTED, Advice, Item, Stage
from every_millisecond.checklist.diagnosis import ranked
from every_millisecond.subject import Subject


def test_a_stage_is_bound_by_its_largest_part():
    """A small model on a fast device is bound by launches; a slow program by neither roof."""
    assert Stage("s", 30.0, 19.0, 7.0, "bandwidth").bound == "bandwidth"
    assert Stage("s", 30.0, 7.0, 19.0, "bandwidth").bound == "launch"
    assert Stage("s", 30.0, 20.0, 1.0, "compute").bound == "compute"
    slow = Stage("s", 60.0, 19.0, 7.0, "bandwidth")
    assert slow.bound == "rest" and slow.rest_ms == pytest.approx(34.0)
    assert Stage("s", 20.0, 19.0, 7.0, "bandwidth").rest_ms == 0.0, "a time below its parts has no negative rest"
    assert "bound by neither" in str(slow) and "bytes 19.0 ms" in str(slow) and "ALARM" not in str(slow)
    assert "ALARM" in str(Stage("s", 10.0, 19.0, 7.0, "bandwidth")), "faster than physics is a fault of the figures"


def advice(title: str, gain: float | None, **more) -> Advice:
    return Advice(title, 1, "05", gain, MEASURED if gain else NOT_HERE, "why", "none", **more)


def test_the_largest_gain_comes_first():
    """An item that cannot be measured, or that is in use already, must not stand above one that helps."""
    order = ranked(
        [
            advice("unknown", None), advice("small", 1.1), advice("in use", 9.0, in_use=True), advice("large", 3.0),
            advice("many", 8.0, unit="times the throughput"),
        ]
    )  # fmt: skip
    assert [entry.title for entry in order] == ["large", "small", "many", "unknown", "in use"]


def test_every_item_of_the_articles_checklist_is_there():
    """Three priorities; what was forgotten cannot be advised."""
    words = " ".join(item.title for item in ITEMS)
    for wanted in ("torch.compile", "16 bits", "SDPA", "KV cache", "INT4", "batching", "FlashAttention-2", "GGUF",
                   "speculative", "PagedAttention", "FP8", "TensorRT-LLM"):  # fmt: skip
        assert wanted in words
    assert {item.priority for item in ITEMS} == {1, 2, 3}


def test_what_an_item_refuses_is_said():
    """One item that does not fit the model must not end the diagnosis."""

    def refuse(subject):
        raise ValueError("groups of 32 do not fit 48 columns\nand more")

    found = Item("an item", 2, "08", refuse).advise(None)
    assert (found.gain, found.how, found.why) == (None, NOT_HERE, "groups of 32 do not fit 48 columns")
    assert (found.title, found.priority, found.notebook) == ("an item", 2, "08")


def test_diagnose_a_learners_own_folder(tiny_directory, quick_ceilings, monkeypatch):
    """End to end: stages that are explained, every item, and parts that were really measured."""
    diagnose, shown = checklist.diagnose, []
    monkeypatch.setattr(
        checklist, "diagnose", lambda *args, **options: shown.append(diagnose(*args, **options)) or shown[0]
    )
    result = CliRunner().invoke(cli.app, ["diagnose", "--model", tiny_directory])
    assert result.exit_code == 0, result.output
    assert "Your checklist, by what it gains" in result.output
    (found,) = shown
    assert [stage.name for stage in found.stages] == ["prefill", "decode step"]
    assert found.total_ms == pytest.approx(found.stages[0].measured_ms + 49 * found.stages[1].measured_ms)
    assert found.cache_bytes_per_token == 2 * 2 * 2 * 8 * 4  # K and V, layers, heads, width, bytes
    by_title = {entry.title: entry for entry in found.advice}
    assert set(by_title) == {item.title for item in ITEMS}
    assert by_title["KV cache"].how == MEASURED and by_title["KV cache"].in_use
    assert "perplexity" in by_title["16 bits instead of 32"].quality
    assert "acceptance" in by_title["speculative decoding"].why and "0.6," not in by_title["speculative decoding"].why
    assert by_title["FP8"].gain is None or torch.cuda.is_available()


def test_a_prefill_that_would_take_minutes_is_extrapolated_and_says_so(tiny_directory, quick_ceilings, monkeypatch):
    """BF16 on a processor without it: a measured figure that was never measured would be worse than none."""
    subject = Subject(tiny_directory)
    assert not subject.times.extrapolated
    monkeypatch.setattr("every_millisecond.subject.LONG_MS", 0.0)
    times = subject.times_of(subject.stepper)
    assert times.extrapolated and times.total_ms() > 0
    assert times.total_ms(99) - times.total_ms(50) == pytest.approx(49 * times.step_ms), "any length, not one (47)"
    half = next(item for item in ITEMS if item.title.startswith("16 bits")).advise(subject)
    assert half.how == PREDICTED and "not measured" in half.quality


def test_speculation_is_judged_by_the_acceptance_of_this_model(tiny_directory, quick_ceilings, monkeypatch):
    """Fault: an acceptance of 0.6 was supposed for every model, text and draft."""
    subject, item = Subject(tiny_directory), next(item for item in ITEMS if item.title.startswith("speculative"))
    found = item.advise(subject)
    assert found.how == PREDICTED and "prompt lookup" in found.why

    def refuse(*arguments, **options):
        raise ValueError("no acceptance")

    monkeypatch.setattr("every_millisecond.checklist.advice.measure_costs", refuse)
    assert item.advise(subject).how == NOT_HERE, "what was not measured is not supposed"


def test_another_architecture_is_one_sentence(tmp_path):
    """Its FLOPs would be counted as if it were a Llama."""
    GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=1, n_embd=8, vocab_size=10)).save_pretrained(tmp_path)
    result = CliRunner().invoke(cli.app, ["diagnose", "--model", str(tmp_path)])
    assert result.exit_code == 1 and "unknown architecture 'gpt2'" in " ".join(result.stderr.split())
