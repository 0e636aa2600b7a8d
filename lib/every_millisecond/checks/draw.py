"""Fresh random inputs for a check: odd sizes, so that no answer passes because a shape was round."""

from __future__ import annotations

import random

import torch
from torch import Tensor


class Draw:
    """A seeded source of sizes, numbers and tensors.

    Args:
        seed: the same seed draws the same inputs; a CheckFailed carries it.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)

    def integer(self, low: int, high: int) -> int:
        """low <= result <= high."""
        return self.random.randint(low, high)

    def odd(self, low: int, high: int) -> int:
        """An odd number between low and high."""
        return self.random.choice(range(low + (low + 1) % 2, high + 1, 2))

    def number(self, low: float, high: float) -> float:
        return self.random.uniform(low, high)

    def numbers(self, count: int, low: float, high: float) -> list[float]:
        return [self.random.uniform(low, high) for _ in range(count)]

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Standard normal values."""
        return torch.randn(*shape, generator=self.generator).to(dtype)

    def uniform(self, *shape: int) -> Tensor:
        """Values in [0, 1), FP32."""
        return torch.rand(*shape, generator=self.generator)

    def ids(self, count: int, vocabulary: int) -> Tensor:
        """Token ids, int64 [count]."""
        return torch.randint(vocabulary, (count,), generator=self.generator)
