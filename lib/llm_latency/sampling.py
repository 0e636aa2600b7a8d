"""From logits to a token: temperature, top-k, top-p, and drawing from a distribution.

Speculative decoding must change draft and target logits by the very same rule, so the rule stands here, once.
"""

from __future__ import annotations

import math
import numbers

import torch
from torch import Tensor


def check_sampling(temperature: float, top_k: int | None, top_p: float | None, vocab_size: int) -> None:
    """Raise TypeError or ValueError that names the value for any sampling option out of range."""
    for name, value in (("temperature", temperature), ("top_k", top_k), ("top_p", top_p)):
        optional = value is None and name != "temperature"
        if not optional and (isinstance(value, bool) or not isinstance(value, numbers.Real)):
            raise TypeError(f"{name}={value!r}; expected a number")
    if not math.isfinite(temperature) or temperature < 0:
        raise ValueError(f"temperature={temperature}; expected 0 (greedy) or a positive number")
    if 0 < temperature < 1e-3:
        raise ValueError(f"temperature={temperature} would overflow the logits; expected 0 (greedy) or at least 0.001")
    if top_k is not None and not (isinstance(top_k, int) and 1 <= top_k <= vocab_size):
        raise ValueError(f"top_k={top_k}; expected None or an integer from 1 to the vocabulary's {vocab_size}")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p={top_p}; expected None or a number above 0 and at most 1")


def check_end(eos_token_id: int | None, vocab_size: int) -> None:
    """Raise TypeError or ValueError unless it is None or one id: a list, as some models' settings hold, ends none."""
    if eos_token_id is None:
        return
    if isinstance(eos_token_id, bool) or not isinstance(eos_token_id, int):
        raise TypeError(f"eos_token_id={eos_token_id!r}; expected None or one int")
    if not 0 <= eos_token_id < vocab_size:
        raise ValueError(f"eos_token_id={eos_token_id}; expected 0 to {vocab_size - 1}")


def probabilities(
    logits: Tensor, temperature: float = 1.0, top_k: int | None = None, top_p: float | None = None
) -> Tensor:
    """The distribution that a token is drawn from, FP32, same shape as `logits` [..., vocab].

    Temperature 0 gives all mass to the largest logit (the first of equals). top_k keeps the k largest; top_p then
    keeps the smallest set of tokens whose mass reaches p (Holtzman et al. 2019, arXiv 1904.09751).

    Raises ValueError if a logit is NaN, the largest one is infinite, or an option is out of range.
    """
    check_sampling(temperature, top_k, top_p, logits.shape[-1])
    logits = logits.float()
    # NaN is larger than anything to amax; softmax turns a row whose largest is infinite, of either sign, into NaN.
    if not torch.isfinite(logits.amax(dim=-1)).all():
        raise ValueError(
            "the logits hold NaN or infinity; expected numbers (was the model loaded in a dtype it overflows in?)"
        )
    if temperature == 0:
        best = logits.argmax(dim=-1, keepdim=True)
        return torch.zeros_like(logits).scatter_(-1, best, 1.0)
    logits = logits / temperature
    if top_k is not None and top_k < logits.shape[-1]:
        kth = logits.topk(top_k, dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < kth, -math.inf)
    probs = logits.softmax(dim=-1)
    if top_p is not None and top_p < 1:
        ordered, order = probs.sort(dim=-1, descending=True, stable=True)
        before = ordered.cumsum(dim=-1) - ordered  # mass of all tokens that stand before this one
        dropped = torch.zeros_like(probs, dtype=torch.bool).scatter_(-1, order, before >= top_p)
        probs = probs.masked_fill(dropped, 0.0)
        probs = probs / probs.sum(dim=-1, keepdim=True)
    return probs


def sample(probs: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Draw one token id per row: probs [..., vocab] to int64 [...].

    By inverse CDF: one uniform number, one cumulative sum. (`torch.multinomial` took tens of milliseconds over a
    vocabulary of 49k on a CPU.) A token of probability 0 is never drawn.
    """
    cdf = probs.cumsum(dim=-1, dtype=torch.float64)
    uniform = torch.rand((*probs.shape[:-1], 1), generator=generator, dtype=torch.float64, device=probs.device)
    index = torch.searchsorted(cdf, uniform * cdf[..., -1:], right=True)
    return index.clamp_(max=probs.shape[-1] - 1).squeeze(-1)
