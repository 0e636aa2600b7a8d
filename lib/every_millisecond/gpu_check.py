"""`make gpu`: everything that only a GPU can show, by one command that fits into fifteen minutes on a rented card.

What is worth most comes first: ceilings, the CUDA tests, the kernels beside SDPA and flash-attn, the ladder, then the
notebooks. A part that the time does not reach waits for the next call of the same command, which takes up where this
one ended. In `out`: `<date>-<gpu>-gpu.json` with the figures, `<date>-<gpu>-ladder.json`, and a folder `<date>-<gpu>/`
with `summary.html` and a page for each notebook.

It needs the checkout, and torch, triton, transformers and pytest; flash-attn is measured if it is there.
"""

from __future__ import annotations

import datetime
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import traceback
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from every_millisecond import gpu_card, gpu_memory, gpu_page
from every_millisecond.laboratory.kernel_benchmark import CASES, Case, run_case
from llm_latency import files, hardware, models
from llm_latency.attention import backends

ROOT = Path(__file__).resolve().parents[2]
NO_CUDA = 2
# The targets of the course's own kernels (issue 4): a share of SDPA's best kernel, and of the measured copy bandwidth.
PREFILL_SHARE = DECODE_SHARE = 0.8
# Most valuable first: those whose claims only a GPU can settle.
NOTEBOOKS = ("06", "08", "10", "07", "13", "05", "11", "09", "03", "01", "04", "02", "12", "14", "00")
DONE, FAILED, WAITS, TOO_LARGE = "done", "failed", "waits", "too large"


class OutOfTime(Exception):
    """The time budget is spent; the next call continues."""


@dataclass(frozen=True, slots=True)
class Clock:
    """The time budget. deadline: as time.monotonic() counts."""

    deadline: float

    def left(self) -> float:
        """Seconds. Raises OutOfTime when none are."""
        seconds = self.deadline - time.monotonic()
        if seconds <= 0:
            raise OutOfTime("the time budget is spent; the same command continues here")
        return seconds


def main(out: Path | str = "results", *, minutes: float = 15.0, profile: str | None = None, root: Path = ROOT) -> int:
    """Run what the time budget allows on this machine's GPU, print and write what was found.

    profile: of the ladder and the notebooks; None takes `card_profile()`. A notebook that does not fit on the card is
    played on the default profile. Returns 0 if nothing failed, 1 if a test or a part did, 2 without a GPU that the
    course can use. A kernel that misses its target is reported and is no failure: that is what the run is for.
    Raises ValueError for minutes that are not positive or an unknown profile, OSError if the folder cannot be written.
    """
    if not minutes > 0:
        raise ValueError(f"minutes={minutes}; expected a number above 0")
    refused = refusal()
    if refused:
        print(f"gpu-check: {refused}", file=sys.stderr)
        return NO_CUDA
    clock = Clock(time.monotonic() + 60 * minutes)
    profile = models.choose_profile(profile or card_profile())[0].name
    path, report = open_report(Path(out), profile)
    folder = path.with_name(path.name.removesuffix("-gpu.json"))
    folder.mkdir(exist_ok=True)
    for line in report["card"]:
        print(f"gpu-check: {line}")
    parts = all_parts(report, folder, clock, root)
    # What was never reached comes before what failed the last time.
    for name in sorted(parts, key=lambda name: report["parts"].get(name, {}).get("status") == FAILED):
        if report["parts"].get(name, {}).get("status") not in (DONE, TOO_LARGE):
            report["parts"][name] = run_part(name, parts[name], clock)
            write(report, path, folder)
    print("\n".join(report["verdicts"]))
    for name, part in report["parts"].items():
        if part["status"] != DONE:
            print(f"{name}: {part['status']}, {part['said']}")
    print(f"written: {path} and {folder / gpu_page.NAME}")
    return int(any(part["status"] == FAILED for part in report["parts"].values()))


def refusal() -> str | None:
    """Why nothing can be run here, with the remedy; None if something can."""
    if not torch.cuda.is_available():
        row = gpu_card.checks()[0]
        return f"torch {torch.__version__} sees no CUDA device here: {row.found} ({row.remedy})"
    unfit = [row for row in gpu_card.checks() if row.needed and not row.works]
    return f"{unfit[0].found}: {unfit[0].remedy}" if unfit else None


def card_profile() -> str:
    """LLM_LATENCY_PROFILE, or the largest model that the card can hold and that is downloaded already: minutes on a
    rented card are no time for a download."""
    if os.environ.get("LLM_LATENCY_PROFILE"):
        return os.environ["LLM_LATENCY_PROFILE"]
    from huggingface_hub import try_to_load_from_cache

    memory = torch.cuda.get_device_properties(0).total_memory / 1e9
    for profile in sorted(models.PROFILES.values(), key=lambda profile: -profile.needs_gpu_gb):
        hub = [source for source in (profile.target, profile.draft) if source is not None and source.kind == "hub"]
        here = [isinstance(try_to_load_from_cache(s.name, "config.json", revision=s.revision), str) for s in hub]
        if hub and all(here) and profile.needs_gpu_gb <= memory:
            return profile.name
    return models.profile_names()[0]


def open_report(out: Path, profile: str) -> tuple[Path, dict]:
    """This GPU's report of today or yesterday (a run may pass midnight) that still has something to do, or a new one
    with a name that is free."""
    out.mkdir(parents=True, exist_ok=True)
    machine = hardware.machine_facts()
    today = datetime.date.today()
    days = [report_paths(out, str(day), machine["gpu"]) for day in (today - datetime.timedelta(days=1), today)]
    for path in (path for day in days for path in itertools.takewhile(Path.exists, day)):
        found = json.loads(path.read_text("utf-8"))
        same = all(found["machine"][key] == machine[key] for key in ("gpu", "torch", "cuda"))
        open_parts = any(part["status"] in (WAITS, FAILED) for part in found["parts"].values())
        if same and found["profile"] == profile and open_parts:
            print(f"gpu-check: continues {path}")
            return path, found
    return next(path for path in days[-1] if not path.exists()), {
        "kind": "gpu-check",
        "date": str(today),
        "machine": machine,
        "profile": profile,
        "backends": backends(),
        "card": [f"{row.name}: {row.found}{'' if row.works else f' ({row.remedy})'}" for row in gpu_card.checks()],
        "parts": {},
        "kernels": [],
        "notebooks": {},
        "verdicts": [],
    }


def report_paths(folder: Path, date: str, gpu: str) -> list[Path]:
    """Where a report may go: its date and the GPU's name, numbered for the second and further ones of a day."""
    name = re.sub(r"[^A-Za-z0-9]+", "-", gpu).strip("-").lower()
    return [folder / f"{date}-{name}{suffix}-gpu.json" for suffix in ("", *(f"-{i}" for i in range(2, 1000)))]


def write(report: dict, path: Path, folder: Path) -> None:
    """Everything so far: an interrupted run loses one part at most."""
    report["verdicts"] = verdicts(report)
    files.write_atomically(path, json.dumps(report, indent=1))
    files.write_atomically(folder / gpu_page.NAME, gpu_page.page(report))


def all_parts(report: dict, folder: Path, clock: Clock, root: Path) -> dict[str, Callable[[], tuple[str, str]]]:
    """What there is to do, in order: functions that put what they find into the report and return status and why."""

    def ceilings() -> tuple[str, str]:
        report["ceilings"] = asdict(hardware.ceilings("cuda", refresh=True))
        return DONE, ""

    def tests() -> tuple[str, str]:
        found = report["tests"] = run_cuda_tests(root, clock.left())
        wrong = ", ".join(found["failed"]) or f"{found['skipped']} of {found['tests']} skipped"
        return (DONE, "") if found["passed"] else (FAILED, wrong)

    def kernels() -> tuple[str, str]:
        benchmark_kernels("cuda", CASES, rows=report["kernels"], clock=clock)
        wrong = [row["error"] for row in report["kernels"] if "error" in row]
        return (FAILED, "; ".join(wrong)) if wrong else (DONE, "")

    def ladder() -> tuple[str, str]:
        run = run_ladder(report["profile"], folder / "ladder", clock)
        files.write_atomically(folder.with_name(f"{folder.name}-ladder.json"), json.dumps(run, indent=1))
        wrong = [rung["name"] for rung in run["rungs"] if rung["status"] == "failed"]
        return (FAILED, ", ".join(wrong)) if wrong else (DONE, "")

    parts = {"ceilings": ceilings, "tests": tests, "kernels": kernels, "ladder": ladder}
    for number in NOTEBOOKS:
        parts[f"notebook {number}"] = lambda number=number: play(number, report, folder, clock, root)
    return parts


def run_part(name: str, part: Callable[[], tuple[str, str]], clock: Clock) -> dict:
    """A part's outcome. One that fails must not lose the minutes of the others."""
    start = time.perf_counter()
    try:
        clock.left()
        print(f"gpu-check: {name} ...", flush=True)
        status, said = part()
    except OutOfTime as error:
        status, said = WAITS, str(error)
    except Exception as error:
        traceback.print_exc()
        status, said = FAILED, f"{type(error).__name__}: {error}"
    seconds = time.perf_counter() - start
    if status != WAITS:
        print(f"gpu-check: {name} {status} after {seconds:.0f} s", flush=True)
    torch.cuda.empty_cache()
    return {"status": status, "said": said, "seconds": round(seconds, 1)}


def run_cuda_tests(root: Path = ROOT, seconds: float | None = None) -> dict:
    """Run every test that is marked `cuda`, in a process of its own, and count what came out. Raises OutOfTime."""
    marked = [path for path in sorted((root / "tests").glob("test_*.py")) if "mark.cuda" in path.read_text("utf-8")]
    if not marked:
        raise RuntimeError(f"no tests marked cuda under {root / 'tests'}; run gpu-check from a checkout")
    with tempfile.TemporaryDirectory() as folder:
        xml = Path(folder) / "tests.xml"
        command = [sys.executable, "-m", "pytest", "-m", "cuda", "-q", f"--junitxml={xml}", *map(str, marked)]
        try:
            code = subprocess.run(command, cwd=root, check=False, timeout=seconds).returncode
        except subprocess.TimeoutExpired as error:
            raise OutOfTime(f"the tests were not done after {seconds:.0f} s") from error
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
    device: str,
    cases: tuple[Case, ...] = CASES,
    rounds: int = 20,
    *,
    rows: list[dict] | None = None,
    clock: Clock | None = None,
    say: Callable[[str], None] = print,
) -> list[dict]:
    """Every case of the kernels' benchmark; one that fails is kept with its error and the others go on.

    rows: what is measured already; the list is continued, and cases that stand in it are left out. Raises OutOfTime.
    """
    rows = [] if rows is None else rows
    rows[:] = [row for row in rows if "error" not in row]
    for case in cases:
        if asdict(case) in [row["case"] for row in rows]:
            continue
        if clock is not None:
            clock.left()
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


def run_ladder(profile: str, folder: Path, clock: Clock) -> dict:
    """The ladder in one round, continued from what stands in `folder`. Raises OutOfTime between two processes."""
    from every_millisecond.ladder import run_ladder

    def progress(title: str, done: int, of: int) -> None:
        clock.left()
        print(f"  {title} ({done}/{of})", flush=True)

    return run_ladder(folder, profile=profile, rounds=1, progress=progress)


def play(number: str, report: dict, folder: Path, clock: Clock, root: Path) -> tuple[str, str]:
    """Execute a notebook on the report's profile, or on the default one where that does not fit, into a page."""
    from every_millisecond import gpu_notebook

    (source,) = (root / "notebooks").glob(f"{number}_*.ipynb")
    said = ""
    for profile in dict.fromkeys((report["profile"], models.profile_names()[0])):
        try:
            gpu_memory.check_card(number, profile)
            break
        except RuntimeError as error:
            said = str(error)
    else:
        return TOO_LARGE, said
    page = folder / f"{source.stem}.html"
    found = gpu_notebook.execute(source, page, profile, seconds=clock.left())
    report["notebooks"][number] = asdict(found) | {"profile": profile, "page": page.name}
    if found.cells_left:
        raise OutOfTime(f"{found.cells_left} cells are left; the page holds those before")
    if found.errors:
        return FAILED, f"{len(found.errors)} cells raised; the first, {found.errors[0]}"
    return DONE, f"played on {profile}: {said}" if said else ""


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
