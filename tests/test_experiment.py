"""The ladder: rungs in fresh processes, records, table, waterfall, report."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import ClassVar
from xml.etree import ElementTree

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from every_millisecond import cli
from every_millisecond import ladder as experiment
from every_millisecond.ladder import contributions, prediction, report, resume, rungs, runner, tables, worker
from every_millisecond.ladder.record import RungRecord
from llm_latency import hardware, models
from llm_latency.generation import TransformersStepper
from llm_latency.timing import clock


@pytest.fixture
def quick_rates(quick_ceilings, monkeypatch):
    monkeypatch.setattr(prediction, "matmul_rate", lambda *_: 1e11)


def record(name="kv-cache", scale=1.0, **changes) -> RungRecord:
    samples = {stage: [scale * ms] * 3 for stage, ms in (("tokenise", 1.0), ("prefill", 30.0), ("decode", 98.0))}
    samples |= {"detokenise": [scale * 1.0] * 3, "total": [scale * 130.0] * 3, "wall": [scale * 131.0] * 3}
    fields = dict(name=name, title=name, notebook="04", status="measured", samples_ms=samples, prompt_tokens=256)
    return RungRecord(**fields | dict(new_tokens=50, on_path=True, ids=[1, 2], text="<b>") | changes)


def a_run(*records: RungRecord) -> dict:
    return {
        "date": "2026-01-02", "profile": "smollm2-135m", "machine": hardware.machine_facts(), "ceilings": {"read": 1},
        "settings": {"rounds": 1}, "baseline": "kv-cache", "rungs": [asdict(r) for r in records],
    }  # fmt: skip


def test_run_ladder_in_fresh_processes(tiny_directory, tmp_path, quick_rates):
    """End to end on a learner's directory: rungs agree, stages add up to the wall clock, JSON can be read again."""
    seen = []
    run = experiment.run_ladder(
        tmp_path, names=["no-cache"], profile=tiny_directory, rounds=1, warmup=1, repeats=3,
        progress=lambda title, done, of: seen.append((done, of)),
    )  # fmt: skip
    no_cache, baseline = experiment.records_of(run)
    assert [r.name for r in (no_cache, baseline)] == ["no-cache", "kv-cache"]
    assert no_cache.status == baseline.status == "measured", (no_cache.reason, baseline.reason)
    assert no_cache.ids == baseline.ids and len(baseline.ids) == 50
    for measured in (no_cache, baseline):
        assert {len(values) for values in measured.samples_ms.values()} == {3}
        assert measured.prompt_tokens == 256 and measured.new_tokens == 50
        assert measured.agreement > 0.99 and measured.perplexity > 1
        assert set(measured.predicted) == set(measured.share_of_limit) == {"prefill", "decode"}
        # The prediction adds what issuing the operators takes, which for a model this small is nearly everything.
        assert measured.launch_ms > 0
        limit = measured.share_of_limit["decode"] * measured.median_ms("decode")
        assert measured.predicted["decode"] >= (limit + 49 * measured.launch_ms) * (1 - 1e-9)
        assert abs(measured.unaccounted_share) < 0.02
    assert seen[0] == (0, 2) and seen[-1] == (2, 2)
    assert experiment.load_run(tmp_path) == json.loads((tmp_path / "ladder.json").read_text()) == run


def test_a_rung_that_fails_is_shown_and_the_ladder_goes_on(tiny_directory, tmp_path, quick_rates, instant, monkeypatch):
    """One broken rung must neither stop the run nor vanish from the table, and the exit code says so."""
    real = runner._run_one

    def break_one(entry, *args, **options):
        if entry.name == "no-cache":
            return entry.record("failed", reason="RuntimeError: [/red] it broke \x1b[2J")
        return real(entry, *args, **options)

    monkeypatch.setattr(runner, "_run_one", break_one)
    arguments = ["run", "--rungs", "no-cache", "--profile", tiny_directory, "--out", str(tmp_path)]
    result = CliRunner().invoke(cli.app, [*arguments, "--rounds", "1", "--repeats", "2", "--warmup", "0"])
    assert result.exit_code == 1
    (path,) = tmp_path.glob("*/ladder.json")
    broken, baseline = experiment.records_of(experiment.load_run(path))
    assert (broken.status, baseline.status) == ("failed", "measured")
    assert "not finished here: RuntimeError: [/red] it broke" in tables.rows(experiment.load_run(path))[0][1]
    assert "not finished here: no-cache: RuntimeError: [/red] it broke" in " ".join(result.stderr.split())


def test_a_folder_that_cannot_serve_is_one_sentence(tmp_path, monkeypatch):
    """A traceback, or a minute of failing rungs, where the folder holds no model or the results cannot be written."""
    monkeypatch.setattr(runner, "_run_one", lambda *_, **__: pytest.fail("a rung was started"))
    file = tmp_path / "file"
    file.touch()
    (tmp_path / "empty").mkdir()
    wrong = (["--out", str(file)], ["--profile", str(tmp_path / "empty"), "--out", str(tmp_path)])
    for arguments, named in zip(wrong, ("File exists", "empty"), strict=True):
        result = CliRunner().invoke(cli.app, ["run", "--rungs", "kv-cache", *arguments])
        assert result.exit_code == 1 and isinstance(result.exception, SystemExit)
        assert named in " ".join(result.stderr.split())


def test_a_process_that_dies_leaves_its_last_words(tmp_path):
    """The reason comes from the process itself: its last line on stderr."""
    entry = rungs.rung("kv-cache")
    counts = dict(warmup=0, repeats=1, budget_s=1, new_tokens=2)
    failed = runner._run_one(entry, "no-such-profile", 0, tmp_path, slowness=1.0, quality=False, **counts)
    assert failed.status == "failed" and "unknown profile 'no-such-profile'" in failed.reason


def test_unavailable_rungs_say_why():
    """No C++ compiler: the rung reports it, and is not counted as a failure."""
    skipped = record("compiled", status="unavailable", reason="no C++ compiler", samples_ms={})
    rows = tables.rows(a_run(record(), skipped))
    assert rows[1][1] == "not available here: no C++ compiler" and len(rows[1]) == len(tables.HEADERS)


def test_table_arithmetic():
    """49 decode steps in 98 ms are 500 tokens/s; twice the time is half the speed-up."""
    fast, slow = tables.rows(a_run(record(), record("slow", scale=2.0)))
    by_header = dict(zip(tables.HEADERS, fast, strict=True))
    assert by_header["tok/s"] == "500.0" and by_header["speed-up"] == "1.00"
    assert dict(zip(tables.HEADERS, slow, strict=True))["speed-up"] == "0.50"
    assert record().unaccounted_share == pytest.approx(1 / 131)
    assert tables.unaccounted(a_run(record())) == pytest.approx(1 / 131)


def test_report_stands_alone_and_escapes_what_the_model_wrote(tmp_path):
    """The page must open without a network, and a model's text must not become markup."""
    page = report.write(a_run(record("no-cache", scale=9), record(), record("sdpa", scale=0.8)), tmp_path).read_text()
    assert "&lt;b&gt;" in page and "<pre><b>" not in page
    assert not re.search(r"(src|href)=\"(?!data:)", page)
    assert page.count('alt="') == 2 and 'alt=""' not in page
    for wanted in ("What each step gave", "Claims of the two source articles", "A16", "Raw samples", "2026-01-02"):
        assert wanted in page
    assert torch.__version__ in page
    assert (tmp_path / "waterfall.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.long
def test_random_weights_are_marked_wherever_they_show(tmp_path):
    """llama-7b-shape is for timing only; a reader must not take its text or perplexity for a model's."""
    run = a_run(record()) | {"profile": "llama-7b-shape"}
    assert "RANDOM WEIGHTS" in tables.caption(run)
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


def test_whoever_asks_a_rung_without_figures_is_told_why():
    """Kind 45: a notebook ended in "no samples of 'wall'", which hid that the rung had run into its limit."""
    late = record("no-cache", status="failed", reason="no answer within 600 s", samples_ms={})
    assert late.summary() == "no-cache             not finished here: no answer within 600 s"
    for ask in (lambda: late.median_ms("wall"), late.stages, lambda: late.tokens_per_second, late.spread_ms):
        with pytest.raises(RuntimeError, match="rung 'no-cache' is not finished here: no answer within 600 s"):
            ask()
    skipped = record("half", status="unavailable", reason="no hardware", samples_ms={})
    assert skipped.summary().endswith("not available here: no hardware")
    assert record().summary() == "kv-cache                  131 ms    500.0 tok/s"


def test_missing_run_is_named(tmp_path):
    """A path without a run says how to make one."""
    with pytest.raises(ValueError, match="llm-latency run"):
        experiment.load_run(tmp_path)


def test_command_line_errors_are_sentences():
    """An unknown profile on the command line is one line, not a traceback."""
    result = CliRunner().invoke(cli.app, ["run", "--profile", "nope"])
    assert result.exit_code == 1 and "unknown profile 'nope'" in result.stderr and "Traceback" not in result.stderr
    assert isinstance(result.exception, SystemExit), "what escapes is a traceback"


def path_run(**scales: float) -> dict:
    """A run whose rungs take 131 ms times their scale."""
    alone = {"half": "half-alone", "int4": "int4-alone"}
    entries = [
        record(name.replace("_", "-"), scale=scale, on_path="alone" not in name, alone=alone.get(name, ""))
        for name, scale in scales.items()
    ]
    return a_run(record("no-cache", scale=50), record(), *entries)


def test_contributions_add_up_to_the_total():
    """The steps' ms must not promise more than the request lost, whatever a step gains, loses or shares."""
    run = path_run(sdpa=0.9, half=0.93, half_alone=0.7, fast=0.4, int4=0.1, int4_alone=0.5)
    records = experiment.records_of(run)
    found = experiment.steps(records, "kv-cache")
    assert [step.name for step in found] == ["sdpa", "half", "fast", "int4"]
    first, last = records[1].median_ms("wall"), records[-2].median_ms("wall")
    assert sum(step.gain_ms for step in found) == pytest.approx(first - last, rel=1e-12)
    assert sum(step.share for step in found) + last / first == pytest.approx(1.0, rel=1e-12)
    sdpa, half, fast, int4 = found
    assert (sdpa.loses, half.loses, fast.loses, int4.loses) == (False, True, False, False)
    assert half.overlaps and int4.overlaps and sdpa.alone_gain_ms is None and not fast.overlaps
    assert half.alone_gain_ms == pytest.approx(0.3 * 131) and half.alone_factor == pytest.approx(1 / 0.7)
    product, together = experiment.product_of_factors(found)
    assert product == pytest.approx(1 / 0.7 / 0.5) and together == pytest.approx(0.9 / 0.93 * 0.4 / 0.1)
    assert [r.name for r in experiment.best_order(records, "kv-cache")] == ["kv-cache", "sdpa", "fast", "int4"]
    assert experiment.best(records).name == "int4"
    assert experiment.best([*records, record("other", scale=0.01, own_request=True)]).name == "int4"
    assert tables.step_rows(run)[1][-1] == "loses"
    over = experiment.steps([*records[:-1], record("int4", scale=0.1, alone="sdpa", over="half")], "kv-cache")[-1]
    assert over.alone_factor == pytest.approx(0.93 / 0.9), "a step may be set against another rung than the baseline"
    with pytest.raises(ValueError, match="0 steps of the path were measured alone on the baseline"):
        experiment.product_of_factors([over])
    with pytest.raises(ValueError, match="1 steps of the path"):
        experiment.product_of_factors([half])
    itself = experiment.steps([*records[:2], record("sdpa", scale=0.9, alone="sdpa")], "kv-cache")[0]
    assert itself.alone_ms is None, "a step alone is another rung than the step in its place: else the answer is 1"
    assert tables.step_rows(run)[-1][:4] == ["together", "131 ms", "13 ms", "118 ms"]


def test_a_ladder_with_too_few_factors_gives_way_to_a_recorded_one(tmp_path):
    """One factor is its own product: the question of notebook 13 would answer itself."""
    few = path_run(sdpa=0.9, half=0.5, half_alone=0.6)
    many = path_run(half=0.5, half_alone=0.6, int4=0.1, int4_alone=0.5)
    assert experiment.run_with_factors("mine", many, tmp_path) == ("mine", many)
    with pytest.raises(ValueError, match="measured two steps alone"):
        experiment.run_with_factors("mine", few, tmp_path)
    (tmp_path / "a-ladder.json").write_text(json.dumps(many))
    whose, found = experiment.run_with_factors("mine", few, tmp_path)
    assert whose.startswith("a recorded run: ") and found == many
    whose, found = experiment.run_with_factors("mine", few, Path(__file__).parents[1] / "results")
    product, together = experiment.product_of_factors(experiment.steps(experiment.records_of(found), found["baseline"]))
    assert product != together, "the notebook falls back on the repository's own record"


def test_the_order_without_guesses_that_lose_holds_no_guesses():
    """Where the draft loses, a later rung that still guesses is not "the path without it": its twin is."""
    kernel = record("kernel", scale=0.2)
    guessing = record("kernel-speculation", scale=0.3, tokens_per_pass=2.0)
    last = record("kernel-everything", scale=0.15, tokens_per_pass=2.0, kept_tokens=100)
    twin = record("kernel-prefix", scale=0.16, kept_tokens=100, on_path=False)
    path = [record(), kernel, guessing, last]
    names = [r.name for r in experiment.best_order([*path, twin], "kv-cache")]
    assert names == ["kv-cache", "kernel", "kernel-prefix"]
    assert [r.name for r in experiment.best_order(path, "kv-cache")] == ["kv-cache", "kernel", "kernel-everything"]
    changed = [step.changed for step in experiment.steps(path, "kv-cache")]
    assert changed[1:] == ["tokens a pass 1 -> 2", "prompt tokens read beforehand 0 -> 100"]
    other = record("kernel", weights="int4", cache="float16", activations="int16")
    (step,) = experiment.steps([record(weights="float32", cache="float32"), other], "kv-cache")
    assert step.changed == "weights float32 -> int4, cache float32 -> float16, activations unrounded -> int16"


def test_a_way_without_its_baseline_is_no_way():
    """Ratios against a rung that failed would be ratios against another one."""
    run = a_run(record(status="failed", samples_ms={}), record("sdpa"))
    assert contributions.way(experiment.records_of(run), "kv-cache") == [] == tables.step_rows(run)


def test_every_step_alone_is_a_rung():
    """A misspelt name would silently show no overlap."""
    names = [entry.name for entry in rungs.RUNGS]
    assert all(entry.alone in ("", *names) and entry.over in names for entry in rungs.RUNGS)
    assert sum(bool(entry.alone) for entry in rungs.RUNGS) >= 4


def test_the_plan_alternates_the_way_and_measures_the_rest_once():
    """A rung that always runs last would always meet the warmest machine."""
    plan = [(i, entry.name) for i, entry in runner.plan(rungs.RUNGS, 2)]
    assert plan[0] == (0, "kv-cache") and len(set(plan)) == len(plan)
    counts = {name: sum(n == name for _, n in plan) for _, name in plan}
    assert all(counts[e.name] == (2 if e.on_path or e.name == "kv-cache" else 1) for e in rungs.RUNGS)
    ways = [[n for i, n in plan if i == turn and counts[n] == 2 and n != "kv-cache"] for turn in (0, 1)]
    assert ways[0] == ways[1][::-1]
    assert [i for i, _ in runner.plan(rungs.RUNGS, 1)] == [0] * len(rungs.RUNGS)


@pytest.fixture
def instant(monkeypatch):
    """Processes that measure nothing and leave a record at once; `stop_at` names the rung at which Ctrl-C comes."""

    class Instant:
        started: ClassVar[list[str]] = []
        stop_at: str | None = None

        def __init__(self, module: str, arguments: list[str]) -> None:
            self.options = json.loads(arguments[0])

        def read(self, limit_s: float) -> dict:
            name = self.options["name"]
            Instant.started.append(name)
            if name == Instant.stop_at:
                Instant.stop_at = None
                raise KeyboardInterrupt
            return {"record": asdict(record(name, weights="float32", cache="float32"))}

        def __enter__(self):
            return self

        def __exit__(self, *_: object) -> None:
            pass

    monkeypatch.setattr(runner, "Worker", Instant)
    monkeypatch.setattr(resume, "_code", lambda: "the same")  # somebody may be at work on the library meanwhile
    return Instant


def test_an_interrupted_run_continues_and_measures_nothing_twice(tiny_directory, tmp_path, quick_rates, instant):
    """Ctrl-C in the middle: what is finished stays; a changed option or model is another run, and says so."""
    options = dict(names=["sdpa"], profile=tiny_directory, rounds=2, warmup=0, repeats=1)
    folder, instant.stop_at = tmp_path / "a", "sdpa"
    with pytest.raises(KeyboardInterrupt):
        experiment.run_ladder(folder, **options)
    assert resume.finished_parts(folder) == 1 and not (folder / "ladder.json").exists()
    assert resume.unfinished(tmp_path) == folder
    with pytest.raises(ValueError, match=r"holds another run \(options.repeats: 1 was, 2 is\)"):
        experiment.run_ladder(folder, **options | {"repeats": 2})
    instant.started.clear()
    run = experiment.run_ladder(folder, **options)
    assert sorted(instant.started) == ["kv-cache", "sdpa", "sdpa"], "the finished part is not measured again"
    assert [len(entry["samples_ms"]["wall"]) for entry in run["rungs"]] == [6, 6]  # two processes of three
    assert resume.unfinished(tmp_path) == folder, "its report is yet to be written"
    report.write(run, folder)
    assert resume.unfinished(tmp_path) is None


def test_what_makes_another_run():
    """Versions, machine, weights and code: each must be seen, each by a name that a reader understands."""
    old = {"machine": {"torch": "1", "cpu": "x"}, "weights": [1], "code": "a", "options": {"rounds": 2}, "profile": "p"}
    new = {"machine": {"torch": "2", "cpu": "x"}, "weights": [2], "code": "b", "options": {"rounds": 2}, "profile": "p"}
    assert resume.differences(old, old) == []
    assert resume.differences(old, new) == ["the library's code", "machine.torch: '1' was, '2' is", "the model's files"]


@pytest.mark.long
def test_ctrl_c_on_the_command_line_loses_nothing(tiny_directory, tmp_path, quick_rates, instant):
    """The words say where the finished parts are and how to go on, and the next call goes on there."""
    instant.stop_at = "sdpa"
    arguments = ["run", "--rungs", "sdpa", "--model", tiny_directory, "--out", str(tmp_path), "--rounds", "1"]
    result = CliRunner().invoke(cli.app, arguments)
    assert result.exit_code == 130 and "interrupted: 1 finished processes are kept" in " ".join(result.stderr.split())
    other = CliRunner().invoke(cli.app, [*arguments, "--warmup", "-1"])
    assert other.exit_code == 1 and "warmup=-1" in other.stderr
    result = CliRunner().invoke(cli.app, arguments)
    assert result.exit_code == 0, result.output
    assert "continuing" in result.stderr and "1 processes are done" in " ".join(result.stderr.split())
    assert len(list(tmp_path.glob("*/ladder.json"))) == 1
    assert "What each step gave" in result.output
    instant.stop_at = "sdpa"
    CliRunner().invoke(cli.app, [*arguments, "--fresh"])
    result = CliRunner().invoke(cli.app, [*arguments, "--repeats", "2"])
    assert result.exit_code == 0 and "options.repeats: 5 was, 2 is" in " ".join(result.stderr.split())


def test_models_that_the_ladder_cannot_serve_are_told_at_once(tiny_directory, tmp_path):
    """Another architecture would fail in every rung, or worse, be counted as if it were a Llama."""
    gpt2 = tmp_path / "gpt2"
    GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=1, n_embd=8, vocab_size=10)).save_pretrained(gpt2)
    with pytest.raises(ValueError, match="unknown architecture 'gpt2'; the roofline can count llama, qwen2, mistral"):
        runner.check_model(str(gpt2))
    short = tmp_path / "short"
    config = LlamaConfig(vocab_size=49152, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
                         num_attention_heads=1, max_position_embeddings=300)  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(short)
    with pytest.raises(ValueError, match="256 tokens and 50 new ones do not fit the 300 positions"):
        runner.check_model(str(short))
    config.max_position_embeddings = 512
    config.save_pretrained(short)
    with pytest.raises(ValueError, match=r"the tokenizer of .*short cannot make the standard request"):
        runner.check_model(str(short))
    (short / "model.safetensors").rename(short / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"holds no \.safetensors file"):
        runner.check_model(str(short))
    with pytest.raises(ValueError, match="256 tokens and 1000 new ones do not fit"):
        runner.check_model(tiny_directory, 1000)
    assert runner.check_model(tiny_directory, 700) == tiny_directory


def test_a_long_answer_gets_room_and_a_hopeless_one_is_told(tiny_directory, tmp_path, monkeypatch):
    """A static cache of 512 slots must not end a longer answer; a rung that takes minutes must not hold up the rest."""
    options = dict(warmup=2, repeats=1, budget_s=1.0, folder=tmp_path, with_quality=False, new_tokens=400)
    found = worker.measure_rung("static-cache", tiny_directory, **options)
    assert found.status == "measured" and len(found.ids) == 400
    monkeypatch.setattr(worker, "LONGEST_ANSWER_S", 1e-3)
    refused = worker.measure_rung("no-cache", tiny_directory, **options)
    assert refused.status == "unavailable" and "an answer of 400 tokens would take about" in refused.reason
    monkeypatch.setattr(worker, "LONGEST_PREFILL_S", 1e-6)
    emulated = worker.measure_rung("half", tiny_directory, **options)
    assert emulated.status == "unavailable" and "no hardware for its products" in emulated.reason
    baseline = worker.measure_rung("kv-cache", tiny_directory, **options | {"new_tokens": 4})
    assert baseline.status == "measured", "without it there is no ratio"


def test_the_newest_recorded_run_with_the_wanted_rungs(tmp_path):
    """A notebook must not quote an older run, nor one that lacks what it shows."""
    for name, date, extra in (("b-ladder", "2026-01-01", "int4"), ("a-ladder", "2026-01-02", "sdpa")):
        run = a_run(record(), record(extra)) | {"date": date}
        (tmp_path / f"{name}.json").write_text(json.dumps(run))
    (tmp_path / "x-peers.json").write_text("{}")
    assert experiment.newest_run(tmp_path)[0].name == "a-ladder.json"
    path, run = experiment.newest_run(tmp_path, ("int4",))
    assert path.name == "b-ladder.json" and run["date"] == "2026-01-01"
    with pytest.raises(ValueError, match="no recorded ladder with the rungs warp"):
        experiment.newest_run(tmp_path, ("warp",))


def test_the_run_that_says_most_about_this_machine(tmp_path):
    """A figure of a stranger's machine shown as yours, or your own run passed over."""
    here = hardware.machine_facts()
    machine = a_run(record())["machine"]
    kinds = {"kin": machine | {k: here[k] for k in ("gpu", "cpu_capability")}, "other": machine | {"gpu": "a B900"}}
    results, own = tmp_path / "results", tmp_path / "run"
    results.mkdir()
    with pytest.raises(ValueError, match="make run"):
        experiment.nearest_run(results, own, "smollm2-135m")

    def store(path, name, date, **more):
        path.parent.mkdir(parents=True, exist_ok=True)
        run = a_run(record()) | {"date": date, "machine": kinds[name], "profile": "smollm2-135m"} | more
        path.write_text(json.dumps(run))

    store(results / "a-ladder.json", "other", "2026-03-01")
    assert experiment.nearest_run(results, own, "smollm2-135m")[0] == "a recorded run: a B900, 2026-03-01"
    store(results / "b-ladder.json", "kin", "2026-01-01")
    assert "this kind of machine" in experiment.nearest_run(results, own, "smollm2-135m")[0]
    store(own / "x" / "ladder.json", "kin", "2026-01-01")
    store(own / "y" / "ladder.json", "kin", "2026-02-01", profile="llama-7b-shape")
    assert experiment.nearest_run(results, own, "smollm2-135m")[0].startswith("your own run")


def test_a_kept_prefix_is_not_predicted_as_if_it_were_read(tiny_directory, quick_rates):
    """A prefill of 32 tokens held to the time of 256 would reach many times the limit."""
    whole = record("fast", weights="float32", cache="float32")
    kept = record("prefix", weights="float32", cache="float32", kept_tokens=224)
    prediction.add_predictions([whole, kept], tiny_directory, hardware.ceilings())
    assert kept.predicted["prefill"] < whole.predicted["prefill"]
    assert kept.predicted["decode"] == whole.predicted["decode"]


def test_a_speculative_prediction_holds_checking_draft_and_launches(tiny_directory, quick_rates):
    """Guards against the old one, which counted a check of four tokens as one token and the draft as nothing, and so
    promised 50 ms where the clock said 278."""
    plain = record("int4", weights="float32", cache="float32", step_bytes=10**9, rates={"pass": 1e12})
    facts = dict(weights="float32", cache="float32", step_bytes=10**9, rates={"pass": 1e12}, tokens_per_pass=2.0)
    checked = record("a", **facts, rows_per_pass=4.0)
    drafted = record("b", **facts, rows_per_pass=4.0, draft_bytes=10**8, draft_prefill_ms=7.0, launch_ms=2.0)
    slow = record("c", **facts | dict(rates={"pass": 1e6}), rows_per_pass=4.0)
    prediction.add_predictions([plain, checked, drafted, slow], tiny_directory, hardware.ceilings())
    half = plain.predicted["decode"] / 2
    assert plain.predicted["decode"] == pytest.approx(49 * 50, rel=0.01), "10^9 bytes at 20 GB/s, 49 times"
    assert half < checked.predicted["decode"] < 1.1 * half, "four rows read the weights once"
    more = drafted.predicted["decode"] - checked.predicted["decode"]
    assert more == pytest.approx(24.5 * (3 * 5.0 + 2.0) + 7.0), "three guesses and the launches a cycle; one prompt"
    assert slow.predicted["decode"] > 10 * checked.predicted["decode"], "checking is arithmetic, too"
    assert drafted.share_of_limit["decode"] < drafted.predicted["decode"] / drafted.median_ms("decode")


def test_a_prediction_that_misses_is_called_unexplained():
    """Guards against a table in which a prediction five times too low looks like one that holds."""
    rows = tables.rows(a_run(record(predicted={"prefill": 37.0, "decode": 60.0})))
    found = dict(zip(tables.HEADERS, rows[0], strict=True))
    assert found["predicted prefill"] == "37" and found["predicted decode"] == "60 (unexplained)"


def test_a_model_that_the_kernel_does_not_take_is_no_failure(tiny_directory, tmp_path):
    """Guards against a ladder that ends with an error for a head size that the other rungs serve."""
    options = dict(warmup=0, repeats=1, budget_s=1.0, folder=tmp_path, with_quality=False)
    found = worker.measure_rung("kernel", tiny_directory, **options)
    assert found.status == "unavailable" and ("head_dim divisible by 16" in found.reason or "kernel" in found.reason)


@pytest.mark.long
def test_a_live_run_is_named_and_only_a_dead_one_continued(tiny_directory, tmp_path, quick_rates, instant):
    """Kind 44: a second run "continued" the first, which was still measuring, and both wrote the same files."""
    arguments = ["run", "--rungs", "sdpa", "--model", tiny_directory, "--out", str(tmp_path), "--rounds", "1"]
    with resume.alone(tmp_path):
        for more in ([], ["--fresh"]):
            result = CliRunner().invoke(cli.app, [*arguments, *more])
            assert result.exit_code == 1 and not instant.started
            said = " ".join(result.stderr.split())
            assert f"process {os.getpid()} has measured in" in said and "choose another folder" in said
    assert CliRunner().invoke(cli.app, arguments).exit_code == 0
    folder = next(tmp_path.glob("*/ladder.json")).parent
    with resume.alone(folder), pytest.raises(ValueError, match=f"process {os.getpid()}"):
        experiment.run_ladder(folder, names=["sdpa"], profile=tiny_directory, rounds=1)


def test_a_dead_run_holds_no_lock(tmp_path):
    """Kind 44: after kill -9 the next start goes on; a lock that outlives its holder would refuse it for ever."""
    code = "import sys, time\nfrom pathlib import Path\nfrom every_millisecond.ladder.resume import alone\n"
    code += "with alone(Path(sys.argv[1])):\n    print('live', flush=True)\n    time.sleep(600)\n"
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE) as holder:
        assert holder.stdout.readline().strip() == b"live"
        with pytest.raises(ValueError, match=f"process {holder.pid} has measured"), resume.alone(tmp_path):
            pass
        holder.kill()
    with resume.alone(tmp_path):
        assert json.loads((tmp_path / ".live.json").read_text())["process"] == os.getpid()
    assert not (tmp_path / ".live.json").exists()


class SlowMachine:
    """A clock that only the stepper moves: `step_s` for each token and `token_s` for each that a prefill reads."""

    def __init__(self, monkeypatch, step_s: float, token_s: float) -> None:
        self.now, self.step_s, self.token_s = 1.0, step_s, token_s
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(clock.HostClock, "mark", staticmethod(lambda: round(self.now * 1e9)))

    def rung(self, monkeypatch, name: str, model) -> None:
        machine = self

        class Slow(TransformersStepper):
            step_bytes = 538_000_000

            def prefill(self, ids):
                machine.now += machine.token_s * ids.shape[1]
                return super().prefill(ids)

            def step(self, ids):
                machine.now += machine.step_s
                return super().step(ids)

        slow = replace(rungs.rung(name), build=lambda profile: Slow(model))
        monkeypatch.setattr(worker, "rung", lambda wanted: slow)


def test_limits_grow_with_the_machine_that_showed_itself_slow(tiny_directory, tmp_path, monkeypatch):
    """Kind 45, a machine ten times slower, by a clock of its own: the rung without a cache, which takes 210 s there, is
    measured; the same seconds on a machine of the usual speed are a hopeless rung."""
    model = models.load_target(tiny_directory, dtype=torch.float32)
    options = dict(warmup=2, repeats=1, budget_s=1.0, folder=tmp_path, with_quality=False)
    machine = SlowMachine(monkeypatch, step_s=0.5, token_s=0.02)
    machine.rung(monkeypatch, "kv-cache", model)
    baseline = worker.measure_rung("kv-cache", tiny_directory, **options)
    assert baseline.measured and baseline.slowness == pytest.approx(10, rel=0.01)
    machine.step_s = 4.2
    machine.rung(monkeypatch, "no-cache", model)
    late = worker.measure_rung("no-cache", tiny_directory, **options)
    assert late.status == "unavailable" and "an answer of 50 tokens would take about" in late.reason
    signs = []
    found = worker.measure_rung(
        "no-cache", tiny_directory, **options, slowness=baseline.slowness, say=lambda slowness: signs.append(slowness)
    )
    assert found.measured and found.median_ms("wall") == pytest.approx(256 * 20 + 49 * 4200)
    assert len(signs) == 1 + 2 + 1, "loaded, two warm-up answers, one measured: the runner waits from sign to sign"


def test_the_runner_waits_as_long_as_the_machine_is_slow(monkeypatch, tmp_path):
    """Kind 45: a limit of fixed seconds ends a slow machine's rungs; one that never ends holds up the ladder."""
    limits = []

    class Slow:
        answers: ClassVar[list] = [{"slowness": 1.0}, {"slowness": 7.5}, {"record": asdict(record())}]

        def __init__(self, module: str, arguments: list[str]) -> None:
            self.left = list(self.answers)

        def read(self, limit_s: float) -> dict:
            limits.append(limit_s)
            if not self.left:
                raise runner.WorkerFailed("no answer within 600 s")
            return self.left.pop(0)

        def __enter__(self):
            return self

        def __exit__(self, *_: object) -> None:
            pass

    monkeypatch.setattr(runner, "Worker", Slow)
    options = dict(quality=False, warmup=0, repeats=1, budget_s=1.0, new_tokens=2)
    found = runner._run_one(rungs.rung("kv-cache"), "p", 0, tmp_path, slowness=3.0, **options)
    assert found.measured and limits == [runner.LOAD_LIMIT_S, 3 * runner.STEP_LIMIT_S, 7.5 * runner.STEP_LIMIT_S]
    Slow.answers = [{"slowness": 1.0}]
    failed = runner._run_one(rungs.rung("sdpa"), "p", 0, tmp_path, slowness=1.0, **options)
    assert failed.not_finished == "not finished here: no answer within 600 s"
    assert [path.name for path in tmp_path.glob("*.json")] == ["kv-cache.0.json"], "a failure is tried again"


@pytest.mark.long
def test_sigterm_ends_the_run_and_its_workers(tiny_directory, tmp_path):
    """Kind 44: the workers of an ended run went on measuring, and slowed the next one."""
    command = [sys.executable, "-m", "every_millisecond.cli", "run", "--rungs", "kv-cache", "--model", tiny_directory]
    with subprocess.Popen([*command, "--out", str(tmp_path)], stderr=subprocess.PIPE, stdout=subprocess.PIPE) as run:
        children = Path(f"/proc/{run.pid}/task/{run.pid}/children")
        if not children.exists():
            run.kill()
            pytest.skip("needs Linux's list of children")
        while not (workers := children.read_text().split()) and run.poll() is None:
            time.sleep(0.05)
        assert workers, run.stderr.read().decode()
        run.send_signal(signal.SIGTERM)
        run.communicate(timeout=60)
    assert run.returncode == 128 + signal.SIGTERM
    deadline = time.monotonic() + 60  # killed; the system may take a moment to take them off its list
    while left := [pid for pid in workers if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


def test_control_characters_leave_the_page_well_formed(tmp_path):
    """Kind 46: an error with a terminal's colours, a NUL or half a surrogate pair, and a model that wrote some."""
    reason = "boom \x00\x1b[31m \ud800 <&>"
    page = report.write(a_run(record(text="a\x08b\udfff"), record("half", status="failed", reason=reason)), tmp_path)
    text = page.read_text(encoding="utf-8")
    assert "not finished here: boom \\x00\\x1b[31m \\ud800 &lt;&amp;&gt;" in text and r"a\x08b\udfff" in text
    ElementTree.fromstring("<p>" + re.sub(r"<[^>]*>|&\w+;", "", text) + "</p>")


def test_another_length_gives_its_own_figures(quick_rates, tiny_directory):
    """Kind 47: 49 steps and 50 tokens stood in formulas that runs of other lengths pass through."""
    from every_millisecond import claims

    run = a_run(record(new_tokens=11), record("compiled", new_tokens=11, first_ms=500.0), record("sdpa", new_tokens=11))
    found = claims.from_ladder(run)
    assert found.values["B8"]["step_ms"] == pytest.approx(98.0 / 10)
    assert record(new_tokens=11).tokens_per_second == pytest.approx(10 / 0.098)
    rows = {row.id: row for row in claims.ledger([found])}
    assert found.values["A2"]["new_tokens"] == found.values["B5"]["new_tokens"] == 11
    assert "256 new tokens; here it is 11" in rows["A2"].recorded[0]
    assert "with 11 tokens out" in rows["B5"].recorded[0]


def test_brackets_are_no_markup(tiny_directory, tmp_path, quick_rates, instant):
    """Kind 37: "[/b]" in a path is an error of rich's, and "[red]" vanishes from what is printed."""
    out = tmp_path / "a [red] folder [/b]"
    result = CliRunner().invoke(cli.app, ["run", "--rungs", "sdpa", "--model", tiny_directory, "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert "a [red] folder [/b]" in " ".join(result.output.split())
