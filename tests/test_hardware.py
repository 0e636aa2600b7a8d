"""Facts and ceilings of this machine."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from llm_latency import files, hardware


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LLM_LATENCY_CACHE", str(tmp_path))
    return tmp_path


@pytest.fixture
def fake(monkeypatch):
    """Ceilings that cost nothing, and count how often they are measured."""
    calls = []

    def measure(device=None):
        calls.append(str(device))
        rates = {"float32": 1.0, "bfloat16": 2.0}
        return hardware.Ceilings("cpu", "a chip", torch.get_num_threads(), 3.0, 4.0, rates, rates)

    monkeypatch.setattr(hardware, "measure_ceilings", measure)
    return calls


def test_ceilings_are_measured_once_and_again_when_anything_changes(cache, fake, monkeypatch):
    """Figures measured with two threads must not be quoted for one."""
    first = hardware.ceilings("cpu")
    assert hardware.ceilings("cpu") == first and len(fake) == 1
    hardware.ceilings("cpu", refresh=True)
    assert len(fake) == 2
    monkeypatch.setattr(hardware.torch, "get_num_threads", lambda: 77)
    hardware.ceilings("cpu")
    assert len(fake) == 3
    assert len(json.loads((cache / "ceilings.json").read_text())) == 2


def test_a_read_only_cache_still_measures_and_says_so(cache, fake, monkeypatch):
    """A classroom's shared cache may be read-only; the figures are then not stored, with a word."""

    def refuse(path, text):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(files, "write_atomically", refuse)
    with pytest.warns(UserWarning, match=r"not stored.*Permission denied"):
        assert hardware.ceilings("cpu").read_gbps == 3.0


def test_a_broken_cache_file_is_named(cache, fake):
    """A half-written JSON must not look like an empty one."""
    (cache / "ceilings.json").write_text('[{"key"')
    with pytest.raises(ValueError, match=r"ceilings\.json is not valid JSON.*delete it"):
        hardware.ceilings("cpu")


def test_write_atomically_leaves_the_old_file_when_it_fails(tmp_path, monkeypatch):
    """A crash between writing and renaming must leave the old content and no leftovers."""
    path = tmp_path / "x.json"
    files.write_atomically(path, "old")

    def crash(source, target):
        raise RuntimeError("power cut")

    monkeypatch.setattr(files.os, "replace", crash)
    with pytest.raises(RuntimeError, match="power cut"):
        files.write_atomically(path, "new")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_measured_ceilings_are_plausible(monkeypatch):
    """The real measurement on small sizes: positive, and a copy's bytes counted both ways."""
    measured = hardware.measure_ceilings("cpu")
    values = [measured.read_gbps, measured.copy_gbps, *measured.gemv_gbps.values(), *measured.matmul_gflops.values()]
    assert all(value > 0 for value in values)
    assert {"float32", "bfloat16"} <= set(measured.gemv_gbps) <= {"float32", "bfloat16", "int8", "int4"}
    assert dataclasses.asdict(measured)["threads"] == torch.get_num_threads()


@pytest.mark.parametrize("device", ["tpu", "gpu0", "meta", 3.5])
def test_unknown_devices_are_named(device):
    """A device that torch does not know, or that the course cannot time, is told by name."""
    with pytest.raises(ValueError, match=f"device={device!r}"):
        hardware.check_device(device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without CUDA answers")
def test_cuda_without_a_gpu_is_refused():
    """A capability is asked of the device, not guessed from a name (cases.md 33)."""
    with pytest.raises(ValueError, match="sees no CUDA device"):
        hardware.check_device("cuda")


def test_datasheet_names():
    """An unknown GPU must not silently become another one."""
    assert hardware.datasheet_peak("A100-80GB-SXM").bandwidth_gbps == 2039
    with pytest.raises(KeyError, match=r"no datasheet figures for 'B300'; known: .*H200-SXM"):
        hardware.datasheet_peak("B300")


def test_machine_facts_name_what_a_result_needs():
    """A figure without its machine is worth nothing."""
    facts = hardware.machine_facts()
    assert {"cpu", "cores", "threads", "torch", "transformers", "gpu"} <= set(facts)
    assert json.loads(json.dumps(facts)) == facts
