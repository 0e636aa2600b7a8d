"""A page pool and a causal model as small as they get, for the exercises on batching."""

from __future__ import annotations

import torch


class OutOfPages(Exception):
    """The pool has too few free pages; nothing was changed."""


class Pool:
    """Pages of `page_size` slots, one token each. Slot s lies in page s // page_size."""

    def __init__(self, num_pages, page_size):
        self.page_size = page_size
        self.free = list(range(num_pages))  # pages that nobody has, in any order
        self.tables = {}  # request -> its pages, the first tokens' page first
        self.filled = {}  # request -> how many tokens it has stored


class ToyModel:
    """A causal language model: what it says at a position depends on the ids up to there, and on nothing behind.

    Called with ids [batch, n]; the logits [batch, n, 97] at a position predict the token after it.
    """

    def __init__(self):
        self.calls = 0

    def __call__(self, ids):
        self.calls += 1
        state, choices = torch.ones(ids.shape[0], dtype=torch.long), []
        for column in ids.T:
            state = (state * 31 + column + 7) % 997
            choices.append(state % 97)
        return torch.nn.functional.one_hot(torch.stack(choices, 1), 97).float()
