"""From a transformers Llama or Qwen2 model to the fused matrices of the fast decoder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llm_latency.quantization import DynamicInt8Weight, Int4Linear, Int8Linear, PrepackedWeight, QuantizedLinear

FAMILIES = ("llama", "qwen2", "mistral")
FORMATS = ("float32", "bfloat16", "int8", "int4", "int8_dynamic")
FLOAT32_INPUTS = ("float32", "int8_dynamic")  # the other formats' kernels read BF16

Product = Callable[[Tensor], Tensor]  # rows [rows, in] -> [rows, out]


@dataclass(frozen=True, slots=True)
class Matrix:
    """One weight matrix in its format: the product, the bytes a step reads, the bytes kept beside them for prefill."""

    product: Product
    nbytes: int
    copy_nbytes: int
    kernel: str


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer: two norm weights [hidden] FP32 and four matrices, Q, K, V in one and gate and up in one."""

    attention_norm: Tensor
    qkv: Matrix  # hidden -> (heads + 2 * kv_heads) * head_dim
    output: Matrix  # heads * head_dim -> hidden
    ffn_norm: Tensor
    gate_up: Matrix  # hidden -> 2 * intermediate
    down: Matrix  # intermediate -> hidden

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        return self.qkv, self.output, self.gate_up, self.down


@dataclass(frozen=True, slots=True)
class WeightOptions:
    """How matrices are stored. head: format of the output head. keep_bfloat16: BF16 copies for prefill (INT8, INT4)."""

    weights: str = "float32"
    head: str = "float32"
    group_size: int = 32
    keep_bfloat16: bool = True
    prepack: bool = True

    def __post_init__(self) -> None:
        for name in ("weights", "head"):
            if getattr(self, name) not in FORMATS:
                raise ValueError(f"{name} must be one of {', '.join(FORMATS)}, got {getattr(self, name)!r}")
        if (self.weights in FLOAT32_INPUTS) != (self.head in FLOAT32_INPUTS):
            raise ValueError(
                f"a head reads what the layers compute in: weights {self.weights!r} compute in {self.dtype}, "
                f"and a head in {self.head!r} does not"
            )

    @property
    def dtype(self) -> torch.dtype:
        """Of the activations between the matrices."""
        return torch.float32 if self.weights in FLOAT32_INPUTS else torch.bfloat16


def make_matrix(weight: Tensor, bias: Tensor | None, weights: str, options: WeightOptions) -> Matrix:
    """Put a weight [out, in] with an optional bias [out] into a format."""
    if weights in ("int8", "int4"):
        kind, more = (Int8Linear, {}) if weights == "int8" else (Int4Linear, {"group_size": options.group_size})
        linear: QuantizedLinear = kind.from_weight(weight, bias, keep_bfloat16=options.keep_bfloat16, **more)
        return Matrix(linear.product, linear.nbytes, linear.copy_nbytes, linear.kernel)
    if weights == "int8_dynamic":
        packed = DynamicInt8Weight(weight)
        bias = None if bias is None else bias.detach().float()
        nbytes = packed.nbytes + (0 if bias is None else bias.nbytes)
        return Matrix(lambda x: packed.matmul(x, bias), nbytes, 0, packed.kernel)
    dtype = torch.float32 if weights == "float32" else torch.bfloat16
    nbytes = dtype.itemsize * (weight.numel() + (0 if bias is None else bias.numel()))
    weight = weight.detach().to(dtype).contiguous()
    bias = None if bias is None else bias.detach().to(dtype)
    if weights == "bfloat16" and options.prepack:
        packed = PrepackedWeight(weight)
        return Matrix(lambda x: packed.matmul(x, bias), nbytes, 0, packed.kernel)
    return Matrix(lambda x: F.linear(x, weight, bias), nbytes, 0, "F.linear")


def head_rows(head: nn.Linear, ids: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of an output head, or of its rows `ids` [n] alone. Raises ValueError for ids it does not have."""
    if ids is None:
        return head.weight, head.bias
    vocab = head.weight.shape[0]
    if ids.dtype != torch.int64 or ids.dim() != 1 or ids.numel() == 0:
        raise ValueError(f"head_ids must be int64 [n], n at least 1; got {ids.dtype} {list(ids.shape)}")
    if int(ids.min()) < 0 or int(ids.max()) >= vocab or ids.unique().numel() != ids.numel():
        raise ValueError(
            f"head_ids must be different ids from 0 to {vocab - 1}; got {int(ids.min())} to {int(ids.max())}"
        )
    ids = ids.to(head.weight.device)
    return head.weight[ids], None if head.bias is None else head.bias[ids]


def check_model(model: nn.Module) -> None:
    """Raise for a model that the fast decoder would not compute right, naming what stands in the way."""
    config = getattr(model, "config", None)
    family = getattr(config, "model_type", type(model).__name__)
    if family not in FAMILIES:
        raise ValueError(f"the fast decoder reads models of type {', '.join(FAMILIES)}; got {family!r}")
    if config.hidden_act != "silu":
        raise ValueError(f"the fast decoder computes SiLU-gated layers; this model has {config.hidden_act!r}")
    sliding = "sliding_attention" in (getattr(config, "layer_types", None) or [])
    if sliding or (family == "mistral" and config.sliding_window is not None):
        raise ValueError("the fast decoder has no sliding-window attention, which this model uses")
    rope_type = model.model.rotary_emb.rope_type
    if rope_type in ("dynamic", "longrope"):
        raise ValueError(
            f"the fast decoder computes its rotations once; {rope_type!r} RoPE changes them with the length"
        )
    if any(isinstance(module, QuantizedLinear) for module in model.modules()):
        raise ValueError("the model is quantised already; give the fast decoder the model it was made from")


def read_norm(norm: nn.Module, options: WeightOptions) -> Tensor:
    """An RMSNorm's weight [hidden] FP32, times sqrt(hidden) unless in FP32: as `FastDecoder._normalise` wants it."""
    weight = norm.weight.detach().float()
    return weight.clone() if options.weights == "float32" else weight * weight.numel() ** 0.5


def read_layers(model: nn.Module, options: WeightOptions, smoothing: list[Tensor] | None = None) -> list[Layer]:
    """The layers of a checked model, fused and stored as the options say.

    smoothing: a factor [intermediate] per layer, moved from the FFN's channels into `down_proj` (`ffn_smoothing`).
    """

    def fuse(*linears: nn.Linear | _Rows) -> Matrix:
        weight = torch.cat([linear.weight for linear in linears])
        biased = [linear.bias is not None for linear in linears]
        bias = torch.cat([linear.bias for linear in linears]) if all(biased) else None
        if any(biased) and not all(biased):
            raise ValueError("cannot fuse linear layers of which only some have a bias")
        return make_matrix(weight, bias, options.weights, options)

    return [
        Layer(
            attention_norm=read_norm(layer.input_layernorm, options),
            qkv=fuse(layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj),
            output=fuse(layer.self_attn.o_proj),
            ffn_norm=read_norm(layer.post_attention_layernorm, options),
            gate_up=fuse(layer.mlp.gate_proj, up),
            down=fuse(down),
        )
        for layer, (up, down) in zip(model.model.layers, _smoothed(model, smoothing), strict=True)
    ]


@dataclass(frozen=True, slots=True)
class _Rows:
    """Weight and bias of a linear layer that is no module."""

    weight: Tensor
    bias: Tensor | None


def _smoothed(model: nn.Module, smoothing: list[Tensor] | None) -> list[tuple]:
    """Each layer's (up_proj, down_proj): as they are, or with the factor divided out of the one and into the other."""
    pairs = [(layer.mlp.up_proj, layer.mlp.down_proj) for layer in model.model.layers]
    if smoothing is None:
        return pairs
    return [
        (
            _Rows(up.weight.float() / s[:, None], None if up.bias is None else up.bias.float() / s),
            _Rows(down.weight.float() * s, down.bias),
        )
        for (up, down), s in zip(pairs, smoothing, strict=True)
    ]
