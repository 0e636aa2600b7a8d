"""How tokens are chosen from logits, for draft and target alike."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from llm_latency.sampling import check_sampling, probabilities, sample


@dataclass(frozen=True, slots=True)
class SamplingRule:
    """Temperature, top-k and top-p of one request over a vocabulary of `vocab_size` ids; generator: draws the numbers.

    Draft and target go through the same rule, and what it returns for the draft is the distribution that its token was
    drawn from: a rule that compared with the unfiltered softmax would change the output.
    """

    vocab_size: int
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    generator: torch.Generator | None = None

    def __post_init__(self) -> None:
        check_sampling(self.temperature, self.top_k, self.top_p, self.vocab_size)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

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


def greedy_choices(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The largest logit of each row and its id, [k] and int64 [k], of logits [k, n]: NaN wins, so it cannot hide."""
    # In BF16 the argmax over a vocabulary takes several times as long as the copy to FP32 and its argmax.
    return logits.float().max(dim=-1)
