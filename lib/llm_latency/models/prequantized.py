"""Checkpoints that were quantised before they were saved (GPTQ, AWQ): transformers loads them, if it can here.

transformers reads the method from `quantization_config` in the model's config and takes the kernels from another
package. What is missing is said in one sentence before anything is loaded; without a GPU these kernels cannot run.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch
from transformers import PretrainedConfig

# Method: packages that transformers wants for it. Both papers round with data: arXiv 2210.17323 and 2306.00978.
PACKAGES = {"gptq": ("gptqmodel", "optimum"), "awq": ("gptqmodel", "accelerate")}


def method_of(config: PretrainedConfig) -> str | None:
    """The quantisation method that a model's config names, in lower case, or None."""
    found = getattr(config, "quantization_config", None)
    if found is None:
        return None
    method = found.get("quant_method") if isinstance(found, dict) else getattr(found, "quant_method", None)
    return str(getattr(method, "value", method)).lower()


def check(config: PretrainedConfig, device: torch.device) -> None:
    """Raise ValueError, naming method and remedy, for a quantised checkpoint that cannot be loaded on this device."""
    method = method_of(config)
    if method is None:
        return
    if method not in PACKAGES:
        raise ValueError(
            f"the checkpoint is quantised by {method!r}; expected {' or '.join(PACKAGES)}, or plain weights "
            "(the course quantises those itself: notebook 08)"
        )
    if device.type != "cuda":
        raise ValueError(f"the checkpoint is quantised by {method!r}, whose kernels need a CUDA device; got {device}")
    missing = [package for package in PACKAGES[method] if find_spec(package) is None]
    if missing:
        raise ValueError(f"a checkpoint quantised by {method!r} needs `pip install {' '.join(missing)}`")
