"""Figures that others have published, each with its setting and its source."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Published:
    """One figure: its value in `unit`, in which setting, by whom."""

    value: float
    unit: str
    setting: str
    source: str

    def __str__(self) -> str:
        return f"published: {self.value:.4g} {self.unit}, {self.setting} ({self.source})"


_GPT_FAST = "PyTorch blog, 2023-11-30"
_A100 = "Llama-7B, batch 1, A100-80GB"

PUBLISHED: dict[str, Published] = {
    "eager": Published(25.5, "tok/s", f"{_A100}, BF16 uncompiled", _GPT_FAST),
    "compiled": Published(107, "tok/s", f"{_A100}, static cache and compile", _GPT_FAST),
    "int8": Published(157, "tok/s", f"{_A100}, the same and INT8 weights", _GPT_FAST),
    "int4": Published(202, "tok/s", f"{_A100}, the same and INT4 weights", _GPT_FAST),
    "best": Published(245, "tok/s", f"{_A100}, everything combined, with speculation", _GPT_FAST),
    "bandwidth": Published(1397, "GB/s", "reached at 104.9 tok/s, Llama-2-7B, A100-80GB", "gpt-fast README"),
    "speculation-t5": Published(3, "times", "T5-XXL, at best; 2 at least", "Leviathan et al., 2023"),
    "speculation-tiny": Published(1.3, "times", "Llama-7B with TinyLlama as draft", _GPT_FAST),
    "speculation-load": Published(0.56, "times", "at high load: 1.4 to 1.8 times slower", "vLLM blog, 2024-10-17"),
    "cache-loss": Published(100 * (6.2344 / 6.2322 - 1), "%", "8-bit cache, perplexity", "llama.cpp PR 7412"),
    "orca": Published(36.9, "times", "throughput at equal latency, over static batches", "Orca, OSDI 2022"),
    "vllm": Published(24, "times", "throughput over HF, at best; 14 at least", "vLLM blog, 2023-06-20"),
    "vllm-waste": Published(4, "%", "of the KV cache wasted at most; 60 to 80 before", "vLLM blog, 2023-06-20"),
    "flash2": Published(73, "%", "of an A100's peak at most, 50 at least", "FlashAttention-2, arXiv 2307.08691"),
    "flash3": Published(740, "TFLOP/s", "FP16 on an H100, 75% of its peak", "FlashAttention-3, arXiv 2407.08608"),
}
