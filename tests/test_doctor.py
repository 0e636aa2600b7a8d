"""What the doctor says of a machine."""

from __future__ import annotations

import socket
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from every_millisecond import cli, doctor
from llm_latency import hardware, models


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
    assert doctor.compile_unavailable() == "no C++ compiler"


def test_compiler_is_asked_of_the_environment_first(monkeypatch):
    """CXX decides, as it does for torch."""
    monkeypatch.setenv("CXX", "my-c++")
    monkeypatch.setattr(doctor.shutil, "which", lambda name: f"/bin/{name}" if name == "my-c++" else None)
    assert doctor.compiler() == "/bin/my-c++"


def test_doctor_prints_all_and_fails_only_for_what_is_needed(quick, monkeypatch):
    """Exit 0 where the course runs, exit 1 where its model is missing, with the command that mends it."""
    result = CliRunner().invoke(cli.app, ["doctor", "--class"], env={"COLUMNS": "200"})
    assert "SDPA" in result.output and "[gpu]" in result.output and "matrix x vector" in result.output
    expected = 0 if all(check.works or not check.needed for check in doctor.checks() + doctor.class_checks()) else 1
    assert result.exit_code == expected
    monkeypatch.setattr(models, "prepared_folder", lambda: None)
    result = CliRunner().invoke(cli.app, ["doctor"], env={"COLUMNS": "200"})
    assert result.exit_code == 1 and "llm-latency fetch" in result.output


def test_self_check_reports_the_timer_and_measure(quick, monkeypatch):
    """`doctor --self-check` must show the timer's own cost and the comparison with torch's Timer."""
    from llm_latency import timing

    monkeypatch.setattr(timing, "self_check", lambda: SimpleNamespace(report=lambda: "0.9 us a stage"))
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


def test_others_on_the_gpu_are_seen(monkeypatch):
    """A busy GPU makes every figure of the class wrong, and nobody notices."""
    monkeypatch.setattr(doctor.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(doctor.torch.cuda, "memory_reserved", lambda: 0)
    monkeypatch.setattr(doctor, "_nvidia_smi", lambda *fields: "compute_mode Default")
    for used_gb, works in ((0.5, True), (20, False)):
        monkeypatch.setattr(doctor.torch.cuda, "mem_get_info", lambda used=used_gb: (int((80 - used) * 1e9), int(80e9)))
        check = doctor._gpu_sharing()
        assert check.works == works and "compute_mode Default" in check.found
    monkeypatch.undo()
    monkeypatch.setattr(doctor.subprocess, "run", lambda *_, **__: (_ for _ in ()).throw(FileNotFoundError()))
    assert doctor._nvidia_smi("name") == ""
