"""Small random models for the CUDA tests."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM


def tiny(seed: int, **changes) -> LlamaForCausalLM:
    """A random FP32 Llama over 97 ids, on the CPU, whose argmax does not rest on rounding."""
    sizes = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4)
    sizes |= dict(vocab_size=97, num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=True) | changes
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**sizes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(4.0)
    return model


def like(model: LlamaForCausalLM, noise: float, seed: int = 1) -> LlamaForCausalLM:
    """A draft that often agrees, on the CPU: the same weights with noise."""
    draft = LlamaForCausalLM(model.config).eval()
    draft.load_state_dict({name: weight.cpu() for name, weight in model.state_dict().items()})
    numbers = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.add_(noise * parameter.std() * torch.randn(parameter.shape, generator=numbers))
    return draft


def prompt(n: int, seed: int, vocab: int = 97) -> Tensor:
    """Random ids [1, n] on the CPU."""
    return torch.randint(0, vocab, (1, n), generator=torch.Generator().manual_seed(seed))
