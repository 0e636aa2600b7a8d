"""Small models for the kernel's tests; their FP32 weights are what the kernel's codes mean, so they are its oracle."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from llm_latency.engine import kernel_library
from llm_latency.engine.kernel_weights import round_weight

# Odd vocabularies and widths that fill neither a group nor a tile; head_dim unlike hidden / heads.
TOYS = {
    "llama": (LlamaConfig, dict(vocab_size=97, num_attention_heads=4, num_key_value_heads=2, head_dim=16)),
    "tied": (LlamaConfig, dict(vocab_size=131, num_attention_heads=3, num_key_value_heads=1, head_dim=48)),
    "qwen2": (Qwen2Config, dict(vocab_size=101, num_attention_heads=7, num_key_value_heads=1, head_dim=64)),
    "biased": (LlamaConfig, dict(vocab_size=67, num_attention_heads=2, num_key_value_heads=2, head_dim=128)),
}


def make_toy(name: str):
    """A random FP32 model, its matrices already rounded to the kernel's grid."""
    kind, shape = TOYS[name]
    config = dict(
        hidden_size=7 * 64 if kind is Qwen2Config else 96,  # Qwen2 has no head_dim of its own
        intermediate_size=112,
        num_hidden_layers=2,
        max_position_embeddings=512,
        tie_word_embeddings=name == "tied",
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    if name == "biased":
        config |= dict(attention_bias=True, mlp_bias=True)
        config |= dict(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1000.0})
    if kind is Qwen2Config:
        shape = {key: value for key, value in shape.items() if key != "head_dim"}
    torch.manual_seed(sum(map(ord, name)))
    model = (Qwen2ForCausalLM if kind is Qwen2Config else LlamaForCausalLM)(kind(**config, **shape)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(4.0)  # the default's logits are nearly flat
            else:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return round_in_place(model)


def round_in_place(model):
    """Replace every matrix by what its codes mean: rounding it again then changes nothing."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:
                bits = 8 if "lm_head" in name or "embed" in name else 4
                parameter.copy_(round_weight(parameter, bits).dequantize()[:, : parameter.shape[1]])
    return model


def needs_kernel():
    """Skip, with the reason, where the kernel cannot be built."""
    problem = kernel_library.problem()
    return pytest.mark.skipif(problem is not None, reason=str(problem))
