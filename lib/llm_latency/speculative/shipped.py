"""The conditioned draft that ships with the package, for the bundled target."""

from __future__ import annotations

import torch

from llm_latency.models import drafts, load_config
from llm_latency.speculative.feature_layer import FeatureLayer, FeatureShape


def load_feature_layer(*, dtype: torch.dtype = torch.float32, device: str | torch.device | None = None) -> FeatureLayer:
    """The shipped feature layer in evaluation mode. It fits the target of the profile "smollm2-135m" and no other.

    Its weights are stored in BF16; FP32 holds the same values.
    """
    tensors = drafts.draft_tensors(drafts.CONDITIONED)
    layer = FeatureLayer(FeatureShape.of_config(load_config("smollm2-135m")), tensors["head_ids"])
    layer.load_state_dict(tensors)
    return layer.to(dtype=dtype, device=device).eval().requires_grad_(False)
