"""Toy models for the tests of speculative decoding: their memory is the text itself, so it can be read."""

from __future__ import annotations

import torch
from scipy import stats
from torch import Tensor

from llm_latency.generation import Stepper


class Markov(Stepper):
    """Logits of the next token depend on the last one alone: table [vocab, vocab]. `text` is what its cache holds."""

    device = torch.device("cpu")

    def __init__(self, table: Tensor, max_positions: int = 10**6) -> None:
        self.table, self.max_positions = table, max_positions
        self.vocab_size = table.shape[1]
        self.text: list[int] = []
        self.steps = 0

    @property
    def length(self) -> int:
        return len(self.text)

    def prefill(self, input_ids: Tensor) -> Tensor:
        self.text = input_ids[0].tolist()
        return self.table[input_ids[0, -1:]]

    def step(self, token_ids: Tensor) -> Tensor:
        self.steps += 1
        self.text += token_ids[0].tolist()
        assert len(self.text) <= self.max_positions
        return self.table[token_ids[0]][None]

    def score(self, input_ids: Tensor) -> Tensor:
        return self.table[input_ids]

    def crop_to(self, length: int) -> None:
        assert 0 <= length <= len(self.text)
        del self.text[length:]


def random_table(vocab: int, seed: int, spread: float = 1.0) -> Tensor:
    return spread * torch.randn(vocab, vocab, generator=torch.Generator().manual_seed(seed))


def chain(successors: list[int]) -> Tensor:
    """A table under which token i is followed by successors[i], at temperature 0."""
    table = torch.zeros(len(successors), len(successors))
    table[torch.arange(len(successors)), torch.tensor(successors)] = 9.0
    return table


def chi_square_p(counts: Tensor, probs: Tensor) -> float:
    """Chance of rows of counts [rows, n] at least as far from probs [rows, n] as these are, if probs were true.

    Rows are independent samples, each with its own total. A count where the probability is 0 makes it 0.
    """
    counts, probs = counts.double(), probs.double()
    if bool(counts[probs == 0].sum() > 0):
        return 0.0
    expected = counts.sum(dim=1, keepdim=True) * probs
    used = expected > 0
    assert float(expected[used].min()) >= 5, "too few samples for the chi-square approximation"
    statistic = float((((counts - expected) ** 2)[used] / expected[used]).sum())
    freedom = int((used.sum(dim=1) - 1).sum())
    return float(stats.chi2.sf(statistic, freedom))
