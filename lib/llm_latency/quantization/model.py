"""Quantise the linear layers of a whole transformers model, in place."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn
from transformers.pytorch_utils import Conv1D

from llm_latency.quantization.linear import Int4Linear, Int8Linear, QuantizedLinear


@dataclass(frozen=True, slots=True)
class QuantizationReport:
    """What `quantize_` did. bytes_before counts every parameter and buffer once, tied ones included once;
    bytes_after is what the model holds now, of which copy_bytes are BF16 copies kept for prefill.
    A tied head is a matrix of its own afterwards, since the embedding stays as it was.
    """

    weights: str
    layers: int
    skipped: tuple[str, ...]
    kernels: tuple[str, ...]
    bytes_before: int
    bytes_after: int
    copy_bytes: int
    linear_bytes_before: int
    linear_bytes_after: int

    def __str__(self) -> str:
        ratio = self.linear_bytes_before / self.linear_bytes_after
        return (
            f"{self.weights}: {self.layers} layers, {len(self.skipped)} skipped; their weights "
            f"{self.linear_bytes_before:,} -> {self.linear_bytes_after:,} bytes ({ratio:.2f}x smaller); "
            f"the model {self.bytes_before:,} -> {self.bytes_after:,} bytes; kernel: {', '.join(self.kernels)}"
        )


def quantize_(
    model: nn.Module,
    weights: str = "int4",
    *,
    skip: Sequence[str] = (),
    group_size: int = 32,
    keep_bfloat16: bool = False,
) -> QuantizationReport:
    """Replace the linear layers of a transformers model by INT8 or INT4 ones, in place.

    weights: "int8" (one scale per output channel) or "int4" (blocks of group_size).
    skip: names or patterns ("lm_head", "*.down_proj", "model.layers.0.*") of layers to leave alone; one that matches
    no layer raises ValueError. A head tied to the embedding gets a weight of its own; the embedding does not change.
    keep_bfloat16: see `QuantizedLinear`.

    Raises ValueError for a format it does not know, a model quantised before, a `skip` that leaves no layer, or a layer
    whose width the group does not divide, and TypeError for weights that are no floats or a `skip` that is one string;
    the model is untouched then.
    """
    if weights not in ("int8", "int4"):
        raise ValueError(f"weights must be 'int8' or 'int4', got {weights!r}")
    if isinstance(skip, str):
        raise TypeError(f"skip={skip!r}; expected a list of names or patterns")
    done = [name for name, module in model.named_modules() if isinstance(module, QuantizedLinear)]
    if done:
        raise ValueError(f"the model is quantised already ({len(done)} layers, the first is {done[0]!r})")
    linears = {
        name: module
        for name, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, (nn.Linear, Conv1D))
    }
    if not linears:
        raise ValueError(f"found no linear layer in {type(model).__name__}")
    if "" in linears:
        raise ValueError(f"a bare {type(model).__name__} cannot be replaced in place; use Int8Linear or Int4Linear")
    unmatched = [pattern for pattern in skip if not any(fnmatchcase(name, pattern) for name in linears)]
    if unmatched:
        raise ValueError(f"skip names no linear layer: {unmatched}; the layers are named like {next(iter(linears))!r}")

    before = _model_bytes(model)
    chosen = {n: m for n, m in linears.items() if not any(fnmatchcase(n, pattern) for pattern in skip)}
    if not chosen:
        raise ValueError(f"skip={list(skip)} leaves no layer to quantise")
    kind, options = (Int8Linear, {}) if weights == "int8" else (Int4Linear, {"group_size": group_size})
    replacements: dict[str, QuantizedLinear] = {}
    made: dict[int, QuantizedLinear] = {}  # a module with two names stays one
    for name, linear in chosen.items():
        try:
            if id(linear) not in made:
                made[id(linear)] = kind.from_linear(linear, keep_bfloat16=keep_bfloat16, **options)
            replacements[name] = made[id(linear)]
        except (ValueError, TypeError) as error:
            raise type(error)(f"layer {name!r}: {error}") from error
    linear_before = sum(p.nbytes for m in set(chosen.values()) for p in m.parameters(recurse=False))
    for name, replacement in replacements.items():
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, replacement)
    _untie(model, replacements)
    return QuantizationReport(
        weights=weights,
        layers=len(made),
        skipped=tuple(name for name in linears if name not in chosen),
        kernels=tuple(sorted({layer.kernel for layer in replacements.values()})),
        bytes_before=before,
        bytes_after=_model_bytes(model),
        copy_bytes=sum(layer.copy_nbytes for layer in made.values()),
        linear_bytes_before=linear_before,
        linear_bytes_after=sum(layer.nbytes for layer in made.values()),
    )


def _model_bytes(model: nn.Module) -> int:
    tensors = {id(t): t.nbytes for t in [*model.parameters(), *model.buffers()]}
    copies = sum(m.copy_nbytes for m in model.modules() if isinstance(m, QuantizedLinear))
    return sum(tensors.values()) + copies


def _untie(model: nn.Module, replacements: dict[str, QuantizedLinear]) -> None:
    """Keep transformers from tying a quantised head to the embedding again when it saves or loads."""
    head = getattr(model, "lm_head", None)
    config = getattr(model, "config", None)
    if isinstance(head, QuantizedLinear) and getattr(config, "tie_word_embeddings", False):
        model.config = copy.copy(config)  # another model may share it
        model.config.tie_word_embeddings = False
        model.all_tied_weights_keys = {}
