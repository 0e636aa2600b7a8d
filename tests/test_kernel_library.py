"""The loader: what it builds, where it keeps it, what it refuses, and what it says where it cannot build."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import kernel_toys
import pytest
from at_once import run_at_once

from llm_latency.engine import kernel_library
from llm_latency.engine.kernel_library import KernelUnavailable

needs_kernel = kernel_toys.needs_kernel()
try:
    REAL = " ".join(kernel_library.compiler())
except KernelUnavailable:
    REAL = "false"
unix = pytest.mark.skipif(sys.platform == "win32", reason="no kernel on Windows")


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """An empty cache folder, and a loader that has loaded nothing."""
    folder = tmp_path / "cache"
    folder.mkdir(mode=0o755)
    monkeypatch.setenv("LLM_LATENCY_CACHE", str(folder))
    kernel_library.load.cache_clear()
    yield folder
    kernel_library.load.cache_clear()


@pytest.fixture
def fake_compiler(tmp_path, monkeypatch):
    """Makes $CXX a script that does what its lines say."""

    def make(*lines: str) -> Path:
        script = tmp_path / "c++"
        script.write_text("#!/bin/sh\n" + "\n".join(lines) + "\n")
        script.chmod(0o755)
        monkeypatch.setenv("CXX", str(script))
        return script

    return make


@pytest.fixture(scope="module")
def copying(tmp_path_factory) -> str:
    """A line for `fake_compiler`: hands out a real library, built once, instead of compiling for seconds each time."""
    real = tmp_path_factory.mktemp("built") / "kernel.so"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LLM_LATENCY_CACHE", str(real.parent))
        real.write_bytes(kernel_library.build("-O0").read_bytes())
    return f'while [ "$1" != -o ]; do shift; done; cp {real} "$2"'


def one_sentence(text: str) -> bool:
    return "\n" not in text and not text.endswith(".") and 40 < len(text) < 400


# -- building ---------------------------------------------------------------------------------------------------------


@needs_kernel
def test_it_is_built_once_and_found_again(cache, fake_compiler, tmp_path):
    """Guards against seconds of compiling at each start, and against a library half written that looks finished."""
    log = tmp_path / "log"
    fake_compiler(f'echo "$@" >> {log}', f'exec {REAL} "$@"')
    first = kernel_library.build("-O0")
    built = len(log.read_text().splitlines())
    assert kernel_library.build("-O0") == first
    assert len(log.read_text().splitlines()) - built == 1  # asked for its version, and no more
    assert [path.name for path in (cache / "kernel").iterdir()] == [first.name]
    assert first.stat().st_mode & 0o077 == 0 and (cache / "kernel").stat().st_mode & 0o077 == 0
    assert kernel_library.problem() is None


@needs_kernel
def test_another_source_compiler_processor_or_flag_is_another_library(cache, copying, fake_compiler, monkeypatch):
    """Guards against a library for other instructions, copied with a home folder, which would end the process."""
    fake_compiler('if [ "$1" = --version ]; then echo one; exit; fi', copying)
    names = {kernel_library.build("-O0").name, kernel_library.build("-O0", "-DLANES=4").name}
    fake_compiler('if [ "$1" = --version ]; then echo two; exit; fi', copying)
    names.add(kernel_library.build("-O0").name)
    monkeypatch.setattr(kernel_library, "_processor", lambda: "another")
    names.add(kernel_library.build("-O0").name)
    monkeypatch.setattr(kernel_library, "SOURCES", ("kernel.cpp", "kernel_vectors.h"))
    names.add(kernel_library.build("-O0").name)
    assert len(names) == 5


def load_it() -> None:
    assert kernel_library.load("-O0").kernel_lanes() in (4, 8, 16)


@needs_kernel
def test_several_processes_may_build_at_once(cache, copying, fake_compiler):
    """Guards against a process that loads what another one is still writing."""
    fake_compiler('if [ "$1" = --version ]; then echo one; exit; fi', copying)
    run_at_once(load_it, (), (), ())
    assert len(list((cache / "kernel").iterdir())) == 1


@pytest.mark.long
@needs_kernel
@pytest.mark.skipif(sys.platform != "linux", reason="the list of loaded libraries is Linux's")
def test_there_is_one_openmp_runtime():
    """Guards against a second pool of spinning threads: after a pass, the process holds torch's libgomp alone."""
    code = (
        "import kernel_toys, torch\n"
        "from llm_latency.engine.kernel_decoder import KernelDecoder\n"
        "KernelDecoder.from_model(kernel_toys.make_toy('llama'), threads=2).prefill(torch.tensor([[5, 6]]))\n"
        "names = {line.split()[-1] for line in open('/proc/self/maps') if 'libgomp' in line or 'omp5' in line}\n"
        "assert len(names) == 1, names\n"
    )
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    }
    if "clang" in kernel_library._version(kernel_library.compiler()):
        pytest.skip("clang's OpenMP needs a runtime of its own")
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, timeout=600)


# -- refusing ---------------------------------------------------------------------------------------------------------


@unix
@pytest.mark.parametrize("mode", [0o770, 0o777, 0o1777])
def test_a_folder_that_others_may_write_is_refused(cache, mode):
    """Guards against running code that somebody else has put there."""
    (cache / "kernel").mkdir()
    (cache / "kernel").chmod(mode)
    assert "others may write to" in kernel_library.problem() and "chmod go-w" in kernel_library.problem()
    assert one_sentence(kernel_library.problem())


@unix
def test_a_cache_that_others_may_write_is_refused(cache):
    """Guards against the folder itself being moved aside and replaced; a sticky one, like /tmp, forbids that."""
    cache.chmod(0o777)
    assert "others may write to" in kernel_library.problem()


@needs_kernel
def test_a_library_that_others_may_write_is_refused(cache):
    """Guards against the same one level down."""
    library = kernel_library.build("-O0")
    library.chmod(0o722)
    with pytest.raises(KernelUnavailable, match="a library is code"):
        kernel_library.build("-O0")


@needs_kernel
def test_a_library_of_another_user_is_refused(cache, monkeypatch):
    """Guards against one that its owner may change at any time; root's is trusted, since root may do anything."""
    library, real = kernel_library.build("-O0"), os.geteuid()
    if real == 0:
        os.chown(library, 12345, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: real + 1)
    with pytest.raises(KernelUnavailable, match="belongs to another user"):
        kernel_library.build("-O0")


@needs_kernel
def test_a_cache_that_is_only_for_reading_is_done_without(cache, monkeypatch):
    """Guards against a classroom whose shared, read-only cache would take the kernel away."""
    monkeypatch.setattr(os, "access", lambda path, mode, access=os.access: mode != os.W_OK and access(path, mode))
    path = kernel_library.build("-O0")
    assert path.exists() and cache not in path.parents
    assert path.parent.stat().st_mode & 0o077 == 0


@needs_kernel
def test_a_damaged_library_is_named(cache):
    """Guards against a crash or a bare OSError where a disk was full."""
    path = kernel_library.build("-O0")
    path.write_bytes(b"not a library")
    with pytest.raises(KernelUnavailable, match=r"delete .*kernel-.*so and try again"):
        kernel_library.load("-O0")


# -- saying why -------------------------------------------------------------------------------------------------------


@unix
def test_without_a_compiler(cache, monkeypatch):
    """Guards against a traceback where a sentence with the remedy helps."""
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(cache))
    monkeypatch.setattr(sys, "prefix", str(cache))
    problem = kernel_library.problem()
    assert one_sentence(problem) and "no C++ compiler" in problem and "install" in problem


@unix
@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (("exit 1",), "--version fails"),
        (
            ('if [ "$1" = --version ]; then echo 1; exit; fi', "echo 'x.cpp:1: fatal error: no atomic' >&2; exit 1"),
            "no atomic",
        ),
    ],
)
def test_with_a_broken_compiler(cache, fake_compiler, lines, message):
    """Guards against a compiler without its headers, which passes every test but that of compiling."""
    fake_compiler(*lines)
    problem = kernel_library.problem()
    assert one_sentence(problem) and message in problem and "install" in problem
    assert not list((cache / "kernel").iterdir())


@pytest.mark.parametrize("system", ["Windows", "FreeBSD"])
def test_on_a_system_without_it(cache, monkeypatch, system):
    """Guards against a doctor that recommends a compiler where none would help."""
    monkeypatch.setattr(kernel_library.platform, "system", lambda: system)
    problem = kernel_library.problem()
    assert one_sentence(problem) and f"not on {system}" in problem


@unix
def test_on_musl_and_on_a_mac_without_libomp(cache, monkeypatch, tmp_path):
    """Guards against a link error where the reason is known beforehand."""
    monkeypatch.setattr(kernel_library.sysconfig, "get_config_var", lambda name: "x86_64-pc-linux-musl")
    assert one_sentence(kernel_library.problem()) and "musl" in kernel_library.problem()
    monkeypatch.undo()
    monkeypatch.setenv("LLM_LATENCY_CACHE", str(cache))
    monkeypatch.setattr(kernel_library.platform, "system", lambda: "Darwin")
    monkeypatch.setattr(kernel_library.torch, "__file__", str(tmp_path / "__init__.py"))
    if kernel_library.problem() is not None and "C++ compiler" not in kernel_library.problem():
        assert one_sentence(kernel_library.problem()) and "libomp" in kernel_library.problem()
