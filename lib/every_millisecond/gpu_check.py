"""`llm-latency gpu-check`: everything that only a GPU can show, by one command, into one dated JSON for results/.

It needs the checkout, and torch, triton, transformers and pytest; flash-attn is measured if it is there.
"""

from __future__ import annotations

import datetime
import json
import re
import subprocess
import sys
import tempfile
import time
import traceback
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch

from every_millisecond.laboratory.kernel_benchmark import CASES, Case, run_case
from llm_latency import files, hardware
from llm_latency.attention import backends

NO_CUDA = 2
LADDER_PROFILE = "llama-7b-shape"
# The targets of the course's own kernels (issue 4): a share of SDPA's best kernel, and of the measured copy bandwidth.
PREFILL_SHARE = DECODE_SHARE = 0.8


def main(out: Path | str = "results", *, ladder: bool = True) -> int:
    """Run every part on this machine's GPU, print and write what was found.

    Returns 0 if the tests passed and every part ran, 1 if not, 2 without CUDA. A kernel that misses its target is
    reported and is no failure: that is what the run is for. Raises OSError if the folder cannot be written.
    """
    if not torch.cuda.is_available():
        print(
            f"gpu-check: torch {torch.__version__} sees no CUDA device here, so there is nothing to check. "
            "Every notebook runs without one; on a CUDA machine run this again.",
            file=sys.stderr,
        )
        return NO_CUDA
    parts: dict[str, Callable[[], object]] = {
        "ceilings": lambda: asdict(hardware.ceilings("cuda", refresh=True)),
        "tests": run_cuda_tests,
        "kernels": lambda: benchmark_kernels("cuda"),
    }
    if ladder:
        parts["ladder"] = run_ladder
    report: dict = {
        "kind": "gpu-check",
        "date": datetime.date.today().isoformat(),
        "machine": hardware.machine_facts(),
        "backends": backends(),
        "errors": {},
    }
    for name, part in parts.items():
        print(f"gpu-check: {name} ...", flush=True)
        start = time.perf_counter()
        try:
            report[name] = part()
        except Exception as error:  # one part that fails must not lose the minutes of the others
            traceback.print_exc()
            report["errors"][name] = f"{type(error).__name__}: {error}"
        print(f"gpu-check: {name} took {time.perf_counter() - start:.0f} s", flush=True)
    report["verdicts"] = verdicts(report)
    path = report_path(Path(out), report)
    files.write_atomically(path, json.dumps(report, indent=1))
    print("\n".join(report["verdicts"]))
    for name, error in report["errors"].items():
        print(f"FAILED {name}: {error}")
    print(f"written: {path}")
    passed = report.get("tests", {}).get("passed", False)
    return 0 if passed and not report["errors"] else 1


def report_path(folder: Path, report: dict) -> Path:
    """Where a report goes: its date and the GPU's name, numbered if that day already has one."""
    gpu = re.sub(r"[^A-Za-z0-9]+", "-", report["machine"]["gpu"] or "no-gpu").strip("-").lower()
    for suffix in ("", *(f"-{i}" for i in range(2, 1000))):
        path = folder / f"gpu-check_{report['date']}_{gpu}{suffix}.json"
        if not path.exists():
            return path
    raise OSError(f"{folder} holds 999 reports of {report['date']}; move some away")


def run_cuda_tests() -> dict:
    """Run every test that is marked `cuda`, in a process of its own, and count what came out."""
    root = Path(__file__).resolve().parents[2]
    marked = [path for path in sorted((root / "tests").glob("test_*.py")) if "mark.cuda" in path.read_text("utf-8")]
    if not marked:
        raise RuntimeError(f"no tests marked cuda under {root / 'tests'}; run gpu-check from a checkout")
    with tempfile.TemporaryDirectory() as folder:
        xml = Path(folder) / "tests.xml"
        command = [sys.executable, "-m", "pytest", "-m", "cuda", "-q", f"--junitxml={xml}", *map(str, marked)]
        code = subprocess.run(command, cwd=root, check=False).returncode
        if not xml.exists():
            raise RuntimeError(f"pytest ended with code {code} before any test")
        suite = ElementTree.parse(xml).getroot().find("testsuite")
        counts = {name: int(suite.get(name)) for name in ("tests", "failures", "errors", "skipped")}
        wrong = [
            f"{case.get('classname')}.{case.get('name')}"
            for case in suite.iter("testcase")
            if case.find("failure") is not None or case.find("error") is not None
        ]
    ran = counts["tests"] - counts["skipped"]
    return {**counts, "failed": wrong, "exit_code": code, "passed": code == 0 and ran > 0}


def benchmark_kernels(
    device: str, cases: tuple[Case, ...] = CASES, rounds: int = 20, say: Callable[[str], None] = print
) -> list[dict]:
    """Every case of the kernels' benchmark; a case that fails is kept with its error and the others go on."""
    rows = []
    for case in cases:
        try:
            row = run_case(case, device=device, rounds=rounds)
            times = ", ".join(f"{name} {ms:.3g} ms" for name, ms in row["median_ms"].items())
        except Exception as error:
            row = {"case": asdict(case), "error": f"{type(error).__name__}: {error}"}
            times = row["error"]
        rows.append(row)
        say(f"  {case.kind} {case.seq} x {case.heads}/{case.kv_heads} heads x {case.head_dim} {case.dtype}: {times}")
        if device == "cuda":
            torch.cuda.empty_cache()
    return rows


def run_ladder() -> dict:
    """The ladder on random weights in Llama-2-7B's shape: timing only, and marked as such in the record."""
    from every_millisecond.ladder import run_ladder

    with tempfile.TemporaryDirectory() as folder:
        return run_ladder(
            Path(folder),
            profile=LADDER_PROFILE,
            rounds=1,
            progress=lambda title, done, of: print(f"  {title} ({done}/{of})", flush=True),
        )


def verdicts(report: dict) -> list[str]:
    """What the kernels reached against their targets, a sentence per case. An interpreted run claims nothing."""
    lines = []
    copy = report.get("ceilings", {}).get("copy_gbps")
    for row in report.get("kernels", []):
        case = row["case"]
        name = f"{case['kind']} {case['seq']}, {case['heads']}/{case['kv_heads']} heads of {case['head_dim']}"
        if "error" in row:
            lines.append(f"{name}: failed, {row['error']}")
        elif row["interpreted"]:
            lines.append(f"{name}: interpreted on the CPU, no claim")
        elif "triton" not in row["median_ms"]:
            lines.append(f"{name}: the Triton kernel cannot run here")
        elif case["kind"] == "prefill" and "triton_speed_over_best_sdpa" in row:
            share = row["triton_speed_over_best_sdpa"]
            target = f"target {PREFILL_SHARE}: {'met' if share >= PREFILL_SHARE else 'missed'}"
            counts = case["head_dim"] == 128 and case["seq"] >= 2048
            lines.append(
                f"{name}: {share:.2f} of the speed of {row['best_sdpa']}, {row['tflops']['triton']:.0f} TFLOP/s"
                + (f" ({target})" if counts else "")
            )
        elif case["kind"] == "decode" and copy:
            share = row["cache_gbps"]["triton"] / copy
            target = f"target {DECODE_SHARE}: {'met' if share >= DECODE_SHARE else 'missed'}"
            counts = case["seq"] >= 32_768 and case["kv_heads"] == case["heads"]
            lines.append(
                f"{name}: {row['cache_gbps']['triton']:.0f} GB/s, {share:.2f} of the measured copy bandwidth"
                + (f" ({target})" if counts else "")
            )
    return lines


if __name__ == "__main__":
    sys.exit(main())
