"""What a GPU may have against the course: each a sentence with its remedy, for `llm-latency doctor` and `make gpu`."""

from __future__ import annotations

import re
import shutil
import subprocess

import torch

from every_millisecond import gpu_memory
from every_millisecond.machine_check import Check, Row
from llm_latency import models

OLDEST = (7, 5)  # Turing, the T4: PyTorch's wheels for CUDA 12.8 and later leave out what is older
OTHERS_GB = 2.0  # used by others: more than a driver's own
HIDE = 'hide the GPU with CUDA_VISIBLE_DEVICES="" and the notebooks run on the CPU'


def checks() -> list[Check]:
    """The answers of every row. Where torch sees no GPU that is one row alone, which says why."""
    return [row.check() for row in (ROWS if torch.cuda.is_available() else ROWS[:1])]


def _cuda() -> Check:
    """Whether torch sees a GPU; if it does not, whether the driver sees one, and what stands between the two."""
    if torch.cuda.is_available():
        return Check("CUDA", True, f"{torch.cuda.get_device_name(0)}, torch built for CUDA {torch.version.cuda}")
    gpu = _nvidia_smi("--query-gpu=name", "--format=csv,noheader").partition("\n")[0].strip()
    if not gpu:
        return Check("CUDA", False, "none; the notebooks teach the same on the CPU", "nothing to do without a GPU")
    if torch.version.cuda is None:
        remedy = "install torch from the CUDA index that pytorch.org's Start Locally names; until then the CPU serves"
        return Check("CUDA", False, f"{gpu} is here, but torch {torch.__version__} is built for the CPU alone", remedy)
    driver = _driver_cuda()
    if driver and _version(driver) < _version(torch.version.cuda):
        found = f"{gpu}: its driver knows CUDA up to {driver}, torch is built for {torch.version.cuda}"
        return Check("CUDA", False, found, f"update the driver, or install a torch that is built for CUDA {driver}")
    remedy = "python -c 'import torch; torch.cuda.init()' says why; is CUDA_VISIBLE_DEVICES set?"
    return Check("CUDA", False, f"{gpu} is here, but torch, built for CUDA {torch.version.cuda}, cannot use it", remedy)


def _age() -> Check:
    """Whether torch has kernels for a GPU so old."""
    capability = torch.cuda.get_device_capability(0)
    found = f"sm_{capability[0]}{capability[1]}"
    if capability < OLDEST:
        return Check("GPU age", False, f"{found}; the course needs sm_75 (T4) or newer", HIDE, needed=True)
    if capability < (8, 0):
        found += ": multiplies FP16 and no BF16; FP16 is taken where the course says 16 bits"
    return Check("GPU age", True, found)


def _memory() -> Check:
    """Whether every notebook fits on the card, on the profile that would be chosen."""
    profile = models.choose_profile()[0].name
    total = torch.cuda.get_device_properties(0).total_memory
    needs = gpu_memory.needs(profile)
    too_large = {number: nbytes for number, nbytes in needs.items() if nbytes > total}
    if not too_large:
        return Check("GPU memory", True, f"{total / 1e9:.1f} GB; every notebook fits on {profile}")
    listed = ", ".join(f"{number} ({nbytes / 1e9:.1f})" for number, nbytes in too_large.items())
    found = f"{total / 1e9:.1f} GB; on {profile} too little for notebooks {listed} GB"
    smaller = "LLM_LATENCY_PROFILE=smollm2-135m" if profile != "smollm2-135m" else 'CUDA_VISIBLE_DEVICES=""'
    return Check("GPU memory", False, found, f"run these with {smaller}; docs/gpu.md has the counted table")


def _sharing() -> Check:
    """Whether someone else is on the GPU: then every time measured there is theirs, too."""
    free, total = torch.cuda.mem_get_info()
    used = (total - free - torch.cuda.memory_reserved()) / 1e9
    listed = _nvidia_smi("--query-compute-apps=pid,used_memory", "--format=csv,noheader").splitlines()
    others = f" ({'; '.join(f'process {line.strip()}' for line in listed)})" if listed else ""
    found = f"{used:.1f} of {total / 1e9:.0f} GB used by others or the driver{others}"
    remedy = "end them or wait when timing, one at a time: docs/classroom.md, Sharing one GPU"
    return Check("GPU sharing", used < OTHERS_GB, found, remedy)


def _count() -> Check:
    count, name = torch.cuda.device_count(), torch.cuda.get_device_name(0)
    if count == 1:
        return Check("GPU choice", True, f"{name}, the only one that is visible")
    found = f"{count} GPUs are visible; the first, {name}, is used, and no other"
    return Check("GPU choice", True, f"{found} (CUDA_VISIBLE_DEVICES=1 takes the second)")


def _slice() -> Check:
    """Whether this is a part of a GPU: torch gives it the GPU's name with "MIG" and the slice's in it."""
    name = torch.cuda.get_device_name(0)
    if "MIG" not in name:
        return Check("whole GPU", True, "no MIG slice")
    remedy = "compare with measured ceilings (doctor --refresh), never with a datasheet's, which are the whole GPU's"
    return Check("whole GPU", False, f"{name} is a MIG slice: its own memory and its share of the bandwidth", remedy)


def _compiler() -> Check:
    """nvcc is for building flash-attn alone: Triton brings its own assembler."""
    found = shutil.which("nvcc")
    if found is None:
        remedy = f"install the CUDA {torch.version.cuda} toolkit if you want flash-attn built; SDPA serves in its place"
        return Check("nvcc", False, "none: flash-attn cannot be built; Triton and torch.compile do not need it", remedy)
    said = _output([found, "--version"])
    release = re.search(r"release (\d+\.\d+)", said)
    if release and _version(release[1])[0] != _version(torch.version.cuda)[0]:
        said = f"CUDA {release[1]}, but torch is built for {torch.version.cuda}: flash-attn cannot be built"
        return Check("nvcc", False, said, f"install the CUDA {torch.version.cuda} toolkit, or leave flash-attn out")
    return Check("nvcc", True, f"CUDA {release[1]}" if release else found)


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:2])


def _driver_cuda() -> str | None:
    """The newest CUDA that the driver knows, from the head of nvidia-smi's own table."""
    found = re.search(r"CUDA Version:\s*(\d+\.\d+)", _nvidia_smi())
    return found[1] if found else None


def _nvidia_smi(*options: str) -> str:
    """What nvidia-smi says of the first GPU; empty where it is not there."""
    return _output(["nvidia-smi", "--id=0", *options] if options else ["nvidia-smi"])


def _output(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


_DRIVER = "the driver or torch's build is at fault; python -c 'import torch; torch.cuda.init()' tells"
ROWS = tuple(
    Row(name, ask, _DRIVER)
    for name, ask in (
        ("CUDA", _cuda),
        ("GPU age", _age),
        ("GPU memory", _memory),
        ("GPU sharing", _sharing),
        ("GPU choice", _count),
        ("whole GPU", _slice),
        ("nvcc", _compiler),
    )
)
