"""INT8 weights times INT8 activations, the activations rounded anew at each call: W8A8, dynamic.

Weight-only formats widen each weight before they multiply, so their speed ends where one request does: a prompt, or a
few tokens verified at once, cost as much arithmetic as before. Here the arithmetic itself is in INT8, which every x86
processor since 2013 multiplies two to four times as fast as FP32. The price is a rounded input, and a few channels that
tower over the rest make it a high one: `ffn_smoothing` moves them into the weights.

The kernel is PyTorch's FBGEMM (`quantized::linear_dynamic`). On processors without VNNI it adds two products in 16
bits: 2 * 255 * 127 would overflow there, and did, so the weights keep to -63..63, for which 2 * 255 * 63 = 32,130 fits.
"""

from __future__ import annotations

import functools
import warnings

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llm_latency.arguments import check_token_ids
from llm_latency.quantization.kernels import PLAIN, agrees
from llm_latency.quantization.rounding import dequantize, quantize_rows

WEIGHT_LIMIT = 63
ALPHA = 0.5  # of `ffn_smoothing`: how much of the difference moves; half, as in the paper


class DynamicInt8Weight:
    """A weight [out, in] in INT8, for products with inputs that are rounded to INT8 on the fly. CPU only.

    Raises TypeError or ValueError for a weight that is no finite float matrix on the CPU.
    """

    __slots__ = ("codes", "kernel", "packed", "scales", "shape")

    def __init__(self, weight: Tensor) -> None:
        codes, scales = quantize_rows(weight, top=WEIGHT_LIMIT, scale_dtype=torch.float32)
        if weight.device.type != "cpu":
            raise ValueError(f"dynamic INT8 runs on the CPU; this weight is on {weight.device}")
        self.shape = tuple(weight.shape)
        self.kernel = dynamic_int8_kernel()
        packed = self.kernel != PLAIN
        self.packed = _pack(codes, scales) if packed else None
        self.codes, self.scales = (None, None) if packed else (codes, scales)

    @property
    def nbytes(self) -> int:
        """Bytes that one product reads: codes, and per output channel a scale and the sum of its codes."""
        return self.shape[0] * self.shape[1] + 8 * self.shape[0]

    def matmul(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [rows, in] FP32 to [rows, out] FP32."""
        if self.packed is None:
            return F.linear(round_activations(x), dequantize(self.codes, self.scales[:, None]), bias)
        y = _packed_product(x, self.packed)
        return y if bias is None else y + bias


def round_activations(x: Tensor) -> Tensor:
    """What the kernel sees of x [rows, in]: 256 steps from the least number to the largest, 0 among them.

    The kernel has one scale for its whole input, so several rows are first brought to the same peak: each has a scale
    of its own then, a little coarser than if it had come alone.
    """
    if x.shape[0] > 1:
        peaks = row_peaks(x)
        return _round_all(x / peaks) * peaks
    return _round_all(x)


def _round_all(x: Tensor) -> Tensor:
    low, high = x.amin().clamp(max=0), x.amax().clamp(min=0)
    scale = ((high - low) / 255).clamp(min=torch.finfo(torch.float32).tiny)
    zero = (-low / scale).round()
    return ((x / scale).round() + zero).clamp(0, 255).sub(zero) * scale


def row_peaks(x: Tensor) -> Tensor:
    """The largest magnitude of each row of x [rows, in]: [rows, 1], never 0."""
    return x.abs().amax(dim=-1, keepdim=True).clamp_(min=torch.finfo(torch.float32).tiny)


def _pack(codes: Tensor, scales: Tensor) -> torch.ScriptObject:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # quantised tensors are on their way out; `dynamic_int8_kernel` asks each time
        zeros = torch.zeros(len(scales), dtype=torch.int64)
        weight = torch._make_per_channel_quantized_tensor(codes, scales.double(), zeros, 0)
        return torch.ops.quantized.linear_prepack(weight, None)


def _packed_product(x: Tensor, packed: torch.ScriptObject) -> Tensor:
    """The product of `round_activations(x)` with a packed weight."""
    # The kernel makes numbers of NaN, and a model that broke must not go on talking: NaN or infinity in a row makes all
    # of its products NaN, by way of the row's sum or peak.
    if x.shape[0] == 1:
        return torch.ops.quantized.linear_dynamic(x, packed, False).add_(x.sum(), alpha=0)
    peaks = row_peaks(x)
    scaled = (x / peaks).nan_to_num_(0.0)
    return torch.ops.quantized.linear_dynamic(scaled, packed, False).mul_(peaks)


@functools.cache
def dynamic_int8_kernel() -> str:
    """Which path this machine takes: "FBGEMM", or PLAIN, which computes the same function in FP32 and saves nothing."""
    weight = torch.linspace(-1, 1, 37 * 64, dtype=torch.float32).view(37, 64)
    codes, scales = quantize_rows(weight, top=WEIGHT_LIMIT, scale_dtype=torch.float32)

    def product(x: Tensor) -> Tensor:
        return _packed_product(x.float(), _pack(codes, scales))

    return "FBGEMM" if agrees(product, dequantize(codes, scales[:, None])) else PLAIN


# -- smoothing ----------------------------------------------------------------------------------------------------


@torch.inference_mode()
def ffn_smoothing(model: nn.Module, input_ids: Tensor) -> list[Tensor]:
    """The factor [intermediate] of each layer's FFN channels, from the largest activations that a text calls forth.

    A few channels of the input of `down_proj` tower over the rest, and rounding that input with one scale per token
    leaves the others with a handful of steps. Channel j divided by s_j, and column j of the weight times s_j, is the
    same product; the division is free, since it can be made once in the rows of `up_proj` (SmoothQuant, Xiao et al.
    2022, arXiv 2211.10438).

    model: a transformers Llama-like model in floats; unchanged. input_ids: int64 [1, n], a few hundred tokens of the
    kind that will be served; random ids call forth other outliers and made matters worse.
    Raises TypeError or ValueError for anything else.
    """
    input_ids = check_token_ids(input_ids, model.config.vocab_size, name="calibration", of="text")
    peaks: dict[int, Tensor] = {}

    def remember(index: int):
        def hook(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            peaks[index] = inputs[0].detach().float().abs().amax(dim=(0, 1))  # [1, n, intermediate] -> [intermediate]

        return hook

    layers = model.model.layers
    hooks = [layer.mlp.down_proj.register_forward_pre_hook(remember(i)) for i, layer in enumerate(layers)]
    try:
        model.model(input_ids=input_ids.to(model.device), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return [_factor(peaks[i], layer.mlp.down_proj.weight.detach().float()) for i, layer in enumerate(layers)]


def _factor(activation_peaks: Tensor, weight: Tensor) -> Tensor:
    """peaks [in] and weight [out, in]: peak(x)^alpha / peak(w)^(1 - alpha) per channel; 1 where either is all zeros."""
    weight_peaks = weight.abs().amax(dim=0)
    factor = activation_peaks**ALPHA / weight_peaks ** (1 - ALPHA)
    return torch.where((activation_peaks > 0) & (weight_peaks > 0), factor, 1.0).clone()
