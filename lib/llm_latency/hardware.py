"""What this machine is and how fast it could be: facts, its 16-bit format, measured ceilings, and datasheet peaks of
named GPUs.

A roofline needs two numbers: bytes per second and operations per second. On a named GPU they stand in a datasheet; on
any machine they can be measured. Both are here, apart.
"""

from __future__ import annotations

import platform
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch

from llm_latency.arguments import DTYPES, check_device
from llm_latency.host import cpu_name, last_level_cache_bytes, memory_bytes, usable_cores


@dataclass(frozen=True, slots=True)
class GpuPeak:
    """Datasheet figures: GB/s, dense TFLOP/s without sparsity, GB (all decimal). FP8 is None where there is none."""

    bandwidth_gbps: float
    bf16_tflops: float
    fp32_tflops: float
    fp8_tflops: float | None
    memory_gb: float


# Sources: NVIDIA's datasheets of the A100 (2020), H100 (2022), H200 (2023), L4 (2023), T4 (2018). "fp32" is without
# TF32. The T4 has no BF16; its FP16 tensor-core rate stands there.
DATASHEET: dict[str, GpuPeak] = {
    "A100-40GB-SXM": GpuPeak(1555, 312, 19.5, None, 40),
    "A100-80GB-SXM": GpuPeak(2039, 312, 19.5, None, 80),
    "H100-SXM": GpuPeak(3350, 989, 67, 1979, 80),
    "H200-SXM": GpuPeak(4800, 989, 67, 1979, 141),
    "L4": GpuPeak(300, 121, 30.3, 242, 24),
    "T4": GpuPeak(320, 65, 8.1, None, 16),
}


def datasheet_peak(name: str) -> GpuPeak:
    """The datasheet figures of a GPU by its key in `DATASHEET`. Raises KeyError that lists the known names."""
    if name not in DATASHEET:
        raise KeyError(f"no datasheet figures for {name!r}; known: {', '.join(DATASHEET)}")
    return DATASHEET[name]


def bf16_is_native(device: str | torch.device | None = None) -> bool:
    """Whether the device itself multiplies BF16, rather than widening every number to FP32 first.

    A GPU without BF16 units (compute capability below 8.0) still accepts BF16 tensors and emulates them, so that "it
    runs" proves nothing. On a CPU, oneDNN knows: x86 needs AVX512-BF16 or AMX, Arm needs its BF16 extension.
    """
    device = check_device(device)
    if device.type == "cuda":
        with torch.cuda.device(device):
            return torch.cuda.is_bf16_supported(including_emulation=False)
    return bool(torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def half_dtype(device: str | torch.device | None = None) -> torch.dtype:
    """The 16-bit dtype to load a model in: BF16, or FP16 on a GPU without BF16 units.

    On a CPU it is BF16 even where that is widened to FP32 in the registers: the bytes read are halved all the same, and
    FP16 would be widened too.
    """
    device = check_device(device)
    return torch.float16 if device.type == "cuda" and not bf16_is_native(device) else torch.bfloat16


def limit_threads() -> int:
    """Give PyTorch no more threads than this process has cores; returns how many it has now.

    PyTorch counts the host's cores. In a container with a quota (`docker run --cpus=2` on 64 cores) it starts a thread
    for each of them, which then wait for one another. Fewer threads, chosen by `torch.set_num_threads` or
    OMP_NUM_THREADS, stay.
    """
    if torch.get_num_threads() > (cores := usable_cores()):
        torch.set_num_threads(cores)
    return torch.get_num_threads()


def machine_facts() -> dict[str, str | int | float | bool | None]:
    """Names, versions and sizes that a result must carry so that another person can judge it."""
    import transformers

    facts: dict[str, str | int | float | bool | None] = {
        "cpu": cpu_name(),
        "cores": usable_cores(),
        "threads": torch.get_num_threads(),
        "memory_gb": round((memory_bytes() or 0) / 1e9, 1) or None,
        "last_level_cache_mb": round(last_level_cache_bytes() / 2**20, 1),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "gpu": None,
    }
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        facts |= {
            "gpu": properties.name,
            "gpu_memory_gb": round(properties.total_memory / 1e9, 1),
            "gpu_capability": f"{properties.major}.{properties.minor}",
            "cuda": torch.version.cuda,
        }
    return facts


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What this machine's memory and arithmetic reached in simple loops, the best of several tries.

    read_gbps: a sum over an array far larger than the cache. copy_gbps: bytes read plus bytes written.
    gemv_gbps: weight bytes per second of a matrix times one vector, by dtype ("int8" and "int4" where PyTorch has
    packed kernels for them): the decode ceiling.
    matmul_gflops: rate of a square matrix product, by dtype: the prefill ceiling.
    """

    device: str
    name: str
    threads: int
    read_gbps: float
    copy_gbps: float
    gemv_gbps: dict[str, float]
    matmul_gflops: dict[str, float]


_LONG_S = 2.0


def best_seconds(fn: Callable[[], object], device: torch.device, repeats: int = 7) -> float:
    """Shortest of several runs: a ceiling asks what the machine can do, not what it usually does.

    On a CPU, work of more than two seconds is run once: warming up is nothing beside it, and nobody waits for seven.
    """

    def once() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        fn()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - start

    first = once()
    return first if first > _LONG_S and device.type == "cpu" else min(once() for _ in range(repeats))


_SIDE = 4096  # rows and columns of the matrices that a vector is multiplied with
_GROUP = 32  # weights of an INT4 block


def _gemv_gbps(product: Callable[..., object], stored: tuple[torch.Tensor, ...], working_set: int) -> float:
    """GB/s of `product(*stored)` over as many copies of the stored tensors as fill `working_set` bytes."""
    nbytes = sum(tensor.nbytes for tensor in stored)
    copies = [tuple(tensor.clone() for tensor in stored) for _ in range(max(1, working_set // nbytes))]

    def read_all() -> None:
        for tensors in copies:
            product(*tensors)

    return len(copies) * nbytes / best_seconds(read_all, stored[0].device) / 1e9


def _packed_gemv_gbps(working_set: int) -> dict[str, float]:
    """The same for weights in PyTorch's packed CPU kernels, scales counted; a kernel that is not there is left out."""
    x = torch.ones(1, _SIDE, dtype=torch.bfloat16)
    found = {}
    try:
        q = torch.ones(_SIDE, _SIDE, dtype=torch.int8)
        scales = torch.ones(_SIDE, dtype=torch.bfloat16)
        found["int8"] = _gemv_gbps(lambda q, s: torch._weight_int8pack_mm(x, q, s), (q, scales), working_set)
        blocks = torch.ones(_SIDE // _GROUP, _SIDE, 2, dtype=torch.bfloat16)
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(q.int(), 1)
        multiply = torch.ops.aten._weight_int4pack_mm_for_cpu
        found["int4"] = _gemv_gbps(lambda p, b: multiply(x, p, _GROUP, b), (packed, blocks), working_set)
    except (RuntimeError, NotImplementedError, AttributeError):
        pass  # this build or processor has no such kernel; the roofline then holds packed weights to plain reading
    return found


def _matmul_gflops(side: int, dtype: torch.dtype, device: torch.device) -> float:
    """GFLOP/s of a square matrix product."""
    a, b = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    return 2 * side**3 / best_seconds(lambda: a @ b, device, repeats=4) / 1e9


def measure_ceilings(device: str | torch.device | None = None) -> Ceilings:
    """Measure this machine's ceilings (about 5 s on two cores). Use `ceilings` for the stored result.

    The GEMV rotates through 256 MiB of matrices (4 GiB on a GPU), as a decode step walks through a model's layers: one
    matrix read again and again would sit in a near cache and report a bandwidth that no decode step ever sees.
    """
    device = check_device(device)
    on_gpu = device.type == "cuda"
    size = 2**30 if on_gpu else min(2**30, max(2**28, 2 * last_level_cache_bytes()))  # bytes that no cache holds
    array = torch.ones(size // 4, device=device)
    target = torch.empty_like(array)
    read_gbps = size / best_seconds(array.sum, device) / 1e9
    copy_gbps = 2 * size / best_seconds(lambda: target.copy_(array), device) / 1e9

    working_set = 2**32 if on_gpu else 2**28
    side = 8192 if on_gpu else 2048
    gemv: dict[str, float] = {}
    matmul: dict[str, float] = {}
    for name in ("float32", "bfloat16", "float16") if on_gpu else ("float32", "bfloat16"):
        weight = torch.ones(_SIDE, _SIDE, device=device, dtype=DTYPES[name])
        x = torch.ones(1, _SIDE, device=device, dtype=DTYPES[name])
        gemv[name] = _gemv_gbps(lambda w, x=x: torch.nn.functional.linear(x, w), (weight,), working_set)
        matmul[name] = _matmul_gflops(side // 4, DTYPES[name], device)
        # A processor without BF16 products takes minutes over the large one, and its rate is no other.
        if 2 * side**3 / matmul[name] / 1e9 < _LONG_S:
            matmul[name] = _matmul_gflops(side, DTYPES[name], device)
    if not on_gpu:
        gemv |= _packed_gemv_gbps(working_set)
    name = torch.cuda.get_device_name(device) if on_gpu else cpu_name()
    return Ceilings(str(device), name, torch.get_num_threads(), read_gbps, copy_gbps, gemv, matmul)


_BEATEN = 1.25
_trusted: set[str] = set()  # the stored figures that a product of this process has not beaten


def _beaten(kept: Ceilings, device: torch.device) -> bool:
    """Whether a quick product is clearly faster than the stored ceiling: that was measured while something else ran."""
    return _matmul_gflops(1024, torch.float32, device) > _BEATEN * kept.matmul_gflops["float32"]


def ceilings(device: str | torch.device | None = None, *, refresh: bool = False) -> Ceilings:
    """This machine's measured ceilings, from the cache folder when it was measured there before.

    The stored figures belong to one device, one torch and one number of threads; a change of any measures anew, and so
    does a processor that now beats them by a quarter, which is tried once a process (0.1 s).
    """
    from llm_latency import files  # here: whoever asks for the 16-bit format alone, as the decoders do, needs no files

    device = check_device(device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()
    key = {"device": str(device), "name": name, "threads": torch.get_num_threads(), "torch": torch.__version__}
    path = files.cache_folder() / "ceilings.json"
    for entry in files.read_json(path, default=[]):
        if entry["key"] == key and not refresh:
            kept = Ceilings(**entry["ceilings"])
            if str(key) in _trusted or device.type != "cpu" or not _beaten(kept, device):
                _trusted.add(str(key))
                return kept
    measured = measure_ceilings(device)
    new = {"key": key, "ceilings": asdict(measured)}
    try:
        files.update_json(path, lambda stored: [entry for entry in stored if entry["key"] != key] + [new], default=[])
    except OSError as error:  # a shared, read-only cache still serves; it is only measured anew each time
        warnings.warn(f"measured ceilings not stored in {path}: {error.strerror}", stacklevel=2)
    return measured
