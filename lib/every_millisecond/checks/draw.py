"""Fresh random inputs for a check: odd sizes, and numbers on which every known mistake gives an answer of its own."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterable, Mapping
from numbers import Real
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
Answers = tuple[object, Mapping[str, object]]  # the right one, and the wrong ones by the name of the mistake


class NoSuchDraw(Exception):
    """Two answers are the same on every draw: a fault of the check, not of the learner."""


class Draw:
    """A seeded source of sizes, numbers and tensors.

    Args:
        seed: the same seed draws the same inputs; a CheckFailed carries it.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)

    def until(
        self, make: Callable[[], T], answers: Callable[[T], Iterable[Answers]], *, rel: float = 1e-3,
        fit: Callable[[T], bool] = lambda case: True, tries: int = 1000,
    ) -> T:  # fmt: skip
        """The first case on which the right answer and all wrong ones differ, each from each.

        So no wrong answer passes by chance, and none is taken for another. What a learner is judged by is this case;
        edge cases, on which some rules agree, come after it.

        Args:
            make: draws a case. answers: what the rules give for it, one pair or several that are told apart each.
            rel: how far two answers must be apart, as a share of the larger. fit: what else a case must be.

        Raises:
            NoSuchDraw: no draw tells two answers apart; the message names them.
        """
        for _ in range(tries):
            case = make()
            alike = next((names for pair in answers(case) for names in _alike(*pair, rel)), ())
            if not alike and fit(case):
                return case
        raise NoSuchDraw(f"{tries} draws, and none is fit or tells all answers apart, the last: {' | '.join(alike)}")

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

    def shuffled(self, values: Iterable[T]) -> list[T]:
        values = list(values)
        self.random.shuffle(values)
        return values

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Standard normal values."""
        return torch.randn(*shape, generator=self.generator).to(dtype)

    def uniform(self, *shape: int) -> Tensor:
        """Values in [0, 1), FP32."""
        return torch.rand(*shape, generator=self.generator)

    def ids(self, count: int, vocabulary: int) -> Tensor:
        """Token ids, int64 [count]."""
        return torch.randint(vocabulary, (count,), generator=self.generator)


def _alike(right: object, wrong: Mapping[str, object], rel: float) -> Iterable[tuple[str, str]]:
    """Pairs of names whose answers a comparison could take for one another."""
    named = [("the right answer", right), *wrong.items()]
    return ((a, b) for (a, x), (b, y) in itertools.combinations(named, 2) if not _apart(x, y, rel))


def _apart(a: object, b: object, rel: float) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape != b.shape or not torch.allclose(a.double(), b.double(), rel, rel / 10, equal_nan=True)
    if isinstance(a, Real) and isinstance(b, Real):
        return not math.isclose(a, b, rel_tol=rel, abs_tol=1e-9)
    return a != b
