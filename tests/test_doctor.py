"""What the doctor says of a machine."""

from __future__ import annotations

import json
import os
import platform
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from every_millisecond import cli, doctor, openmp
from llm_latency import hardware, models
from llm_latency.engine import kernel_library


@pytest.fixture
def quick(monkeypatch):
    rates = {"float32": 1.0, "bfloat16": 2.0}
    fixed = hardware.Ceilings("cpu", "a chip", 2, 3.0, 4.0, rates, rates)
    monkeypatch.setattr(hardware, "ceilings", lambda *_, **__: fixed)


def test_every_missing_thing_has_a_remedy():
    """A 'no' without a remedy leaves the learner alone."""
    for check in doctor.checks() + doctor.class_checks():
        assert check.found
        assert check.works or check.remedy


def test_no_compiler_is_said_by_name(monkeypatch):
    """torch.compile without a compiler fails minutes later with a page of traceback."""
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    monkeypatch.setattr(doctor.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(doctor.torch, "__file__", "/opt/torch/__init__.py")  # a path without a blank
    assert doctor.compile_unavailable() == "no C++ compiler"


def test_compiler_is_asked_of_the_environment_first(monkeypatch):
    """CXX decides, as it does for torch."""
    monkeypatch.setenv("CXX", "my-c++")
    monkeypatch.setattr(doctor.shutil, "which", lambda name: f"/bin/{name}" if name == "my-c++" else None)
    assert doctor.compiler() == "/bin/my-c++"


def test_doctor_prints_all_and_fails_only_for_what_is_needed(quick, monkeypatch):
    """Exit 0 where the course runs, exit 1 where its model is missing, with the command that mends it."""
    monkeypatch.setattr(doctor, "_busy_cores", lambda: 0.0)
    result = CliRunner().invoke(cli.app, ["doctor", "--class"], env={"COLUMNS": "200"})
    assert "SDPA" in result.output and "[gpu]" in result.output and "matrix x vector" in result.output
    expected = 0 if all(check.works or not check.needed for check in doctor.checks() + doctor.class_checks()) else 1
    assert result.exit_code == expected
    monkeypatch.setattr(models, "prepared_folder", lambda: None)
    result = CliRunner().invoke(cli.app, ["doctor"], env={"COLUMNS": "200"})
    assert result.exit_code == 1 and "llm-latency fetch" in result.output


def test_self_check_reports_the_timer_and_measure(quick, monkeypatch):
    """`doctor --self-check` must show the timer's own cost and the comparison with torch's Timer."""
    from every_millisecond.laboratory import self_check

    monkeypatch.setattr(self_check, "self_check", lambda: SimpleNamespace(report=lambda: "0.9 us a stage"))
    result = CliRunner().invoke(cli.app, ["doctor", "--self-check"])
    assert "0.9 us a stage" in result.output


def test_a_taken_port_is_passed_over_and_none_left_is_said():
    """JupyterLab on a taken port opens someone else's server; a seat without any must be known before the class."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        assert not doctor._port(port, tries=1).works and doctor._port(port, tries=1).needed
        assert doctor._port(port, tries=20).found != str(port)


def test_a_folder_that_cannot_be_written_is_said(monkeypatch):
    """A learner whose notebook cannot be saved loses the hour."""

    def refuse(dir):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(doctor.tempfile, "TemporaryFile", refuse)
    check = doctor._writable()
    assert not check.works and check.needed and "Permission denied" in check.found


ENVIRONMENTS = {
    "an unknown profile": ({"LLM_LATENCY_PROFILE": "gpt-9"}, "model", "unknown profile 'gpt-9'"),
    "a cache that is a file": ({"LLM_LATENCY_CACHE": "{file}"}, "cache folder", "cannot make the cache folder"),
    "no home": ({"HOME": "", "LLM_LATENCY_CACHE": "~nobody-of-that-name/x"}, "cache folder", "home"),
}


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_what_is_broken_is_a_row_and_a_remedy(name, quick, monkeypatch, tmp_path):
    """Kind 48: the doctor died of what it should report, and the learner got a traceback."""
    file = tmp_path / "file"
    file.touch()
    variables, row, said = ENVIRONMENTS[name]
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value.format(file=file))
    result = CliRunner().invoke(cli.app, ["doctor", "--class"], env={"COLUMNS": "250"})
    assert result.exit_code == 1 and isinstance(result.exception, SystemExit), result.exception
    found = {check.name: check for check in doctor.checks()}
    assert not found[row].works and said in found[row].found and found[row].remedy
    assert found["SDPA"].works, "the other rows stand"


def test_a_cut_file_of_ceilings_is_a_row(monkeypatch):
    """Kind 48: a file that was cut off in the middle of a write."""

    def cut(refresh: bool) -> None:
        raise ValueError("ceilings.json is not valid JSON (line 3); delete it and run again")

    monkeypatch.setattr(hardware, "ceilings", cut)
    monkeypatch.setattr(doctor, "checks", list)
    result = CliRunner().invoke(cli.app, ["doctor"], env={"COLUMNS": "200"})
    assert result.exit_code == 1 and "not valid JSON" in result.output and "--refresh" in result.output


@pytest.mark.parametrize(
    ("said", "code", "reason"),
    [
        ("answer.cpp:1:10: fatal error: Python.h: No such file or directory", 1, "but Python's headers are missing"),
        ("g++: error: unrecognised option '-std=c++17'", 1, "cannot compile: g++: error: unrecognised option"),
        ("", 7, "cannot compile: it ends with code 7"),
        ("some warning", 0, None),
    ],
)
def test_a_compiler_works_when_it_has_compiled(said, code, reason, monkeypatch, tmp_path):
    """Kind 48: "C++ compiler works" was said of one that lacks Python's headers, and torch.compile failed later."""
    found = tmp_path / "my c++"
    found.write_text(f'#!/bin/sh\necho "{said}" >&2\nexit {code}\n')
    found.chmod(0o755)
    monkeypatch.setenv("CXX", str(found))
    monkeypatch.setattr(doctor.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(doctor.torch, "__file__", "/opt/torch/__init__.py")  # a path without a blank
    told = doctor.compile_unavailable()
    assert told is None if reason is None else reason in told


def test_the_real_compiler_is_tried():
    """What the row says of this machine must be what torch.compile will meet here."""
    path = doctor.compiler()
    if path is None:
        pytest.skip("no C++ compiler here")
    assert doctor._compiler_fails(path) is None or "headers" in doctor._compiler_fails(path)


@pytest.mark.parametrize(
    ("compiler", "found", "remedy"),
    [
        ("/no/such/c++", "there is no C++ compiler", "g++"),
        ("echo 'kernel.cpp:3: error: what is this' >&2; [ $1 = --version ]", "does not build the kernel", "g++"),
    ],
)
@pytest.mark.skipif(platform.system() != "Linux", reason="its remedies are Linux's")
def test_the_kernel_is_tried_and_its_absence_is_no_fault(compiler, found, remedy, monkeypatch, tmp_path):
    """A row that only looks for a compiler promises what the first decode step cannot keep; and the course runs
    without the kernel, so that a missing compiler must not fail the doctor."""
    script = tmp_path / "c++"
    script.write_text(f"#!/bin/sh\n{compiler}\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path) if "--version" in compiler else "")
    monkeypatch.setenv("CXX", str(script) if "--version" in compiler else compiler)
    monkeypatch.setattr(kernel_library.sys, "prefix", str(tmp_path))
    monkeypatch.setenv("LLM_LATENCY_CACHE", str(tmp_path))
    kernel_library.load.cache_clear()
    check = doctor._kernel()
    kernel_library.load.cache_clear()
    assert not check.works and not check.needed and "\n" not in check.found + check.remedy
    assert found in check.found and remedy in check.remedy and "FastDecoder serves" in check.remedy


def test_a_kernel_that_runs_has_a_row():
    """What the row says is what the next decoder will meet."""
    check = doctor._kernel()
    assert check.works == (kernel_library.problem() is None)
    assert not check.works or "built for this processor" in check.found


def test_other_load_is_said(monkeypatch):
    """A browser beside a measurement makes every figure slower and noisier, and nobody looks for it there."""
    monkeypatch.setattr(doctor, "usable_cores", lambda: 2)
    monkeypatch.setattr(doctor.os, "cpu_count", lambda: 2)
    for busy, works in ((0.1, True), (0.9, False), (None, True)):
        monkeypatch.setattr(doctor, "_busy_cores", lambda busy=busy: busy)
        check = doctor._quiet()
        assert check.works == works
        if not works:
            assert check.found == "0.9 of 2 cores busy with something else"
            assert check.remedy.startswith("close ") and "expect slower and noisier figures" in check.remedy
    monkeypatch.setattr(doctor.os, "cpu_count", lambda: 64)
    monkeypatch.setattr(doctor, "_busy_cores", lambda: 30.0)
    assert doctor._quiet().works, "a container of two cores on a large host with room (kind 38)"


def test_what_is_busy_is_counted_from_the_system_and_without_ourselves(monkeypatch):
    """Guards against a doctor that finds itself, and takes waiting for a disk for work."""
    samples = iter([(100, 0, 50, 1000, 10, 0, 0, 0), (220, 0, 90, 1100, 90, 0, 0, 40)])
    texts = (f"cpu  {' '.join(map(str, sample))} 0 0\ncpu0 1" for sample in samples)
    monkeypatch.setattr(doctor.Path, "read_text", lambda self: next(texts))
    monkeypatch.setattr(doctor.os, "sysconf", lambda name: 100)
    own = iter([SimpleNamespace(user=1.0, system=1.0), SimpleNamespace(user=1.5, system=1.0)])
    monkeypatch.setattr(doctor.os, "times", lambda: next(own))
    clock = iter([10.0, 11.0])
    monkeypatch.setattr(doctor.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(doctor.time, "sleep", lambda seconds: None)
    assert doctor._busy_cores() == pytest.approx((120 + 40 + 40) / 100 - 0.5)


def test_the_container_is_what_counts(monkeypatch):
    """Kind 38: a container with half a core and 2 GB was told that it has the host's 64 cores and 256 GB."""
    monkeypatch.setattr(doctor, "usable_cores", lambda: 1)
    monkeypatch.setattr(doctor, "memory_bytes", lambda: 2_000_000_000)
    found = {check.name: check for check in doctor.class_checks()}
    assert not found["cores"].works and found["cores"].found == "1"
    assert not found["memory"].works and found["memory"].found == "2 GB"


def test_a_machine_report_is_json_without_a_name(quick, monkeypatch):
    """`doctor --json` is attached to public issues: it must be one object, and not name its writer's home folder."""
    home = os.path.expanduser("~")
    here = doctor.Check("write", True, f"{home}/course")
    monkeypatch.setattr(doctor, "checks", lambda: [here])
    result = CliRunner().invoke(cli.app, ["doctor", "--json"])
    found = json.loads(result.stdout)
    assert found["checks"][0]["found"] == "~/course" and home not in result.stdout
    assert found["machine"]["torch"] and found["ceilings"]["read_gbps"] == 3.0 and result.exit_code == 0


@pytest.mark.skipif(openmp.torch_libgomp() is None, reason="this torch brings no libgomp")
def test_a_library_below_a_blank_is_preloaded_by_a_link(monkeypatch, tmp_path):
    """Kind 37: LD_PRELOAD separates names by blanks, so a course in "My Documents" had two pools of threads again."""
    library = tmp_path / "my documents" / "libgomp-1.so"
    library.parent.mkdir()
    library.write_bytes(openmp.torch_libgomp().read_bytes())
    monkeypatch.setattr(openmp, "torch_libgomp", lambda: library)
    monkeypatch.setenv("LLM_LATENCY_CACHE", str(tmp_path / "cache"))
    for _ in range(2):
        name = openmp.process_environment({})["LD_PRELOAD"]
        assert " " not in name and Path(name).samefile(library)
    assert doctor._preload().works
    monkeypatch.setenv("LLM_LATENCY_CACHE", str(tmp_path / "no way"))
    assert openmp.process_environment({}) == openmp.WAITING, "better none than half a name"
    assert not doctor._preload().works and "without a space" in doctor._preload().remedy


def test_a_blank_in_the_path_is_named_before_the_compiler_fails(monkeypatch):
    """cases.md 37: below "my course" torch.compile fails in a compiler's words; the doctor says why."""
    monkeypatch.setattr(torch, "__file__", "/my course/torch/__init__.py")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "blank in its name" in doctor.compile_unavailable()
    assert "no blank" in doctor._compile().remedy
