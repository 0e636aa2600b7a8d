"""From logits to a token: temperature, top-k, top-p, and drawing from a distribution.

Speculative decoding must filter the draft's and the target's logits by the same rule, so it is written once, here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from llm_latency.arguments import check_count, check_number

SMALLEST_TEMPERATURE = 1e-6  # at it, logits 2e-5 apart differ by a factor of exp(20): for less, use 0 (greedy)
NAN_MESSAGE = "hold NaN; expected numbers (was the model loaded in a dtype it overflows in?)"


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
    """Raise TypeError or ValueError unless eos_token_id is None or one id.

    Some models' generation settings hold a list, which no token would ever equal: generation would not stop.
    """
    if eos_token_id is None:
        return
    if isinstance(eos_token_id, bool) or not isinstance(eos_token_id, int):
        raise TypeError(f"eos_token_id={eos_token_id!r}; expected None or one int")
    check_count("eos_token_id", eos_token_id, 0, vocab_size - 1)


def greedy(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The largest logit of each row and its column, [k] and int64 [k], of logits [k, n]. NaN counts as the largest, so
    a caller who checks that one value for NaN has checked the row."""
    # In BF16 the argmax over a vocabulary takes several times as long as the copy to FP32 and its argmax.
    return logits.float().max(dim=-1)


def probabilities(
    logits: Tensor, temperature: float = 1.0, top_k: int | None = None, top_p: float | None = None
) -> Tensor:
    """The distribution that a token is drawn from, FP32, same shape as `logits` [..., vocab].

    Temperature 0 gives all mass to the largest logit, the first of equals. top_k keeps the k largest and every logit
    that ties with the k-th. top_p then keeps the smallest set of tokens whose mass reaches p (Holtzman et al. 2019,
    arXiv 1904.09751); among equally likely tokens, those of lower id.

    Raises ValueError if a logit is NaN, the largest one is infinite, or an option is out of range.
    """
    check_sampling(temperature, top_k, top_p, logits.shape[-1])
    logits = logits.float()
    largest = logits.amax(dim=-1, keepdim=True)  # NaN is larger than anything to amax
    if not torch.isfinite(largest).all():  # either infinity as the largest makes softmax return NaN
        raise ValueError(
            "the logits hold NaN or infinity; expected numbers (was the model loaded in a dtype it overflows in?)"
        )
    if temperature == 0:
        best = logits.argmax(dim=-1, keepdim=True)
        return torch.zeros_like(logits).scatter_(-1, best, 1.0)
    logits = (logits - largest) / temperature  # at most 0, so no temperature can overflow
    if top_k is not None and top_k < logits.shape[-1]:
        kth = logits.topk(top_k, dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < kth, -math.inf)
    probs = logits.softmax(dim=-1)
    if top_p is not None and top_p < 1:
        ordered, order = probs.sort(dim=-1, descending=True, stable=True)
        before = ordered.cumsum(dim=-1) - ordered  # mass of the tokens ranked before this one
        dropped = torch.zeros_like(probs, dtype=torch.bool).scatter_(-1, order, before >= top_p)
        probs = probs.masked_fill(dropped, 0.0)
        probs = probs / probs.sum(dim=-1, keepdim=True)
    return probs


def sample(probs: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Draw one token id per row: probs [..., vocab] to int64 [...].

    By inverse CDF: one uniform number, one cumulative sum. (`torch.multinomial` took tens of milliseconds over a
    vocabulary of 49k on a CPU.) A token of probability 0 is never drawn: `right=True` skips it.
    """
    cdf = probs.cumsum(dim=-1, dtype=torch.float64)
    uniform = torch.rand((*probs.shape[:-1], 1), generator=generator, dtype=torch.float64, device=probs.device)
    index = torch.searchsorted(cdf, uniform * cdf[..., -1:], right=True)
    return index.clamp_(max=probs.shape[-1] - 1).squeeze(-1)


@dataclass(frozen=True, slots=True)
class SamplingRule:
    """How one request's tokens are chosen, from logits over a vocabulary of `vocab_size` ids.

    Speculative decoding applies it to draft and target alike, and passes on the filtered distribution that the drafted
    token was drawn from: an acceptance test against the unfiltered softmax would change the output's distribution.
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
        """The next token's id, from logits [1, n]. Waits for the device: the loop needs the id to go on."""
        if not self.greedy:
            return int(self.sample(self.probabilities(logits)))
        largest, token = torch.cat([x.double() for x in greedy(logits)]).tolist()  # one transfer, one wait
        if math.isnan(largest):
            raise ValueError(f"the logits {NAN_MESSAGE}")
        return int(token)

    def probabilities(self, logits: Tensor) -> Tensor:
        """The distribution that a token is drawn from, FP32 [..., n], for logits [..., n].

        n is below the vocabulary for a draft whose head keeps only some ids; top_k then keeps at most n.
        """
        top_k = self.top_k if self.top_k is None else min(self.top_k, logits.shape[-1])
        return probabilities(logits, self.temperature, top_k, self.top_p)

    def sample(self, probs: Tensor) -> Tensor:
        """One id per row: probs [..., n] to int64 [...]."""
        return sample(probs, self.generator)

    def uniforms(self, count: int, device: torch.device) -> Tensor:
        """Random numbers from [0, 1), FP64 [count], for the acceptance test of speculative decoding."""
        return torch.rand(count, generator=self.generator, dtype=torch.float64, device=device)
