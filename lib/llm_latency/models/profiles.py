"""The models the course knows, and which of them suits this machine."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

import torch

from llm_latency import hardware


@dataclass(frozen=True, slots=True)
class Source:
    """Where a model's weights come from: the bundled GGUF, this package's own draft, a hub repository at a
    fixed commit, or a shape alone."""

    kind: Literal["bundled", "shipped", "hub", "shape"]
    name: str
    revision: str | None = None


@dataclass(frozen=True, slots=True)
class Profile:
    """A target model, its draft, and what a machine needs to run them."""

    name: str
    target: Source
    draft: Source | None
    dtype: torch.dtype
    needs_gpu_gb: float = 0.0  # 0: runs on a CPU
    note: str = ""


_SMALL = Source("bundled", "SmolLM2-135M-Instruct")

PROFILES: dict[str, Profile] = {
    profile.name: profile
    for profile in (
        Profile(
            "smollm2-135m",
            _SMALL,
            Source("shipped", "plain"),
            torch.float32,
            note="runs offline after set-up, on any machine",
        ),
        Profile(
            "smollm2-1.7b",
            Source("hub", "HuggingFaceTB/SmolLM2-1.7B-Instruct", "31b70e2e869a7173562077fd711b654946d38674"),
            _SMALL,
            torch.float16,
            needs_gpu_gb=8,
            note="for T4- and L4-class GPUs; downloads 3.4 GB from the Hugging Face hub",
        ),
        Profile(
            "qwen2.5-7b",
            Source("hub", "Qwen/Qwen2.5-7B-Instruct", "a09a35458c702b33eeacc393d103063234e8bc28"),
            Source("hub", "Qwen/Qwen2.5-0.5B-Instruct", "7ae557604adf67be50417f59c2c2f167def9a775"),
            torch.bfloat16,
            needs_gpu_gb=22,
            note="for A100-class GPUs; downloads 16 GB from the Hugging Face hub",
        ),
        Profile(
            "llama-7b-shape",
            Source("shape", "llama-7b-shape"),
            Source("shape", "llama-160m-shape"),
            torch.bfloat16,
            needs_gpu_gb=22,
            note="RANDOM WEIGHTS in Llama-2-7B's shape, but for 49,152 ids: for timing only, its text means nothing",
        ),
    )
}


def profile_names() -> list[str]:
    """All profile names, the default first."""
    return list(PROFILES)


def choose_profile(name: str | None = None) -> tuple[Profile, str]:
    """The profile to use and why: the given name, else LLM_LATENCY_PROFILE, else the one for this machine.

    A machine's own choice is always `smollm2-135m`: it is the only profile that needs no download, and a first lesson
    must not begin with one. A larger GPU is told what it could run instead.

    Raises ValueError for an unknown name, or for a profile that needs more GPU memory than is here.
    """
    reason = "asked for by name"
    if name is None and os.environ.get("LLM_LATENCY_PROFILE"):
        name, reason = os.environ["LLM_LATENCY_PROFILE"], "LLM_LATENCY_PROFILE is set"
    if name is None:
        name, reason = "smollm2-135m", "the default: a real model, offline, on any machine"
        facts = hardware.machine_facts()
        memory = facts.get("gpu_memory_gb") or 0
        larger = [p.name for p in PROFILES.values() if 0 < p.needs_gpu_gb <= memory]
        if larger:
            reason += f"; this GPU also fits {', '.join(larger)} (set LLM_LATENCY_PROFILE)"
    if name not in PROFILES:
        raise ValueError(f"unknown profile {name!r}; expected one of {', '.join(PROFILES)}")
    profile = PROFILES[name]
    if profile.needs_gpu_gb:
        have = hardware.machine_facts().get("gpu_memory_gb") or 0
        if have < profile.needs_gpu_gb:
            raise ValueError(
                f"profile {name!r} needs a CUDA GPU with at least {profile.needs_gpu_gb:g} GB; this machine has "
                f"{f'{have:g} GB' if have else 'none'}. Use smollm2-135m here"
            )
    return profile, reason
