"""A model's narrow twin: the same operators from the same Python, with next to nothing to compute."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from llm_latency.roofline.shapes import shape_of


def narrow_twin(model: PreTrainedModel) -> PreTrainedModel:
    """A random model of the same architecture, depth, dtype, device and attention, 64 wide.

    A pass through it issues as many operators as one through the model, so its time is what issuing them takes: Python,
    dispatch, launches. The roofline knows only work, and this is what it leaves out (`launch_ms_per_pass` of
    `predict_request`). It takes ids from 0 to 63. Raises as `shape_of` for a model of another architecture.
    """
    shape = shape_of(model)
    config = type(model.config).from_dict(
        model.config.to_dict()
        | {
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_attention_heads": 2,
            "num_key_value_heads": 1 if shape.kv_heads < shape.heads else 2,
            "head_dim": 32,
            "vocab_size": 64,
            "bos_token_id": None,
            "eos_token_id": None,
            "pad_token_id": None,
        }
    )
    attention = model.config._attn_implementation
    with torch.random.fork_rng(devices=[]):  # a twin made between two seeded draws must not change the second
        torch.manual_seed(0)
        twin = AutoModelForCausalLM.from_config(config, dtype=model.dtype, attn_implementation=attention)
    return twin.to(model.device).eval().requires_grad_(False)
