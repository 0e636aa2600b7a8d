"""Weights times values, where what stands in a masked slot has no effect even if it is NaN."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def holds_non_finite(x: Tensor) -> bool:
    """True if x may hold NaN or an infinity. One pass, no copy; a sum that overflows is also reported."""
    return not bool(x.sum(dtype=torch.promote_types(x.dtype, torch.float32)).isfinite())


def weighted_values(weights: Tensor, values: Tensor, allowed: Tensor) -> Tensor:
    """weights @ values with non-finite values kept out of the rows that may not see them.

    A masked slot has weight 0, but 0 * NaN is NaN. So the product is taken with such values set to 0, and each one is
    put back into the rows that may attend to it.

    weights [..., rows, keys], zero where not allowed; values [..., keys, head_dim]; allowed bool, broadcastable to
    weights. Returns [..., rows, head_dim].
    """
    out = weights @ values.where(values.isfinite(), 0.0)
    seen = allowed.expand(weights.shape).to(weights.dtype)
    nan = values.isnan()
    plus = seen @ ((values == math.inf) | nan).to(weights.dtype) > 0  # [..., rows, head_dim]
    minus = seen @ ((values == -math.inf) | nan).to(weights.dtype) > 0
    # inf, -inf, or inf - inf = NaN: what the plain product gives to a row that sees such a value
    return out + torch.where(plus, math.inf, 0.0) - torch.where(minus, math.inf, 0.0)
