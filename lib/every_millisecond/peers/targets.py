"""What the fast decoder must reach by itself: `python -m every_millisecond.peers.targets`.

Its share of the bandwidth that a plain matrix times a vector reaches, and how much a step grows with the position. Both
are ratios of things measured in turns in one process.
"""

from __future__ import annotations

import os
import subprocess
import sys

import torch
import torch.nn.functional as F

from every_millisecond.openmp import process_environment
from llm_latency import hardware, models
from llm_latency.engine import FastDecoder
from llm_latency.timing import Comparison, compare

SIDE = 4096  # of the square matrices of the plain product, as in `hardware.measure_ceilings`
NEAR, FAR = 64, 512  # positions between which a step may not grow by much


def gemv_share(decoder: FastDecoder, rounds: int = 15) -> tuple[float, Comparison]:
    """The decoder's weight bytes per second over those of BF16 matrices times a vector, in turns."""
    count = max(1, decoder.step_bytes // (2 * SIDE * SIDE))  # as many bytes as a step reads, as nearly as they go
    matrices = [torch.randn(SIDE, SIDE, device=decoder.device).to(torch.bfloat16) for _ in range(count)]
    vector = torch.randn(1, SIDE, device=decoder.device).to(torch.bfloat16)

    def plain() -> None:
        for matrix in matrices:
            F.linear(vector, matrix)

    start_at(decoder, NEAR)
    turns = compare({"step": lambda: step_and_back(decoder), "plain": plain}, rounds=rounds)
    bytes_ratio = decoder.step_bytes / (count * 2 * SIDE * SIDE)
    return bytes_ratio * turns.ratio("plain", "step").median, turns


def growth(decoder: FastDecoder, rounds: int = 15) -> Comparison:
    """One step at position NEAR and one at FAR, in turns, in the same cache."""
    start_at(decoder, FAR)

    def at(position: int) -> None:
        decoder.length = position  # everything up to FAR stays stored: looking back is free
        step_and_back(decoder)

    return compare({str(NEAR): lambda: at(NEAR), str(FAR): lambda: at(FAR)}, rounds=rounds)


def start_at(decoder: FastDecoder, position: int) -> None:
    """Fill the cache up to a position."""
    ids = torch.arange(position) % decoder.vocab_size
    decoder.prefill(ids[None].to(decoder.device))


def step_and_back(decoder: FastDecoder) -> None:
    """One step of one token, forgotten again."""
    position = decoder.length
    decoder.step(torch.zeros(1, 1, dtype=torch.int64, device=decoder.device))
    decoder.crop_to(position)


def main() -> None:
    on_gpu = torch.cuda.is_available()
    facts = hardware.machine_facts()
    print(f"{facts['gpu'] or facts['cpu']}, {facts['threads']} threads, torch {facts['torch']}")
    model = models.load_target(dtype=None if on_gpu else torch.float32)
    for weights in ("bfloat16", "int8", "int4"):
        decoder = FastDecoder.from_model(model, weights, compile=on_gpu)
        share, turns = gemv_share(decoder)
        grown = growth(decoder)
        print(f"{weights}: a step of {turns.median_ms['step']:.2f} ms reads {decoder.step_bytes:,} bytes", end="; ")
        print(f"{share:.0%} of a plain BF16 product's bandwidth", end="; ")
        print(f"at position {FAR} it takes {grown.ratio(str(FAR), str(NEAR))} what it takes at {NEAR}")


if __name__ == "__main__":
    environment = process_environment()
    if environment.get("LD_PRELOAD") != os.environ.get("LD_PRELOAD"):
        sys.exit(subprocess.run([sys.executable, "-m", "every_millisecond.peers.targets"], env=environment).returncode)
    main()
