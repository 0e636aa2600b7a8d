"""Linear layers with INT8 or INT4 weights, and a whole transformers model of them.

The weight itself is a `PackedInt8` or `PackedInt4` of `kernels.py`: the codes of `rounding.py` in the layout that the
kernel of this device wants, with `matmul(x, bias)`, `dequantize()` and `codes()`, which gives back the plain codes.

The layers compute in BF16, as PyTorch's packed kernels do, and return the dtype of their input. Their `state_dict`
holds the plain codes, never a device's own layout, so a file saved on one machine loads on another.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from llm_latency.quantization.kernels import MANY_ROWS, PackedInt4, PackedInt8, PrepackedWeight


class QuantizedLinear(nn.Module):
    """A linear layer whose weight is INT8 or INT4; use its subclasses `Int8Linear` and `Int4Linear`.

    Args:
        packed: the weight [out, in]. bias: [out] or None; kept in BF16.
        keep_bfloat16: also keep the dequantised weight in BF16, for inputs of MANY_ROWS = 16 rows and more: a faster
            prefill for more memory. The copy is not part of the state_dict.
    """

    def __init__(self, packed: PackedInt8 | PackedInt4, bias: Tensor | None, keep_bfloat16: bool) -> None:
        super().__init__()
        self.out_features, self.in_features = packed.shape
        self.keep_bfloat16 = keep_bfloat16
        if bias is not None:
            if bias.shape != (self.out_features,):
                raise ValueError(f"expected a bias of shape [{self.out_features}], got {list(bias.shape)}")
            bias = bias.detach().to(packed.device, torch.bfloat16, copy=True)
        self.register_buffer("bias", bias)
        self._set_weight(packed)

    def _set_weight(self, packed: PackedInt8 | PackedInt4) -> None:
        self.packed = packed
        self.copy = PrepackedWeight(packed.dequantize()) if self.keep_bfloat16 else None

    @classmethod
    def from_linear(cls, linear: nn.Module, **options) -> QuantizedLinear:
        """Quantise an nn.Linear (or transformers' Conv1D). Raises TypeError for any other layer."""
        if isinstance(linear, Conv1D):
            return cls.from_weight(linear.weight.t(), linear.bias, **options)
        if isinstance(linear, nn.Linear):
            return cls.from_weight(linear.weight, linear.bias, **options)
        raise TypeError(f"expected an nn.Linear, got {type(linear).__name__}")

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] to [..., out], in x's dtype."""
        if not x.is_floating_point():
            raise TypeError(f"expected a floating-point input, got {x.dtype}")
        if x.shape[-1] != self.in_features:
            raise ValueError(f"expected an input of width {self.in_features}, got {x.shape[-1]}")
        y = self.product(x.reshape(-1, self.in_features).to(torch.bfloat16).contiguous())
        return y.view(*x.shape[:-1], self.out_features).to(x.dtype)

    def product(self, rows: Tensor) -> Tensor:
        """`forward` without checks or conversions: contiguous BF16 rows [rows, in] to [rows, out]."""
        many = self.copy is not None and rows.shape[0] >= MANY_ROWS
        return (self.copy if many else self.packed).matmul(rows, self.bias)

    def dequantize(self) -> Tensor:
        """The FP32 weight [out, in] that the codes stand for."""
        return self.packed.dequantize()

    @property
    def kernel(self) -> str:
        """How this device multiplies: "packed", "fused by torch.compile", or "dequantise at every call"."""
        return self.packed.kernel

    @property
    def nbytes(self) -> int:
        """Bytes that one decode step reads: codes, scales, zeros, bias, padding; without the BF16 copy."""
        return self.packed.nbytes + (0 if self.bias is None else self.bias.nbytes)

    @property
    def copy_nbytes(self) -> int:
        """Bytes of the BF16 copy kept for prefill."""
        return 0 if self.copy is None else self.copy.nbytes

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"kernel={self.kernel!r}"
        )

    # -- what nn.Module calls to move, save and load a layer ---

    def _apply(self, fn, recurse: bool = True):
        """Move between devices by way of the plain codes; a change of dtype leaves the quantised weight as it is."""
        here = self.packed.device
        device = fn(torch.empty(0, dtype=torch.uint8, device=here)).device  # fn is opaque: see where it puts a tensor
        if device != here:
            if device.type not in ("cpu", "cuda"):
                raise ValueError(f"cannot move a quantised layer to {device}; expected cpu or cuda")
            if self.bias is not None:
                self.bias = self.bias.to(device)
            self._set_weight(type(self.packed)(**{name: code.to(device) for name, code in self.packed.codes().items()}))
        return self

    def _save_to_state_dict(self, destination, prefix, keep_vars) -> None:
        destination.update({prefix + name: tensor for name, tensor in self._state().items()})

    def _load_from_state_dict(self, state, prefix, metadata, strict, missing, unexpected, errors) -> None:
        present = self._state()
        if strict:
            known = {prefix + name for name in present}
            unexpected.extend(key for key in state if key.startswith(prefix) and key not in known)
        absent = [name for name in present if prefix + name not in state]
        missing.extend(prefix + name for name in absent)
        if set(absent) - {"bias"}:
            return
        given = {name: state[prefix + name] for name in present if name not in absent}
        for name, tensor in given.items():
            # A bias may come in any dtype and is rounded; codes and their scales may not.
            wanted, got = (
                f"{list(t.shape)}" + (f" {t.dtype}" if name != "bias" else "") for t in (present[name], tensor)
            )
            if wanted != got:
                errors.append(f"{prefix}{name}: expected {wanted}, got {got}")
                return
        bias = given.pop("bias", None)
        if bias is not None:
            self.bias.copy_(bias)
        self._set_weight(type(self.packed)(**{name: code.to(self.packed.device) for name, code in given.items()}))

    def _state(self) -> dict[str, Tensor]:
        """What the state_dict holds: the plain codes with their scales (and zeros), and the bias if there is one."""
        return self.packed.codes() | ({} if self.bias is None else {"bias": self.bias})


class Int8Linear(QuantizedLinear):
    """A linear layer with INT8 weights, one scale per output channel."""

    @classmethod
    def from_weight(cls, weight: Tensor, bias: Tensor | None = None, *, keep_bfloat16: bool = False) -> Int8Linear:
        """Quantise a weight [out, in] with an optional bias [out]."""
        return cls(PackedInt8.from_weight(weight), bias, keep_bfloat16)


class Int4Linear(QuantizedLinear):
    """A linear layer with INT4 weights in blocks of group_size along the row, a scale and a zero per block."""

    @classmethod
    def from_weight(
        cls, weight: Tensor, bias: Tensor | None = None, *, group_size: int = 32, keep_bfloat16: bool = False
    ) -> Int4Linear:
        """Quantise a weight [out, in] with an optional bias [out]; group_size is even and divides `in`."""
        return cls(PackedInt4.from_weight(weight, group_size), bias, keep_bfloat16)


@dataclass(frozen=True, slots=True)
class QuantizationReport:
    """What `quantize_` did. Bytes are those of the replaced layers, before and after, as a decode step reads them.

    A tied head becomes a matrix of its own, since the embedding is left as it was.
    """

    weights: str
    layers: int
    skipped: tuple[str, ...]
    kernels: tuple[str, ...]
    linear_bytes_before: int
    linear_bytes_after: int


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

    Raises ValueError for an unknown format, a model already quantised, a `skip` that leaves no layer, or a layer whose
    width is not a multiple of group_size, and TypeError for weights that are not floats or a `skip` that is one string;
    the model is then untouched.
    """
    linears, chosen = _choose(model, weights, skip)
    kind, options = (Int8Linear, {}) if weights == "int8" else (Int4Linear, {"group_size": group_size})
    replacements: dict[str, QuantizedLinear] = {}
    made: dict[int, QuantizedLinear] = {}  # by module: one with two names is replaced by one
    for name, linear in chosen.items():
        try:
            if id(linear) not in made:
                made[id(linear)] = kind.from_linear(linear, keep_bfloat16=keep_bfloat16, **options)
            replacements[name] = made[id(linear)]
        except (ValueError, TypeError) as error:
            raise type(error)(f"layer {name!r}: {error}") from error
    before = sum(p.nbytes for m in set(chosen.values()) for p in m.parameters(recurse=False))
    for name, replacement in replacements.items():
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, replacement)
    _untie(model)
    return QuantizationReport(
        weights=weights,
        layers=len(made),
        skipped=tuple(name for name in linears if name not in chosen),
        kernels=tuple(sorted({layer.kernel for layer in made.values()})),
        linear_bytes_before=before,
        linear_bytes_after=sum(layer.nbytes for layer in made.values()),
    )


def _choose(model: nn.Module, weights: str, skip: Sequence[str]) -> tuple[dict[str, nn.Module], dict[str, nn.Module]]:
    """All linear layers by name, and those to replace. Raises as `quantize_` says."""
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
    chosen = {n: m for n, m in linears.items() if not any(fnmatchcase(n, pattern) for pattern in skip)}
    if not chosen:
        raise ValueError(f"skip={list(skip)} leaves no layer to quantise")
    return linears, chosen


def _untie(model: nn.Module) -> None:
    """Keep transformers from tying a quantised head to the embedding again when it saves or loads."""
    head = getattr(model, "lm_head", None)
    config = getattr(model, "config", None)
    if isinstance(head, QuantizedLinear) and getattr(config, "tie_word_embeddings", False):
        model.config = copy.copy(config)  # another model may share it
        model.config.tie_word_embeddings = False
        model.all_tied_weights_keys = {}
