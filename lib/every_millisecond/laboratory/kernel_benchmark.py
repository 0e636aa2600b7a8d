"""Our kernels beside the production ones: the same tensors, in turns, against the machine's own limits.

`llm-latency gpu-check` runs `CASES` on a GPU. `SMALLEST` runs anywhere, on a CPU through Triton's interpreter: it shows
that the benchmark works and says nothing about speed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from llm_latency.arguments import check_device
from llm_latency.attention.backend_facts import flash_attn_function
from llm_latency.attention.dispatch import attend, cannot
from llm_latency.timing import compare

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class Case:
    """One attention call. kind: "prefill" (seq causal queries on seq keys) or "decode" (one query on seq keys)."""

    kind: str
    seq: int
    heads: int = 32
    kv_heads: int = 32
    head_dim: int = 128
    dtype: str = "bfloat16"
    batch: int = 1

    def __post_init__(self) -> None:
        if self.kind not in ("prefill", "decode"):
            raise ValueError(f"kind={self.kind!r}; expected 'prefill' or 'decode'")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype={self.dtype!r}; expected one of {', '.join(DTYPES)}")
        for name in ("seq", "heads", "kv_heads", "head_dim", "batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}; expected 1 or more")

    @property
    def flops(self) -> float:
        """Multiplications and additions of both products; causality halves a prefill's."""
        queries = (self.seq + 1) / 2 if self.kind == "prefill" else 1
        return 4.0 * self.batch * self.heads * queries * self.seq * self.head_dim

    @property
    def cache_bytes(self) -> int:
        """Bytes of the keys and values, which a decode step must read once."""
        return 2 * self.batch * self.seq * self.kv_heads * self.head_dim * DTYPES[self.dtype].itemsize

    def tensors(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Random q, k, v [batch, seq, heads, head_dim]."""
        generator = torch.Generator(device).manual_seed(0)

        def make(seq: int, heads: int) -> Tensor:
            shape = (self.batch, seq, heads, self.head_dim)
            return torch.randn(shape, device=device, generator=generator).to(DTYPES[self.dtype])

        queries = self.seq if self.kind == "prefill" else 1
        return make(queries, self.heads), make(self.seq, self.kv_heads), make(self.seq, self.kv_heads)


CASES = (
    *(Case("prefill", seq) for seq in (128, 256, 512, 1024, 2048, 4096, 8192)),
    Case("prefill", 4096, heads=28, kv_heads=4),  # Qwen2.5-7B's heads
    Case("prefill", 4096, heads=9, kv_heads=3, head_dim=64),  # SmolLM2-135M's
    *(Case("decode", seq) for seq in (256, 2048, 8192, 32_768)),
    Case("decode", 32_768, heads=28, kv_heads=4),
)
SMALLEST = Case("prefill", 40, heads=2, kv_heads=1, head_dim=16, dtype="float32")


def contestants(case: Case, device: torch.device) -> dict[str, Callable[[], Tensor]]:
    """What can do this case here: "triton", "flash", flash-attn, and each of SDPA's own kernels as "sdpa:name"."""
    q, k, v = case.tensors(device)
    causal = case.kind == "prefill"
    found: dict[str, Callable[[], Tensor]] = {}
    if cannot("triton", q) is None:
        found["triton"] = lambda: attend(q, k, v, backend="triton", causal=causal)
    if case.kind == "prefill":
        found["flash"] = lambda: attend(q, k, v, backend="flash", causal=causal)
    if cannot("flash_attn", q) is None:
        function, name = flash_attn_function()
        found[name] = lambda: function(q, k, v, softmax_scale=case.head_dim**-0.5, causal=causal)
    from torch.nn.attention import SDPBackend, sdpa_kernel

    qt, kt, vt = (x.transpose(1, 2) for x in (q, k, v))
    grouped = case.heads != case.kv_heads
    for name in ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION", "MATH"):

        def run(name: str = name) -> Tensor:
            with sdpa_kernel(getattr(SDPBackend, name)):
                return torch.nn.functional.scaled_dot_product_attention(
                    qt, kt, vt, is_causal=causal, enable_gqa=grouped
                )

        try:
            run()
        except (RuntimeError, torch.OutOfMemoryError):  # this kernel cannot do this case on this device
            continue
        found["sdpa:" + name.removesuffix("_ATTENTION").lower()] = run
    return found


def recorded(fn: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """The same work as a CUDA graph, so that a kernel of some microseconds is not timed as its launch from Python."""
    if device.type != "cuda":
        return fn
    side = torch.cuda.Stream(device)
    with torch.cuda.stream(side):
        for _ in range(3):
            fn()
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fn()
    return graph.replay


def run_case(case: Case, *, device: str | torch.device | None = None, rounds: int = 20) -> dict:
    """Time every contestant in turns, and return the case, the rates and how "triton" stands as a JSON dictionary.

    A decode case empties the cache before each sample: a real step comes after the rest of the model has passed
    through it. Contestants that cannot be recorded as a graph are timed as they are, and marked.
    """
    device = check_device(device)
    functions: dict[str, Callable[[], object]] = {}
    launched: list[str] = []
    for name, fn in contestants(case, device).items():
        if name == "flash":  # a loop in Python, which looks at values: its launches are part of it
            functions[name] = fn
            launched.append(name)
            continue
        try:
            functions[name] = recorded(fn, device)
        except RuntimeError:
            functions[name] = fn
            launched.append(name)
    result = compare(functions, rounds=rounds, warmup=3, device=device, cold_cache=case.kind == "decode")
    medians = result.median_ms
    row: dict = {
        "case": asdict(case),
        "device": str(device),
        "interpreted": device.type == "cpu",
        "samples_ms": {name: list(samples) for name, samples in result.samples_ms.items()},
        "first_call_ms": result.first_call_ms,
        "median_ms": medians,
        "timed_with_launch": launched,
        "tflops": {name: case.flops / ms / 1e9 for name, ms in medians.items()},
        "cache_gbps": {name: case.cache_bytes / ms / 1e6 for name, ms in medians.items()},
    }
    sdpa = [name for name in medians if name.startswith("sdpa:")]
    if sdpa and "triton" in medians:
        best = min(sdpa, key=medians.get)
        row["best_sdpa"] = best
        row["triton_speed_over_best_sdpa"] = result.speedup("triton", best).median
    return row
