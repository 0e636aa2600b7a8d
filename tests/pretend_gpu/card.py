"""The cards that the pretend device can be."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Card:
    """What torch tells of a GPU. total_memory, L2_cache_size: bytes; CUDA reports a little less than the name says."""

    name: str
    major: int
    minor: int
    total_memory: int
    multi_processor_count: int
    L2_cache_size: int
    shared_memory_per_block_optin: int = 101_376
    max_threads_per_multi_processor: int = 1536
    warp_size: int = 32
    is_integrated: int = 0

    @property
    def bfloat16(self) -> bool:
        """Whether it multiplies BF16 itself."""
        return self.major >= 8


CARDS = {
    "T4": Card("Tesla T4", 7, 5, 15_828_320_256, 40, 4 << 20, 65_536, 1024),
    "L4": Card("NVIDIA L4", 8, 9, 23_580_639_232, 58, 48 << 20),
    "A100-40GB": Card("NVIDIA A100-SXM4-40GB", 8, 0, 42_285_268_992, 108, 40 << 20, 166_912, 2048),
    "A100-80GB": Card("NVIDIA A100-SXM4-80GB", 8, 0, 85_017_624_576, 108, 40 << 20, 166_912, 2048),
    "H100": Card("NVIDIA H100 80GB HBM3", 9, 0, 84_929_347_584, 132, 50 << 20, 232_448, 2048),
    "H200": Card("NVIDIA H200", 9, 0, 150_110_011_392, 132, 60 << 20, 232_448, 2048),
}
