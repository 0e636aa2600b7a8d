"""The ladder: rungs in fresh processes, records, table, waterfall, report."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from llm_latency import cli, experiment, hardware, models
from llm_latency.experiment import prediction, report, rungs, runner
from llm_latency.experiment.record import RungRecord


@pytest.fixture(scope="module")
def tiny_directory(tmp_path_factory):
    """A learner's own model: a tiny random Llama with the course's tokenizer, as a directory."""
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49152, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=1024,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    models.load_tokenizer("smollm2-135m").save_pretrained(folder)
    return str(folder)


@pytest.fixture
def quick_ceilings(monkeypatch):
    rates = {"float32": 20.0, "bfloat16": 20.0}
    fixed = hardware.Ceilings("cpu", "a chip", 2, 20.0, 20.0, rates, {"float32": 100.0, "bfloat16": 200.0})
    monkeypatch.setattr(hardware, "ceilings", lambda *_, **__: fixed)
    monkeypatch.setattr(prediction, "matmul_rate", lambda *_: 1e11)


def record(name="kv-cache", scale=1.0, **changes) -> RungRecord:
    samples = {stage: [scale * ms] * 3 for stage, ms in (("tokenise", 1.0), ("prefill", 30.0), ("decode", 98.0))}
    samples |= {"detokenise": [scale * 1.0] * 3, "total": [scale * 130.0] * 3, "wall": [scale * 131.0] * 3}
    fields = dict(name=name, title=name, notebook="04", status="measured", samples_ms=samples, prompt_tokens=256)
    return RungRecord(**fields | dict(new_tokens=50, on_path=True, ids=[1, 2], text="<b>") | changes)


def a_run(*records: RungRecord) -> dict:
    from dataclasses import asdict

    return {
        "date": "2026-01-02", "profile": "smollm2-135m", "machine": hardware.machine_facts(), "ceilings": {"read": 1},
        "settings": {"rounds": 1}, "baseline": "kv-cache", "rungs": [asdict(r) for r in records],
    }  # fmt: skip


def test_run_ladder_in_fresh_processes(tiny_directory, tmp_path, quick_ceilings):
    """End to end on a learner's directory: rungs agree, stages add up to the wall clock, JSON can be read again."""
    seen = []
    run = experiment.run_ladder(
        tmp_path, names=["no-cache"], profile=tiny_directory, rounds=2, warmup=1, repeats=3,
        progress=lambda title, done, of: seen.append((done, of)),
    )  # fmt: skip
    no_cache, baseline = experiment.records_of(run)
    assert [r.name for r in (no_cache, baseline)] == ["no-cache", "kv-cache"]
    assert no_cache.status == baseline.status == "measured", (no_cache.reason, baseline.reason)
    assert no_cache.ids == baseline.ids and len(baseline.ids) == 50
    for measured in (no_cache, baseline):
        assert {len(values) for values in measured.samples_ms.values()} == {6}  # two processes of three
        assert measured.prompt_tokens == 256 and measured.new_tokens == 50
        assert measured.agreement > 0.99 and measured.perplexity > 1
        assert set(measured.predicted) == set(measured.share_of_limit) == {"prefill", "decode"}
        assert abs(measured.unaccounted_share) < 0.02
    assert seen[0] == (0, 4) and seen[-1] == (4, 4)
    assert experiment.load_run(tmp_path) == json.loads((tmp_path / "ladder.json").read_text()) == run


def test_a_rung_that_fails_is_shown_and_the_ladder_goes_on(tiny_directory, tmp_path, quick_ceilings, monkeypatch):
    """One broken rung must neither stop the run nor vanish from the table, and the exit code says so."""
    real = runner._run_one

    def break_one(entry, *args, **options):
        if entry.name == "no-cache":
            return RungRecord(entry.name, entry.title, entry.notebook, "failed", reason="RuntimeError: it broke")
        return real(entry, *args, **options)

    monkeypatch.setattr(runner, "_run_one", break_one)
    arguments = ["run", "--rungs", "no-cache", "--profile", tiny_directory, "--out", str(tmp_path)]
    result = CliRunner().invoke(cli.app, [*arguments, "--rounds", "1", "--repeats", "2", "--warmup", "0"])
    assert result.exit_code == 1
    (path,) = tmp_path.glob("*/ladder.json")
    broken, baseline = experiment.records_of(experiment.load_run(path))
    assert (broken.status, baseline.status) == ("failed", "measured")
    assert "FAILED: RuntimeError: it broke" in report.rows(experiment.load_run(path))[0][1]


def test_a_folder_that_cannot_serve_is_one_sentence(tmp_path, monkeypatch):
    """A traceback, or a minute of failing rungs, where the folder holds no model or the results cannot be written."""
    monkeypatch.setattr(runner, "_run_one", lambda *_, **__: pytest.fail("a rung was started"))
    file = tmp_path / "file"
    file.touch()
    (tmp_path / "empty").mkdir()
    wrong = (["--out", str(file)], ["--profile", str(tmp_path / "empty"), "--out", str(tmp_path)])
    for arguments, named in zip(wrong, ("Not a directory", "empty"), strict=True):
        result = CliRunner().invoke(cli.app, ["run", "--rungs", "kv-cache", *arguments])
        assert result.exit_code == 1 and isinstance(result.exception, SystemExit)
        assert named in " ".join(result.stderr.split())


def test_a_process_that_dies_leaves_its_last_words(tmp_path):
    """The reason comes from the process itself: its last line on stderr."""
    entry = rungs.rung("kv-cache")
    failed = runner._run_one(entry, "no-such-profile", 0, tmp_path, warmup=0, repeats=1, budget_s=1)
    assert failed.status == "failed" and "unknown profile 'no-such-profile'" in failed.reason


def test_unavailable_rungs_say_why():
    """No C++ compiler: the rung reports it, and is not counted as a failure."""
    skipped = record("compiled", status="unavailable", reason="no C++ compiler", samples_ms={})
    rows = report.rows(a_run(record(), skipped))
    assert rows[1][1] == "not available here: no C++ compiler" and len(rows[1]) == len(report.HEADERS)


def test_table_arithmetic():
    """49 decode steps in 98 ms are 500 tokens/s; twice the time is half the speed-up."""
    fast, slow = report.rows(a_run(record(), record("slow", scale=2.0)))
    by_header = dict(zip(report.HEADERS, fast, strict=True))
    assert by_header["tok/s"] == "500.0" and by_header["speed-up"] == "1.00"
    assert dict(zip(report.HEADERS, slow, strict=True))["speed-up"] == "0.50"
    assert record().unaccounted_share == pytest.approx(1 / 131)
    assert report.unaccounted(a_run(record())) == pytest.approx(1 / 131)


def test_report_stands_alone_and_escapes_what_the_model_wrote(tmp_path):
    """The page must open without a network, and a model's text must not become markup."""
    page = report.write(a_run(record("no-cache", scale=9), record()), tmp_path).read_text()
    assert "&lt;b&gt;" in page and "<pre><b>" not in page
    assert not re.search(r"(src|href)=\"(?!data:)", page)
    assert page.count('alt="') == 2 and 'alt=""' not in page
    assert (tmp_path / "waterfall.png").read_bytes().startswith(b"\x89PNG")


def test_random_weights_are_marked_wherever_they_show(tmp_path):
    """llama-7b-shape is for timing only; a reader must not take its text or perplexity for a model's."""
    run = a_run(record()) | {"profile": "llama-7b-shape"}
    assert "RANDOM WEIGHTS" in report.caption(run)
    assert "Random weights" in report.write(run, tmp_path).read_text()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"names": ["warp"]}, "unknown rung 'warp'; expected one of no-cache, kv-cache"),
        ({"repeats": 0}, "repeats=0"),
        ({"rounds": 0}, "rounds=0"),
        ({"warmup": -1}, "warmup=-1"),
        ({"profile": "gpt"}, "unknown profile 'gpt'"),
    ],
)
def test_bad_options_are_named(tmp_path, options, message):
    """Before any process starts."""
    with pytest.raises(ValueError, match=message):
        experiment.run_ladder(tmp_path, **options)


def test_rung_names_are_unique_and_the_baseline_is_among_them():
    """Two entries of one name would overwrite each other's results."""
    names = [entry.name for entry in rungs.RUNGS]
    assert len(set(names)) == len(names) and rungs.BASELINE in names
    assert [entry.name for entry in rungs.choose(["no-cache"])] == ["no-cache", "kv-cache"]
    with pytest.raises(ValueError, match="rung name 'a b'"):
        rungs.Rung("a b", "", "04", lambda profile: None)


def test_records_of_different_rungs_do_not_mix():
    """Samples of two rungs in one list would be a median of nothing."""
    with pytest.raises(ValueError, match="'other' cannot be added to 'kv-cache'"):
        record().extend(record("other"))
    with pytest.raises(KeyError, match="no samples of 'decode'"):
        record(samples_ms={}).median_ms("decode")


def test_missing_run_is_named(tmp_path):
    """A path without a run says how to make one."""
    with pytest.raises(ValueError, match="llm-latency run"):
        experiment.load_run(tmp_path)


def test_command_line_errors_are_sentences():
    """An unknown profile on the command line is one line, not a traceback."""
    result = subprocess.run(
        [sys.executable, "-m", "llm_latency.cli", "run", "--profile", "nope"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 1 and "unknown profile 'nope'" in result.stderr and "Traceback" not in result.stderr
