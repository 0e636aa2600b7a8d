"""Drafting without a model: what followed the last time these words stood in the text."""

from __future__ import annotations

import torch
from torch import Tensor

from llm_latency.speculative.proposal import Proposal, ids_on, no_proposal
from llm_latency.speculative.rule import SamplingRule


class PromptLookupDraft:
    """Proposes what followed the latest earlier occurrence of the text's last n tokens, n from max_ngram to min_ngram
    (Saxena 2023, "Prompt Lookup Decoding").

    It costs next to nothing and pays where the answer quotes its prompt: summaries, edits, code. Its distribution is
    one-hot: the proposed token has q = 1, so it is accepted with the target's own probability p.
    """

    device = None  # it computes nothing
    vocab_size = None  # it names ids of the text alone
    needs_features = False

    def __init__(self, max_ngram: int = 3, min_ngram: int = 1) -> None:
        for name, value in (("max_ngram", max_ngram), ("min_ngram", min_ngram)):
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name}={value!r}; expected an int")
        if not 1 <= min_ngram <= max_ngram:
            raise ValueError(f"expected 1 <= min_ngram <= max_ngram; got min_ngram={min_ngram}, max_ngram={max_ngram}")
        self.max_ngram, self.min_ngram = max_ngram, min_ngram
        self.where: torch.device | None = None  # the target's device
        self.text: list[int] = []  # everything committed
        self.follows: dict[tuple[int, ...], int] = {}  # n-gram -> position behind its latest earlier occurrence

    @property
    def length(self) -> int:
        """Committed tokens less the last, as for a draft with a cache."""
        return max(0, len(self.text) - 1)

    def begin(self, prompt: Tensor, first: int, capacity: int, features: Tensor | None = None) -> None:
        self.where = prompt.device
        self.text, self.follows = [], {}
        self.commit([*prompt[0].tolist(), first])

    def propose(self, count: int, rule: SamplingRule) -> Proposal:
        start = self._find()
        if start is None or count < 1:
            return no_proposal(self.where)
        tokens = ids_on(self.where, self.text[start : start + count])
        if rule.greedy:
            return Proposal(tokens)
        one_hot = torch.zeros(len(tokens), rule.vocab_size, device=tokens.device)
        return Proposal(tokens, probs=one_hot.scatter_(1, tokens[:, None], 1.0))

    def commit(self, tokens: list[int], features: Tensor | None = None) -> None:
        for token in tokens:
            # Note the n-grams that end where the text ends now: only with one more token is there something to propose.
            for n in range(self.min_ngram, min(self.max_ngram, len(self.text)) + 1):
                self.follows[tuple(self.text[-n:])] = len(self.text)
            self.text.append(token)

    def _find(self) -> int | None:
        """The position behind the latest earlier occurrence of the longest known suffix, or None."""
        for n in range(min(self.max_ngram, len(self.text)), self.min_ngram - 1, -1):
            found = self.follows.get(tuple(self.text[-n:]))
            if found is not None:
                return found
        return None
