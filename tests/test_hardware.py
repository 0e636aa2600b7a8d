"""Facts and ceilings of this machine; cores and memory inside a container."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from every_millisecond import openmp
from llm_latency import files, hardware, host


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LLM_LATENCY_CACHE", str(tmp_path))
    return tmp_path


@pytest.fixture
def fake(monkeypatch):
    """Ceilings that cost nothing, and count how often they are measured."""
    monkeypatch.setattr(hardware, "_matmul_gflops", lambda side, dtype, device: 1.0)
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


def test_ceilings_of_a_busy_machine_are_measured_again(cache, fake, monkeypatch):
    """Fault: figures kept from a busy minute, 2.5 times too low, and every later step beat physics."""
    now = {"gflops": 1.2}  # of a quick product; the fake's stored ceiling is 1.0
    monkeypatch.setattr(hardware, "_matmul_gflops", lambda side, dtype, device: now["gflops"])
    monkeypatch.setattr(hardware, "_trusted", set())
    hardware.ceilings("cpu")
    hardware.ceilings("cpu")
    assert len(fake) == 1  # 20% is scatter
    now["gflops"] = 2.5
    hardware.ceilings("cpu")
    assert len(fake) == 1  # tried once a process
    hardware._trusted.clear()
    hardware.ceilings("cpu")
    assert len(fake) == 2


def test_a_read_only_cache_still_measures_and_says_so(cache, fake, monkeypatch):
    """A classroom's shared cache may be read-only; the figures are then not stored, with a word."""

    def refuse(path, text):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(files, "write_atomically", refuse)
    with pytest.warns(UserWarning, match=r"not stored.*Permission denied"):
        assert hardware.ceilings("cpu").read_gbps == 3.0


def test_measured_ceilings_are_plausible(monkeypatch):
    """The real measurement on small sizes: positive, and a copy's bytes counted both ways."""
    measured = hardware.measure_ceilings("cpu")
    values = [measured.read_gbps, measured.copy_gbps, *measured.gemv_gbps.values(), *measured.matmul_gflops.values()]
    assert all(value > 0 for value in values)
    assert {"float32", "bfloat16"} <= set(measured.gemv_gbps) <= {"float32", "bfloat16", "int8", "int4"}
    assert dataclasses.asdict(measured)["threads"] == torch.get_num_threads()


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


# -- a container's limits (cases.md 38) -------------------------------------------------------------------------------

HOST_CORES, HOST_BYTES, GIB = 64, 512 * 2**30, 2**30


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A host of 64 cores and 512 GiB under a fake root; returns a function that writes a control file there."""
    monkeypatch.setattr(host, "ROOT", tmp_path)
    monkeypatch.setattr(host.os, "sched_getaffinity", lambda _: set(range(HOST_CORES)), raising=False)
    monkeypatch.setattr(
        host.os, "sysconf", lambda name: {"SC_PAGE_SIZE": 4096}.get(name, HOST_BYTES // 4096), raising=False
    )

    def write(path: str, text: str) -> None:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text + "\n")

    return write


def test_half_a_core_and_two_gigabytes_in_version_two(machine):
    """Fault (38): 64 threads on half a core, and a model that is killed for memory the host would have had."""
    machine("proc/self/cgroup", "0::/")
    machine("sys/fs/cgroup/cpu.max", "50000 100000")
    machine("sys/fs/cgroup/memory.max", str(2 * GIB))
    assert host.usable_cores() == 1 and host.memory_bytes() == 2 * GIB
    assert hardware.machine_facts()["cores"] == 1 and hardware.machine_facts()["memory_gb"] == 2.1
    machine("sys/fs/cgroup/cpu.max", "250000 100000")  # two and a half: three threads, one of them held back at times
    assert host.usable_cores() == 3


def test_threads_keep_to_the_cores_granted(machine, monkeypatch):
    """Fault (38): the quota was read and printed, and PyTorch still ran a thread for each core of the host."""
    machine("proc/self/cgroup", "0::/")
    machine("sys/fs/cgroup/cpu.max", "100000 100000")
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert hardware.limit_threads() == torch.get_num_threads() == 1
        machine("sys/fs/cgroup/cpu.max", "max 100000")
        assert hardware.limit_threads() == 1  # fewer than there are cores: somebody's choice
    finally:
        torch.set_num_threads(before)
    machine("sys/fs/cgroup/cpu.max", "200000 100000")
    monkeypatch.setattr(host.os, "cpu_count", lambda: HOST_CORES)
    assert openmp.process_environment({})["OMP_NUM_THREADS"] == "2"
    assert openmp.process_environment({"OMP_NUM_THREADS": "5"})["OMP_NUM_THREADS"] == "5"


def test_waiting_threads_soon_sleep_unless_told_otherwise():
    """Fault: threads that spin while they wait made a step take 2.3 times as long beside one busy process."""
    assert openmp.process_environment({})["GOMP_SPINCOUNT"] == "1000"
    assert openmp.process_environment({"GOMP_SPINCOUNT": "5"})["GOMP_SPINCOUNT"] == "5"
    assert "GOMP_SPINCOUNT ?= 1000" in (Path(__file__).resolve().parents[1] / "Makefile").read_text()


def test_the_tightest_group_above_counts(machine):
    """Fault (38): only the process's own group is read, while the limit stands at the service or slice above it."""
    machine("proc/self/cgroup", "0::/user.slice/shell.scope")
    machine("sys/fs/cgroup/user.slice/shell.scope/cpu.max", "max 100000")
    machine("sys/fs/cgroup/user.slice/shell.scope/memory.max", "max")
    machine("sys/fs/cgroup/user.slice/cpu.max", "400000 100000")
    machine("sys/fs/cgroup/user.slice/memory.max", str(8 * GIB))
    assert host.usable_cores() == 4 and host.memory_bytes() == 8 * GIB


def test_version_one_in_a_container_whose_path_is_the_hosts(machine):
    """Fault (38): Docker with version 1 names /docker/<id>, which is not mounted inside; the limit is at the top."""
    machine("proc/self/cgroup", "5:memory:/docker/abc\n4:cpu,cpuacct:/docker/abc\n1:name=systemd:/docker/abc")
    machine("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "150000")
    machine("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us", "100000")
    machine("sys/fs/cgroup/memory/memory.limit_in_bytes", str(2 * GIB))
    assert host.usable_cores() == 2 and host.memory_bytes() == 2 * GIB


@pytest.mark.parametrize("text", ["1:name=systemd:/", "0::/", "4:cpu:/\n5:memory:/"])
def test_without_limits_the_host_counts(machine, text):
    """Fault: "no limit", which version 1 writes as -1 and as a number near 2**63, taken for one; or files that are not
    there taken for zero."""
    machine("proc/self/cgroup", text)
    machine("sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1")
    machine("sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000")
    machine("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712")
    assert host.usable_cores() == HOST_CORES and host.memory_bytes() == HOST_BYTES


def test_a_system_without_proc(machine, tmp_path):
    """Fault: macOS and Windows have neither /proc nor control groups; the facts must still come."""
    assert not Path(tmp_path / "proc").exists()
    assert host.usable_cores() == HOST_CORES and host.cpu_name() and host.last_level_cache_bytes() == 32 << 20
