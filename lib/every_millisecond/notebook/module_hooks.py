"""Hooks that mark a transformers model's modules as stages of a timer, and leave no trace when they go."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from transformers import PreTrainedModel

from llm_latency.timing import LatencyTimer

# Names that Llama-like models in transformers share. Rotary embeddings serve attention alone.
_PART_BY_NAME = {"self_attn": "attention", "rotary_emb": "attention", "mlp": "ffn"}


def find_parts(model: PreTrainedModel) -> dict[nn.Module, str]:
    """Which part each module belongs to: "embedding", "attention", "ffn", "norms" or "head".

    A norm inside attention (Qwen3) is listed too: the timer's exclusive time keeps it out of attention.

    Raises:
        TypeError: not a transformers model. ValueError: no attention, FFN or norms under the names of Llama's family.
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model is a {type(model).__name__}; expected a transformers model")
    parts: dict[nn.Module, str] = {}
    for name, module in model.named_modules():
        leaf = name.rpartition(".")[2]
        if leaf in _PART_BY_NAME:
            parts[module] = _PART_BY_NAME[leaf]
        elif type(module).__name__.endswith("Norm"):
            parts[module] = "norms"
    missing = {"attention", "ffn", "norms"} - set(parts.values())
    if missing:
        raise ValueError(
            f"{type(model).__name__} has no {', '.join(sorted(missing))} under the names of Llama's family"
            " (self_attn, mlp, ...Norm)"
        )
    parts[model.get_input_embeddings()] = "embedding"
    parts[model.get_output_embeddings()] = "head"
    return parts


@contextmanager
def part_hooks(parts: dict[nn.Module, str], timer: LatencyTimer) -> Iterator[None]:
    """While the block runs, each call of a module is a stage of `timer` under its part's name; then no hook is left."""
    handles = []
    try:
        for module, part in parts.items():
            handles.append(module.register_forward_pre_hook(lambda *_, part=part: timer.mark_start(part)))
            handles.append(module.register_forward_hook(lambda *_, part=part: timer.mark_end(part)))
        yield
    finally:
        for handle in handles:
            handle.remove()
