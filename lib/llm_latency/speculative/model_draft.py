"""A smaller language model as the draft."""

from __future__ import annotations

from torch import Tensor

from llm_latency.speculative.proposal import Drafting, Proposal, check_confidence, ids_on, no_proposal
from llm_latency.speculative.rule import SamplingRule
from llm_latency.speculative.targets import as_reader, column_ids


class ModelDraft:
    """Drafts with a model of its own memory: a transformers model, a FastDecoder, or anything `as_reader` takes.

    Where the text outgrows the draft's context it proposes nothing, and the target goes on alone. A FastDecoder made
    with `head_ids` drafts from these ids only. min_confidence: stop a draft early, see `Drafting`.
    """

    needs_features = False

    def __init__(self, model, *, min_confidence: float | None = None) -> None:
        self.reader = as_reader(model)
        self.device = self.reader.device
        ids = column_ids(self.reader)
        self.ids = None if ids is None else ids.to(self.device)
        self.vocab_size = self.reader.vocab_size
        self.max_positions = self.reader.max_positions
        self.min_confidence = check_confidence(min_confidence)
        self.last: int | None = None  # the last committed token, which the model has not read
        self.start = 0  # tokens committed before it

    @property
    def length(self) -> int:
        """Tokens that the model's cache holds."""
        return self.reader.length

    def begin(self, prompt: Tensor, first: int, capacity: int, features: Tensor | None = None) -> None:
        self.last, self.start = first, prompt.shape[1]
        if self.start <= self.max_positions:
            self.reader.prefill(self._known(prompt))

    def propose(self, count: int, rule: SamplingRule) -> Proposal:
        count = min(count, self.max_positions - self.start)
        if count < 1:
            return no_proposal(self.device)
        drafting = Drafting(rule, self.ids, self.min_confidence)
        token = self._known(ids_on(self.device, [self.last]))
        for _ in range(count):
            token = drafting.add(self.reader.step(token[None])[0])
            if token is None:
                break
        return drafting.proposal(self.device)

    def commit(self, tokens: list[int], features: Tensor | None = None) -> None:
        held = [self.last, *tokens[:-1]]  # what the cache must hold behind `start`; the newest token is never read
        end = self.start + len(held)
        if end <= self.max_positions:
            if self.reader.length > end:
                self.reader.crop_to(end)  # the rejected ones
            missing = held[self.reader.length - self.start :]
            if missing:  # the last proposed token, if all were accepted: nothing was drafted from it
                self.reader.step(self._known(ids_on(self.device, missing)[None]))
        self.last, self.start = tokens[-1], end

    def _known(self, tokens: Tensor) -> Tensor:
        """The tokens, but for ids of the target's padded tail that the draft's embedding lacks: a wrong word in the
        draft's memory costs acceptance, a missing row would end the request."""
        return tokens.clamp(max=self.vocab_size - 1)
