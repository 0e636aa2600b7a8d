"""Moving outliers out of the activations and into the weights (SmoothQuant, Xiao et al. 2022, arXiv 2211.10438).

A few channels of the input of `down_proj` tower over the rest, and rounding that input with one scale per token leaves
the others with a handful of steps. Channel j divided by s_j, and column j of the weight times s_j, is the same product;
the division is free, since it can be made once in the rows of `up_proj`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

ALPHA = 0.5  # how much of the difference moves: half, as in the paper


@torch.inference_mode()
def ffn_smoothing(model: nn.Module, input_ids: Tensor) -> list[Tensor]:
    """The factor [intermediate] of each layer's FFN channels, from the largest activations that a text calls forth.

    model: a transformers Llama-like model in floats; unchanged. input_ids: int64 [1, n], a few hundred tokens of the
    kind that will be served; random ids call forth other outliers and made matters worse.
    Raises TypeError or ValueError for anything else.
    """
    if not isinstance(input_ids, Tensor) or input_ids.dtype != torch.int64:
        raise TypeError(
            f"calibration must be int64 ids [1, n], got {getattr(input_ids, 'dtype', type(input_ids).__name__)}"
        )
    if input_ids.dim() != 2 or input_ids.shape[0] != 1 or input_ids.shape[1] == 0:
        raise ValueError(f"calibration must be ids of shape [1, n], n at least 1; got {list(input_ids.shape)}")
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
