"""From a transformers Llama or Qwen2 model to the fused matrices of the fast decoder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llm_latency.arguments import check_id_range
from llm_latency.compat import check_rope
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


def compute_dtype(weights: str) -> torch.dtype:
    """Of the activations that a format's kernels read."""
    return torch.float32 if weights in FLOAT32_INPUTS else torch.bfloat16


def make_matrix(
    weight: Tensor, bias: Tensor | None, weights: str, *, keep_bfloat16: bool = True, prepack: bool = True
) -> Matrix:
    """Put a weight [out, in] with an optional bias [out] into the format `weights`.

    keep_bfloat16: a BF16 copy of INT8 and INT4 for prefill. prepack: BF16 in the layout of the CPU's kernel.
    """
    if weights in ("int8", "int4"):
        kind = Int8Linear if weights == "int8" else Int4Linear
        linear: QuantizedLinear = kind.from_weight(weight, bias, keep_bfloat16=keep_bfloat16)
        return Matrix(linear.product, linear.nbytes, linear.copy_nbytes, linear.kernel)
    dtype = torch.bfloat16 if weights == "bfloat16" else torch.float32
    bias = None if bias is None else bias.detach().to(dtype)
    if weights == "int8_dynamic":
        packed = DynamicInt8Weight(weight)
        nbytes = packed.nbytes + (0 if bias is None else bias.nbytes)
        return Matrix(lambda x: packed.matmul(x, bias), nbytes, 0, packed.kernel)
    weight = weight.detach().to(dtype).contiguous()
    nbytes = weight.nbytes + (0 if bias is None else bias.nbytes)
    if weights == "bfloat16" and prepack:
        packed = PrepackedWeight(weight)
        return Matrix(lambda x: packed.matmul(x, bias), nbytes, 0, packed.kernel)
    return Matrix(lambda x: F.linear(x, weight, bias), nbytes, 0, "F.linear")


def head_rows(head: nn.Linear, ids: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of an output head, or of its rows `ids` [n] alone. Raises ValueError for ids it does not have."""
    if ids is None:
        return head.weight, head.bias
    if ids.dtype != torch.int64 or ids.dim() != 1 or ids.numel() == 0:
        raise ValueError(f"head_ids must be int64 [n], n at least 1; got {ids.dtype} {list(ids.shape)}")
    check_id_range(ids, head.weight.shape[0], name="head_ids")
    if ids.unique().numel() != ids.numel():
        raise ValueError("head_ids names an id twice; expected different ids")
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
    check_rope(config)
    if any(isinstance(module, QuantizedLinear) for module in model.modules()):
        raise ValueError("the model is quantised already; give the fast decoder the model it was made from")


def read_norm(norm: nn.Module, weights: str) -> Tensor:
    """An RMSNorm's weight [hidden] FP32, times sqrt(hidden) unless in FP32: as `FastDecoder._normalise` wants it."""
    weight = norm.weight.detach().float()
    return weight.clone() if weights == "float32" else weight * weight.numel() ** 0.5


def read_layers(model: nn.Module, weights: str, smoothing: list[Tensor] | None = None, **storage: bool) -> list[Layer]:
    """The layers of a checked model, fused, their matrices in the format `weights`.

    smoothing: a factor [intermediate] per layer, moved from the FFN's channels into `down_proj` (`ffn_smoothing`).
    storage: as in `make_matrix`.
    """

    def fuse(*linears: nn.Linear | _Rows) -> Matrix:
        # A matrix that is fused with no other is the model's own, if the format is: no copy of it is made.
        weight = torch.cat([linear.weight for linear in linears]) if len(linears) > 1 else linears[0].weight
        biased = [linear.bias is not None for linear in linears]
        bias = torch.cat([linear.bias for linear in linears]) if all(biased) else None
        if any(biased) and not all(biased):
            raise ValueError("cannot fuse linear layers of which only some have a bias")
        return make_matrix(weight, bias, weights, **storage)

    layers = []
    for i, layer in enumerate(model.model.layers):
        attention, ffn = layer.self_attn, layer.mlp
        up, down = (ffn.up_proj, ffn.down_proj) if smoothing is None else _smoothed(ffn, smoothing[i])
        layers.append(
            Layer(
                attention_norm=read_norm(layer.input_layernorm, weights),
                qkv=fuse(attention.q_proj, attention.k_proj, attention.v_proj),
                output=fuse(attention.o_proj),
                ffn_norm=read_norm(layer.post_attention_layernorm, weights),
                gate_up=fuse(ffn.gate_proj, up),
                down=fuse(down),
            )
        )
    return layers


@dataclass(frozen=True, slots=True)
class _Rows:
    """Weight and bias of a linear layer that is no module."""

    weight: Tensor
    bias: Tensor | None


def _smoothed(ffn: nn.Module, s: Tensor) -> tuple[_Rows, _Rows]:
    """up_proj and down_proj with a factor [intermediate] divided out of the one's rows and into the other's columns."""
    up, down = ffn.up_proj, ffn.down_proj
    bias = None if up.bias is None else up.bias.float() / s
    return _Rows(up.weight.float() / s[:, None], bias), _Rows(down.weight.float() * s, down.bias)
