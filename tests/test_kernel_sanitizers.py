"""The kernel under the compiler's sanitizers, and compiled for processors that are not at hand."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path

import kernel_toys
import pytest

from llm_latency.engine import kernel_library

pytestmark = [kernel_toys.needs_kernel(), pytest.mark.long]
SOURCE = Path(kernel_library.__file__).parent
SOAK = Path(__file__).with_name("kernel_soak.cpp")
BASE = [*(flag for flag in kernel_library.FLAGS if flag != "-O3"), "-O1", "-g", "-pthread", f"-I{SOURCE}"]


def compile_soak(tmp_path: Path, *flags: str) -> Path:
    """The soak program, or a skip that says why this compiler cannot build it."""
    program = tmp_path / "soak"
    command = [*kernel_library.compiler(), *BASE, *flags, str(SOAK), "-o", str(program)]
    done = subprocess.run([*command, "-fopenmp"], capture_output=True, text=True, check=False)
    if done.returncode and any(flag.startswith("-fsanitize") for flag in flags) and "sanitize" in done.stderr + "asan":
        plain = [*kernel_library.compiler(), *BASE, str(SOAK), "-o", str(program), "-fopenmp"]
        if subprocess.run(plain, capture_output=True, check=False).returncode == 0:
            pytest.skip(f"this compiler has no {flags[0]}: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    return program


@pytest.mark.parametrize("lanes", [4, 8, 16])
def test_memory_and_behaviour_are_defined(tmp_path, lanes):
    """Guards against a read or write beyond its end and against undefined behaviour, on every width of vectors."""
    flags = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", f"-DLANES={lanes}", "-march=native"]
    program = compile_soak(tmp_path, *flags)
    done = subprocess.run([program, "40"], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"40 rounds on {lanes} lanes" in done.stdout


def test_no_two_threads_touch_one_number(tmp_path):
    """Guards against a phase that lacks its barrier: a race may give right results for years."""
    program = compile_soak(tmp_path, "-fsanitize=thread", "-march=native")
    done = subprocess.run([program, "30"], capture_output=True, text=True, timeout=600, check=False)
    if done.returncode and "unexpected memory mapping" in done.stderr:
        pytest.skip("the thread sanitizer does not run on this system: unexpected memory mapping")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("processor", ["icelake-server", "skylake-avx512", "sapphirerapids", "haswell", "x86-64"])
def test_it_compiles_for_other_processors(tmp_path, processor):
    """Guards against instructions that only a machine elsewhere would have found not to compile, VNNI's among them."""
    if platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip("the compiler here builds for another family of processors")
    command = [*kernel_library.compiler(), *kernel_library.FLAGS, "-O1", "-fopenmp", f"-march={processor}", "-S", "-o"]
    assembly = tmp_path / "kernel.s"
    done = subprocess.run(
        [*command, str(assembly), str(SOURCE / "kernel.cpp")], capture_output=True, text=True, check=False
    )
    if "bad value" in done.stderr:
        pytest.skip(f"this compiler does not know -march={processor}")
    assert done.returncode == 0, done.stderr
    text = assembly.read_text()
    assert ("vpdpbusd" in text) == (processor in ("icelake-server", "sapphirerapids"))
    assert "vfmadd" not in text  # a contracted sum would be rounded otherwise than on the next processor
