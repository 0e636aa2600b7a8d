"""`gpu-check` without a GPU: it says so; it is rehearsed on a pretended one; its smallest case claims nothing."""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
from types import SimpleNamespace

import nbformat
import pytest
import torch

from every_millisecond import gpu_check, gpu_memory, gpu_notebook, ladder
from every_millisecond.laboratory.kernel_benchmark import CASES, SMALLEST, Case, contestants, run_case
from llm_latency.attention.dispatch import cannot

NO_TRITON = cannot("triton", torch.zeros(1, 1, 1, 16))


@pytest.mark.skipif(torch.cuda.is_available(), reason="with CUDA the check would run in full")
def test_without_cuda_it_says_so_and_returns_2(tmp_path, capsys):
    """Guards against a traceback, a success, or an empty report where there was nothing to check."""
    assert gpu_check.main(tmp_path) == 2
    assert "no CUDA device" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(NO_TRITON is not None, reason=str(NO_TRITON))
def test_the_smallest_case_runs_through_the_interpreter_and_claims_nothing():
    """Guards against a benchmark that nobody ever ran, and an interpreter's figure that looks like a result."""
    said = []
    rows = gpu_check.benchmark_kernels("cpu", (SMALLEST,), rounds=2, say=said.append)
    row = json.loads(json.dumps(rows))[0]
    assert {"triton", "flash"} < set(row["median_ms"]) and row["best_sdpa"].startswith("sdpa:")
    assert len(row["samples_ms"]["triton"]) == 2 and row["interpreted"] and len(said) == 1
    assert gpu_check.verdicts({"kernels": rows}) == ["prefill 40, 2/1 heads of 16: interpreted on the CPU, no claim"]


def test_all_contestants_agree():
    """Guards against timing something else than the same attention."""
    outputs = {}
    for name, run in contestants(SMALLEST, torch.device("cpu")).items():
        outputs[name] = run().transpose(1, 2) if name.startswith("sdpa:") else run()
    first = outputs.pop("flash")
    assert outputs and all(torch.allclose(out, first, atol=1e-5) for out in outputs.values())


def test_work_and_bytes_by_hand():
    """Guards against a rate off by two: causal prefill does half the products, and keys and values both are read."""
    assert Case("decode", 1000, heads=32, kv_heads=8, head_dim=128).cache_bytes == 2 * 1000 * 8 * 128 * 2
    assert Case("decode", 1000, heads=32, kv_heads=8, head_dim=128).flops == 4 * 32 * 1000 * 128
    assert Case("prefill", 2, heads=1, kv_heads=1, head_dim=1).flops == 4 * 3
    assert any(case.kind == "decode" and case.seq == 32_768 for case in CASES)


@pytest.mark.parametrize("change", [dict(kind="train"), dict(seq=0), dict(dtype="int8"), dict(kv_heads=-1)])
def test_cases_that_make_no_sense(change):
    """Guards against an empty benchmark."""
    with pytest.raises(ValueError, match=str(next(iter(change.values())))):
        Case(**{"kind": "prefill", "seq": 10} | change)


def row(kind: str, **found) -> dict:
    case = dict(kind=kind, seq=32_768, heads=32, kv_heads=32, head_dim=128)
    return {"case": case, "interpreted": False, "median_ms": {"triton": 1.0}, **found}


def test_verdicts_and_failures_are_said():
    """Guards against a target that is missed, or a case that crashed, without a word."""
    lines = gpu_check.verdicts(
        {
            "ceilings": {"copy_gbps": 1000.0},
            "kernels": [
                row("prefill", triton_speed_over_best_sdpa=0.79, best_sdpa="sdpa:cudnn", tflops={"triton": 400.0}),
                row("decode", cache_gbps={"triton": 801.0}),
                {"case": row("decode")["case"], "error": "OutOfMemoryError: 3 GB"},
                row("decode") | {"median_ms": {"sdpa:math": 1.0}},
            ],
        }
    )
    assert "0.79 of the speed of sdpa:cudnn" in lines[0] and lines[0].endswith("(target 0.8: missed)")
    assert "801 GB/s, 0.80" in lines[1] and lines[1].endswith("met)")
    assert "failed, OutOfMemoryError: 3 GB" in lines[2] and "cannot run here" in lines[3]


def test_a_failing_case_does_not_end_the_others(monkeypatch):
    """Guards against losing half an hour of measurements to one case that does not fit."""

    def run(case, **options):
        if case.seq == 1:
            raise torch.OutOfMemoryError("too large")
        return {"case": {}, "median_ms": {}}

    monkeypatch.setattr(gpu_check, "run_case", run)
    rows = gpu_check.benchmark_kernels("cpu", (Case("decode", 1), Case("decode", 2)), say=lambda line: None)
    assert "too large" in rows[0]["error"] and "error" not in rows[1]


def test_reports_are_dated_and_never_overwritten():
    """Guards against a second run of a day that replaces the first, and names that results/README.md does not have."""
    first, second = gpu_check.report_paths(gpu_check.ROOT / "results", "2030-01-02", "NVIDIA H100 80GB HBM3")[:2]
    assert first.name == "2030-01-02-nvidia-h100-80gb-hbm3-gpu.json"
    assert second.name == "2030-01-02-nvidia-h100-80gb-hbm3-2-gpu.json"
    said = (gpu_check.ROOT / "results" / "README.md").read_text(encoding="utf-8")
    for name in ("`<date>-<gpu>-gpu.json`", "`<date>-<gpu>-ladder.json`", "`<date>-<gpu>/summary.html`"):
        assert name in said


def test_the_most_valuable_notebooks_come_first_and_none_is_missing():
    """Guards against a notebook that no run on a GPU ever plays."""
    assert sorted(gpu_check.NOTEBOOKS) == sorted(gpu_memory.NOTEBOOKS) and gpu_check.NOTEBOOKS[0] == "06"


@pytest.mark.parametrize("minutes", [0, -1.0, float("nan")])
def test_no_time_is_refused(minutes, tmp_path):
    """Guards against a run that begins and ends without a word."""
    with pytest.raises(ValueError, match=f"minutes={minutes}"):
        gpu_check.main(tmp_path, minutes=minutes)


NOTEBOOK = """
import torch
x = torch.ones(3, device="cuda")
print("on", x.device, x.sum().item())
"""
CHILD = """
import contextlib
from pretend_gpu import pretend
stack = contextlib.ExitStack()
stack.enter_context(pretend("A100-40GB"))
"""
CUDA_TEST = """
import pytest, torch
@pytest.mark.cuda
def test_here():
    assert torch.ones(2, device="cuda").is_cuda
"""


@pytest.fixture
def course(tmp_path, monkeypatch, quick_ceilings):
    """A checkout small enough for half a minute: a CUDA test, a notebook that needs a GPU, a kernel case, two rungs.

    Processes that are started find themselves on the pretended device, too.
    """
    child = tmp_path / "child"
    child.mkdir()
    (child / "sitecustomize.py").write_text(CHILD)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(child), str(gpu_check.ROOT / "tests"))))
    monkeypatch.setenv("LLM_LATENCY_PROFILE", "qwen2.5-7b")
    root = tmp_path / "course"
    (root / "tests").mkdir(parents=True)
    (root / "tests" / "test_tiny.py").write_text(CUDA_TEST)
    (root / "notebooks").mkdir()
    cells = [nbformat.v4.new_code_cell(source) for source in (NOTEBOOK, "x + torch.ones(3)", "print('goes on')")]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), root / "notebooks" / "06_flash_attention.ipynb")
    monkeypatch.setattr(gpu_check, "NOTEBOOKS", ("06",))
    monkeypatch.setattr(gpu_check, "CASES", (SMALLEST,))

    def two_rungs(folder, *, profile, rounds, progress) -> dict:
        for done, title in enumerate(("KV cache", "+ SDPA")):
            progress(title, done, 2)
        return {"profile": profile, "rungs": [{"name": "kv-cache", "status": "measured"}]}

    monkeypatch.setattr(ladder, "run_ladder", two_rungs)
    return root


class FixedDay:
    """Stands for `gpu_check`'s module datetime, so that no test passes midnight but where it means to."""

    timedelta = datetime.timedelta

    def __init__(self, monkeypatch):
        self.today_is = datetime.date(2029, 12, 31)
        self.date = SimpleNamespace(today=lambda: self.today_is)
        monkeypatch.setattr(gpu_check, "datetime", self)


@pytest.mark.cuda
@pytest.mark.pretend_card("A100-40GB")
@pytest.mark.skipif(torch.cuda.is_available(), reason="the real one is here: make gpu")
def test_rehearsal(course, tmp_path, monkeypatch, capsys):
    """Guards against a first run on a paid card that fails on a name: every part, every file, on a pretended card."""
    out, day = tmp_path / "results", FixedDay(monkeypatch)
    assert gpu_check.main(out, root=course) == 1, "a cell raised"
    (path,) = out.glob("*-nvidia-a100-sxm4-40gb-gpu.json")
    folder = path.with_name(path.name.removesuffix("-gpu.json"))
    report = json.loads(path.read_text())
    assert {name: part["status"] for name, part in report["parts"].items()} == {
        "ceilings": "done", "tests": "done", "kernels": "done", "ladder": "done", "notebook 06": "failed",
    }  # fmt: skip
    assert report["tests"]["tests"] == 1 and report["tests"]["passed"] and report["ceilings"]["copy_gbps"] == 20.0
    assert "of the speed of sdpa" in report["verdicts"][0] and report["kind"] == "gpu-check"
    assert json.loads(folder.with_name(f"{folder.name}-ladder.json").read_text())["profile"] == "qwen2.5-7b"
    page = (folder / "06_flash_attention.html").read_text()
    assert "on cuda:0 3.0" in page and "goes on" in page and "same device" in page
    assert report["notebooks"]["06"]["profile"] == "qwen2.5-7b", "06 on the 7B profile fits into 40 GB"
    summary = (folder / "summary.html").read_text()
    assert "NVIDIA A100-SXM4-40GB" in summary and "06_flash_attention.html" in summary and "notebook 06" in summary
    # The same command again, past midnight: only what failed; once nothing is left to do, a report of its own.
    day.today_is = datetime.date(2030, 1, 1)
    assert "continues" not in capsys.readouterr().out
    monkeypatch.setattr(gpu_notebook, "execute", lambda *_, **__: gpu_notebook.Played(cells=3))
    assert gpu_check.main(out, root=course) == 0
    said = capsys.readouterr().out
    assert "continues" in said and "notebook 06 done" in said and "ladder ..." not in said
    assert list(out.glob("*-gpu.json")) == [path]
    for today, name in ((datetime.date(2029, 12, 31), "2029-12-31-{}-2"), (datetime.date(2030, 1, 1), "2030-01-01-{}")):
        day.today_is = today
        another, fresh = gpu_check.open_report(out, "qwen2.5-7b")
        assert another.name == name.format("nvidia-a100-sxm4-40gb") + "-gpu.json" and fresh["parts"] == {}
        assert fresh["date"] == str(today)


@pytest.mark.cuda
@pytest.mark.pretend_card("A100-40GB")
@pytest.mark.skipif(torch.cuda.is_available(), reason="the real one is here: make gpu")
def test_what_the_time_does_not_reach_waits(course, tmp_path, monkeypatch):
    """Guards against a run that overdraws a rented quarter of an hour, or forgets what it has not reached; and against
    a part that fails and takes the others with it."""
    assert gpu_check.main(tmp_path / "out", minutes=1e-9, root=course) == 0
    (path,) = (tmp_path / "out").glob("*-gpu.json")
    parts = json.loads(path.read_text())["parts"]
    assert {part["status"] for part in parts.values()} == {"waits"} and len(parts) == 5

    def fails(*arguments, **options):
        raise RuntimeError("no ceilings")

    found = gpu_notebook.Played(cells=3, cells_left=2)
    monkeypatch.setattr(gpu_check.hardware, "ceilings", fails)
    monkeypatch.setattr(
        gpu_check, "run_cuda_tests", lambda *_: {"tests": 9, "skipped": 9, "failed": [], "passed": False}
    )
    monkeypatch.setattr(gpu_check, "run_case", fails)
    monkeypatch.setattr(gpu_notebook, "execute", lambda *_, **__: found)
    assert gpu_check.main(tmp_path / "out", root=course) == 1
    parts = json.loads(path.read_text())["parts"]
    assert parts["ceilings"] | {"seconds": 0} == {"status": "failed", "said": "RuntimeError: no ceilings", "seconds": 0}
    assert parts["tests"]["said"] == "9 of 9 skipped" and parts["kernels"]["status"] == "failed"
    assert parts["ladder"]["status"] == "done" and parts["notebook 06"]["status"] == "waits"


def test_a_notebook_stops_when_the_time_is_spent(tmp_path):
    """Guards against a cell that runs on when the card is to be given back; what was reached stands in the page."""
    cells = [nbformat.v4.new_code_cell(source) for source in ("print('first')", "import time; time.sleep(600)", "1")]
    source, page = tmp_path / "long.ipynb", tmp_path / "long.html"
    nbformat.write(nbformat.v4.new_notebook(cells=cells), source)
    stored = source.read_text()
    found = gpu_notebook.execute(source, page, "smollm2-135m", seconds=4)
    assert found.cells_left in (2, 3) and found.seconds < 60
    assert source.read_text() == stored and "600" in page.read_text()


@pytest.mark.cuda
@pytest.mark.pretend_card("T4")
@pytest.mark.skipif(torch.cuda.is_available(), reason="asks a pretended card")
def test_the_profile_is_one_that_is_here(monkeypatch):
    """Guards against paid minutes spent on a download, and a 7B model on a T4."""
    from huggingface_hub import try_to_load_from_cache

    assert callable(try_to_load_from_cache)
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda name, file, revision: None)
    monkeypatch.delenv("LLM_LATENCY_PROFILE", raising=False)
    assert gpu_check.card_profile() == "smollm2-135m"
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda name, file, revision: "here")
    assert gpu_check.card_profile() == "smollm2-1.7b"
    monkeypatch.setenv("LLM_LATENCY_PROFILE", "llama-7b-shape")
    assert gpu_check.card_profile() == "llama-7b-shape"


def test_kernels_go_on_where_they_stopped(monkeypatch):
    """Guards against a second call that measures the first one's cases again, and a failed one that stays failed."""
    monkeypatch.setattr(gpu_check, "run_case", lambda case, **_: {"case": dataclasses.asdict(case), "median_ms": {}})
    cases = (Case("decode", 1), Case("decode", 2), Case("decode", 3))
    rows = [{"case": dataclasses.asdict(cases[0]), "median_ms": {"kept": 1.0}}]
    rows.append({"case": dataclasses.asdict(cases[1]), "error": "too large"})
    gpu_check.benchmark_kernels("cpu", cases, rows=rows, say=lambda line: None)
    assert [row["case"]["seq"] for row in rows] == [1, 2, 3] and rows[0]["median_ms"] == {"kept": 1.0}
    assert not any("error" in row for row in rows)


@pytest.mark.long
def test_an_all_skipped_run_does_not_pass(tmp_path):
    """Guards against a check that ran no test and calls it a success (pytest's code is 0 when all are skipped)."""
    with pytest.raises(RuntimeError, match="run gpu-check from a checkout"):
        gpu_check.run_cuda_tests(tmp_path)
    (tmp_path / "tests").mkdir()
    skipped = CUDA_TEST.replace("assert", "pytest.skip('no')\n    assert")
    (tmp_path / "tests" / "test_tiny.py").write_text(skipped)
    counts = gpu_check.run_cuda_tests(tmp_path, seconds=300)
    assert counts["tests"] == counts["skipped"] == 1 and counts["exit_code"] == 0 and not counts["passed"]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_the_benchmark_runs_on_this_gpu(kind):
    """Guards against a graph that does not record, and a rate above what the GPU can do."""
    found = run_case(Case(kind, 1024, heads=8, kv_heads=8), device="cuda", rounds=3)
    assert found["triton_speed_over_best_sdpa"] > 0.05
    assert "triton" not in found["timed_with_launch"]
