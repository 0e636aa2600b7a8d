"""From logits to a token: temperature, top-k, top-p, and drawing from a distribution.

Speculative decoding must change draft and target logits by the very same rule, so the rule stands here, once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from llm_latency.arguments import check_count, check_number

SMALLEST_TEMPERATURE = 1e-6  # there, logits 2e-5 apart are as good as greedy; to go lower, say 0
NAN = "hold NaN; expected numbers (was the model loaded in a dtype it overflows in?)"


def check_sampling(temperature: float, top_k: int | None, top_p: float | None, vocab_size: int) -> None:
    """Raise TypeError or ValueError that names the value for any sampling option out of range."""
    check_number("temperature", temperature, 0)
    if 0 < temperature < SMALLEST_TEMPERATURE:
        raise ValueError(f"temperature={temperature}; expected 0 (greedy) or at least {SMALLEST_TEMPERATURE:g}")
    if top_k is not None:
        check_count("top_k", top_k, 1, vocab_size)
    if top_p is not None and check_number("top_p", top_p, 0, 1) == 0:
        raise ValueError(f"top_p={top_p}; expected None or a number above 0 and at most 1")


def check_end(eos_token_id: int | None, vocab_size: int) -> None:
    """Raise TypeError or ValueError unless it is None or one id: a list, as some models' settings hold, ends none."""
    if eos_token_id is None:
        return
    if isinstance(eos_token_id, bool) or not isinstance(eos_token_id, int):
        raise TypeError(f"eos_token_id={eos_token_id!r}; expected None or one int")
    check_count("eos_token_id", eos_token_id, 0, vocab_size - 1)


def greedy(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The largest logit of each row and its id, [k] and int64 [k], of logits [k, n]: NaN wins, so it cannot hide."""
    # In BF16 the argmax over a vocabulary takes several times as long as the copy to FP32 and its argmax.
    return logits.float().max(dim=-1)


def probabilities(
    logits: Tensor, temperature: float = 1.0, top_k: int | None = None, top_p: float | None = None
) -> Tensor:
    """The distribution that a token is drawn from, FP32, same shape as `logits` [..., vocab].

    Temperature 0 gives all mass to the largest logit, the first of equals. top_k keeps the k largest, and with the k-th
    every logit that equals it: ties leave more than k. top_p then keeps the smallest set of tokens whose mass reaches p
    (Holtzman et al. 2019, arXiv 1904.09751), of equally likely ones those of lower id.

    Raises ValueError if a logit is NaN, the largest one is infinite, or an option is out of range.
    """
    check_sampling(temperature, top_k, top_p, logits.shape[-1])
    logits = logits.float()
    largest = logits.amax(dim=-1, keepdim=True)  # NaN is larger than anything to amax
    if not torch.isfinite(largest).all():  # softmax turns a row whose largest is infinite, of either sign, into NaN
        raise ValueError(
            "the logits hold NaN or infinity; expected numbers (was the model loaded in a dtype it overflows in?)"
        )
    if temperature == 0:
        best = logits.argmax(dim=-1, keepdim=True)
        return torch.zeros_like(logits).scatter_(-1, best, 1.0)
    logits = (logits - largest) / temperature  # none above 0: however small the temperature, softmax cannot overflow
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


@dataclass(frozen=True, slots=True)
class SamplingRule:
    """How one request's tokens are chosen, from logits over a vocabulary of `vocab_size` ids.

    Speculation puts draft and target through the same rule, and what it returns for the draft is the distribution that
    its token was drawn from: an acceptance rule that compared with the unfiltered softmax would change the output.
    Raises TypeError or ValueError for options out of range.
    """

    vocab_size: int
    temperature: float = 0.0  # 0: greedy
    top_k: int | None = None
    top_p: float | None = None
    generator: torch.Generator | None = None  # draws the numbers; None: torch's own

    def __post_init__(self) -> None:
        check_sampling(self.temperature, self.top_k, self.top_p, self.vocab_size)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def choose(self, logits: Tensor) -> int:
        """The next token's id, of logits [1, n]. Reading it waits for the device: no loop can go on without it."""
        if not self.greedy:
            return int(self.sample(self.probabilities(logits)))
        largest, token = torch.cat([x.double() for x in greedy(logits)]).tolist()  # both at once: each would wait
        if math.isnan(largest):
            raise ValueError(f"the logits {NAN}")
        return int(token)

    def probabilities(self, logits: Tensor) -> Tensor:
        """The distribution that a token is drawn from, FP32 [..., n], for logits [..., n], n at most the vocabulary."""
        top_k = self.top_k if self.top_k is None else min(self.top_k, logits.shape[-1])
        return probabilities(logits, self.temperature, top_k, self.top_p)

    def sample(self, probs: Tensor) -> Tensor:
        """One id per row: probs [..., n] to int64 [...]."""
        return sample(probs, self.generator)

    def uniforms(self, count: int, device: torch.device) -> Tensor:
        """Numbers from [0, 1), FP64 [count]."""
        return torch.rand(count, generator=self.generator, dtype=torch.float64, device=device)
