"""What a draft hands over: tokens, and the distributions they were drawn from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from llm_latency.speculative.rule import SamplingRule, greedy_choices


@dataclass(frozen=True, slots=True)
class Proposal:
    """tokens: int64 [k], k may be 0. probs: [k, vocab], row i being what token i was drawn from; None under greedy.

    largest: under greedy the logits [k] of the tokens, which are NaN if a model's logits were; None if not a model's.
    """

    tokens: Tensor
    probs: Tensor | None = None
    largest: Tensor | None = None


class Draft(Protocol):
    """Guesses the target's next tokens. It is told everything that is committed, and forgets what was refused.

    device: where its tokens lie; None if anywhere. vocab_size: None if it can only name ids that it was shown.
    needs_features: whether it reads the target's hidden states. length: tokens its memory holds; after `begin` and
    after each `commit` that is everything committed less the last token.
    """

    device: torch.device | None
    vocab_size: int | None
    needs_features: bool
    length: int

    def begin(self, prompt: Tensor, first: int, capacity: int, features: Tensor | None) -> None:
        """Forget everything; read prompt [1, n], after which the target chose `first`.

        capacity: tokens that the request may grow to. features: the target's of the prompt [n, hidden], if needed.
        """

    def propose(self, count: int, rule: SamplingRule) -> Proposal:
        """Up to `count` tokens to follow what is committed; fewer, or none, where the draft cannot or will not."""

    def commit(self, tokens: list[int], features: Tensor | None) -> None:
        """The tokens that the last cycle added: accepted ones and the target's own.

        features: the target's of the tokens it read in that cycle [1 + proposed, hidden], if needed: of the last token
        committed before, and of the proposed ones.
        """


class Drafting:
    """Collects one proposal from the rows of logits that a model makes.

    ids: int64 [n], the ids that the n columns stand for; None if column i is id i. min_confidence: stop before a
    position at which the draft's most likely token has less than this probability. The decision must not look at the
    token drawn there: dropping tokens after having seen them would change what the output is distributed like.
    """

    def __init__(self, rule: SamplingRule, ids: Tensor | None = None, min_confidence: float | None = None) -> None:
        self.rule, self.ids, self.min_confidence = rule, ids, min_confidence
        unknown = None if ids is None else ids >= rule.vocab_size
        self.unknown = unknown if unknown is not None and bool(unknown.any()) else None
        self.tokens: list[Tensor] = []
        self.rows: list[Tensor] = []  # greedy: the largest logit of each row; sampling: the distribution

    def add(self, logits: Tensor) -> Tensor | None:
        """Choose from logits [1, n]: the id, int64 [1], or None if the draft had better stop."""
        # Ids behind the target's vocabulary, of a longer padded tail, name nothing.
        if self.ids is None:
            logits = logits[:, : self.rule.vocab_size]
        elif self.unknown is not None:
            logits = logits.masked_fill(self.unknown, -torch.inf)
        if self.rule.greedy:
            row, column = greedy_choices(logits)
            if self._unsure(lambda: (row - logits.float().logsumexp(dim=-1)).exp()):
                return None
        else:
            row = self.rule.probabilities(logits)
            if self._unsure(lambda: row.amax(dim=-1)):
                return None
            column = self.rule.sample(row)
        token = column if self.ids is None else self.ids[column]
        self.tokens.append(token)
        self.rows.append(row)
        return token

    def proposal(self, device: torch.device) -> Proposal:
        """What was chosen so far."""
        if not self.tokens:
            return no_proposal(device)
        tokens, rows = torch.cat(self.tokens), torch.cat(self.rows)  # [k]; [k] or [k, n]
        if self.rule.greedy:
            return Proposal(tokens, largest=rows)
        return Proposal(tokens, probs=self._over_the_vocabulary(rows))

    def _over_the_vocabulary(self, rows: Tensor) -> Tensor:
        """Probabilities [k, n] over the columns to [k, vocab]: 0 for every id that the draft cannot name."""
        if self.ids is None and rows.shape[1] == self.rule.vocab_size:
            return rows
        full = rows.new_zeros(rows.shape[0], self.rule.vocab_size)
        if self.ids is None:
            full[:, : rows.shape[1]] = rows
        elif self.unknown is None:
            full[:, self.ids] = rows
        else:
            full[:, self.ids[~self.unknown]] = rows[:, ~self.unknown]
        return full

    def _unsure(self, confidence) -> bool:
        return self.min_confidence is not None and bool(confidence() < self.min_confidence)


def ids_on(device: torch.device, tokens: list[int]) -> Tensor:
    """The ids there, int64 [k]. `torch.tensor(..., device=device)` would wait for all that a GPU still has to do."""
    return torch.tensor(tokens, dtype=torch.int64).to(device, non_blocking=True)


def no_proposal(device: torch.device) -> Proposal:
    """A proposal of no tokens, with the empty distributions that go with it left out."""
    return Proposal(torch.empty(0, dtype=torch.int64, device=device))


def check_confidence(value: float | None) -> float | None:
    """Raise ValueError unless it is None or from 0 to 1, TypeError if it is no number."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
        raise TypeError(f"min_confidence={value!r}; expected None or a probability")
    if value is not None and not 0 <= value <= 1:
        raise ValueError(f"min_confidence={value}; expected None or a probability")
    return value
