"""Checkpoints quantised by GPTQ or AWQ: loaded where they can be, refused in words elsewhere."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import LlamaConfig

from llm_latency import models
from llm_latency.models import checkpoint

CUDA = torch.device("cuda")


def _config(method: str | None) -> LlamaConfig:
    config = LlamaConfig()
    if method:
        config.quantization_config = {"quant_method": method, "bits": 4}
    return config


def test_a_checkpoint_on_disk_is_refused_before_it_is_read(tiny_llama, tmp_path):
    """Guards against an ImportError from deep inside another library, or weights read as if they were plain."""
    tiny_llama.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    settings = json.loads(path.read_text())
    path.write_text(
        json.dumps(settings | {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128}})
    )
    with pytest.raises(ValueError, match=r"gptq.*CUDA.*cpu"):
        models.load_target(str(tmp_path), device="cpu")


@pytest.mark.parametrize(("method", "packages"), [("gptq", "gptqmodel optimum"), ("awq", "gptqmodel accelerate")])
def test_missing_packages_are_named(method, packages, monkeypatch):
    """Guards against a remedy that installs the wrong thing, and a refusal where everything is there."""
    monkeypatch.setattr(checkpoint, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=f"pip install {packages}"):
        checkpoint.check_quantisation(_config(method), CUDA)
    monkeypatch.setattr(checkpoint, "find_spec", lambda name: object())
    checkpoint.check_quantisation(_config(method), CUDA)


def test_other_methods_and_none():
    """Guards against a method that nobody checked, and against plain checkpoints refused."""
    checkpoint.check_quantisation(_config(None), torch.device("cpu"))
    with pytest.raises(ValueError, match="'bitsandbytes'"):
        checkpoint.check_quantisation(_config("bitsandbytes"), CUDA)
