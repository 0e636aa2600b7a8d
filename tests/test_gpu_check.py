"""`gpu-check` without a GPU: it says so; its benchmark runs its smallest case and claims nothing."""

from __future__ import annotations

import json

import pytest
import torch

from every_millisecond import gpu_check
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


def test_reports_are_dated_and_never_overwritten(tmp_path):
    """Guards against a second run of a day that replaces the first."""
    report = {"date": "2030-01-02", "machine": {"gpu": "NVIDIA H100 80GB HBM3"}}
    first = gpu_check.report_path(tmp_path, report)
    assert first.name == "gpu-check_2030-01-02_nvidia-h100-80gb-hbm3.json"
    first.write_text("{}")
    assert gpu_check.report_path(tmp_path, report).name == "gpu-check_2030-01-02_nvidia-h100-80gb-hbm3-2.json"


def test_a_whole_run_with_its_parts_replaced(tmp_path, monkeypatch, capsys):
    """Guards against a part that fails and takes the report with it, or lets the exit code say that all is well."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu_check.hardware, "machine_facts", lambda: {"gpu": "Test GPU"})
    monkeypatch.setattr(gpu_check, "backends", lambda: {"sdpa": None})

    def fails(*arguments, **options):
        raise RuntimeError("no ceilings")

    monkeypatch.setattr(gpu_check.hardware, "ceilings", fails)
    monkeypatch.setattr(gpu_check, "run_cuda_tests", lambda: {"passed": True})
    monkeypatch.setattr(gpu_check, "benchmark_kernels", lambda device: [])
    monkeypatch.setattr(gpu_check, "run_ladder", lambda: {"rungs": []})
    assert gpu_check.main(tmp_path) == 1
    report = json.loads(next(tmp_path.iterdir()).read_text())
    assert report["errors"] == {"ceilings": "RuntimeError: no ceilings"}
    assert report["ladder"] == {"rungs": []} and report["tests"] == {"passed": True}
    assert "FAILED ceilings" in capsys.readouterr().out


def test_the_cuda_tests_are_found_and_an_all_skipped_run_does_not_pass(monkeypatch):
    """Guards against a check that ran no test and calls it a success (pytest's code is 0 when all are skipped)."""
    if torch.cuda.is_available():
        pytest.skip("with CUDA they would run in full")
    counts = gpu_check.run_cuda_tests()
    assert counts["tests"] > 100 and counts["skipped"] == counts["tests"] and not counts["passed"]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_the_benchmark_runs_on_this_gpu(kind):
    """Guards against a graph that does not record, and a rate above what the GPU can do."""
    found = run_case(Case(kind, 1024, heads=8, kv_heads=8), device="cuda", rounds=3)
    assert found["triton_speed_over_best_sdpa"] > 0.05
    assert "triton" not in found["timed_with_launch"]
