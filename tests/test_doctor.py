"""What the doctor says of a machine."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from llm_latency import cli, doctor, hardware, models


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
