"""Drafts: what guesses the target's next tokens, a smaller model or the text itself."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import DynamicCache

from llm_latency.arguments import check_count
from llm_latency.generation import as_stepper
from llm_latency.sampling import SamplingRule, greedy


@dataclass(frozen=True, slots=True)
class Proposal:
    """What a draft hands over: tokens int64 [k], k may be 0, and what they were drawn from."""

    tokens: Tensor
    probs: Tensor | None = None  # [k, vocab], row i being what token i was drawn from; None under greedy, or of none
    largest: Tensor | None = None  # under greedy the tokens' logits [k], NaN if a model's were; None if not a model's


class Draft(ABC):
    """Guesses the target's next tokens. It gets everything that is committed, and forgets what was refused."""

    device: torch.device | None = None  # where its tokens lie; None if anywhere
    vocab_size: int | None = None  # None if it can only name ids that it was shown
    needs_features: bool = False  # whether it reads the target's hidden states
    length: int = 0  # tokens its memory holds; after `begin` and each `commit` all that is committed less the last
    step_bytes: int | None = None  # bytes of weights that one drafted token reads; None if it cannot tell

    @abstractmethod
    def begin(self, prompt: Tensor, first: int, capacity: int, features: Tensor | None) -> None:
        """Forget everything; read prompt [1, n], after which the target chose `first`.

        capacity: tokens that the request may grow to. features: the target's of the prompt [n, hidden], if needed.
        """

    @abstractmethod
    def propose(self, count: int, rule: SamplingRule) -> Proposal:
        """Up to `count` tokens to follow what is committed; fewer, or none, where the draft cannot or will not."""

    @abstractmethod
    def commit(self, tokens: list[int], features: Tensor | None) -> None:
        """The tokens that the last cycle added: accepted ones and the target's own.

        features: the target's of the tokens it read in that cycle [1 + proposed, hidden], if needed: of the last token
        committed before, and of the proposed ones.
        """


class ModelDraft(Draft):
    """Drafts with a model of its own memory: a transformers model, a FastDecoder, or another `Stepper`.

    Where the text outgrows the draft's context it proposes nothing, and the target goes on alone. A FastDecoder made
    with `head_ids` drafts from these ids only.
    """

    def __init__(self, model) -> None:
        self.stepper = as_stepper(model, DynamicCache)  # whose window, if any, keeps what a refused token would drop
        self.device, self.vocab_size = self.stepper.device, self.stepper.vocab_size
        self.step_bytes = self.stepper.step_bytes
        self.columns = Columns(self.stepper.head_ids, self.device)
        self.last: int | None = None  # the last committed token, which the model has not read
        self.start = 0  # tokens committed before it

    @property
    def length(self) -> int:
        return self.stepper.length

    def begin(self, prompt: Tensor, first: int, capacity: int, features: Tensor | None = None) -> None:
        self.last, self.start = first, prompt.shape[1]
        if self.start <= self.stepper.max_positions:
            self.stepper.prefill(self._known(prompt))

    def propose(self, count: int, rule: SamplingRule) -> Proposal:
        drafting = Drafting(rule, self.columns)
        token = self._known(ids_on(self.device, [self.last]))
        for _ in range(min(count, self.stepper.max_positions - self.start)):
            token = drafting.add(self.stepper.step(token[None])[0])
        return drafting.proposal()

    def commit(self, tokens: list[int], features: Tensor | None = None) -> None:
        held = [self.last, *tokens[:-1]]  # what the cache must hold behind `start`; the newest token is never read
        end = self.start + len(held)
        if end <= self.stepper.max_positions:
            if self.length > end:
                self.stepper.crop_to(end)  # the rejected ones
            missing = held[self.length - self.start :]
            if missing:  # the last proposed token, if all were accepted: nothing was drafted from it
                self.stepper.step(self._known(ids_on(self.device, missing)[None]))
        self.last, self.start = tokens[-1], end

    def _known(self, tokens: Tensor) -> Tensor:
        """The tokens, but for ids of the target's padded tail that the draft's embedding lacks: a wrong word in the
        draft's memory costs acceptance, a missing row would end the request."""
        return tokens.clamp(max=self.vocab_size - 1)


class PromptLookupDraft(Draft):
    """Proposes what followed the latest earlier occurrence of the text's last n tokens, n from max_ngram to min_ngram
    (Saxena 2023, "Prompt Lookup Decoding").

    It costs next to nothing and pays where the answer quotes its prompt: summaries, edits, code. Its distribution is
    one-hot: the proposed token has q = 1, so it is accepted with the target's own probability p.
    """

    def __init__(self, max_ngram: int = 3, min_ngram: int = 1) -> None:
        self.max_ngram = check_count("max_ngram", max_ngram)
        self.min_ngram = check_count("min_ngram", min_ngram, 1, max_ngram)
        self.where: torch.device | None = None  # the target's device
        self.text: list[int] = []  # everything committed
        self.follows: dict[tuple[int, ...], int] = {}  # n-gram -> position behind its latest earlier occurrence

    @property
    def length(self) -> int:
        return max(0, len(self.text) - 1)

    def begin(self, prompt: Tensor, first: int, capacity: int, features: Tensor | None = None) -> None:
        self.where = prompt.device
        self.text, self.follows = [], {}
        self.commit([*prompt[0].tolist(), first])

    def propose(self, count: int, rule: SamplingRule) -> Proposal:
        start = self._find()
        tokens = ids_on(self.where, [] if start is None else self.text[start : start + count])
        if rule.greedy:
            return Proposal(tokens)
        one_hot = torch.zeros(len(tokens), rule.vocab_size, device=self.where)
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


class Columns:
    """What the columns of a draft's logits stand for: ids int64 [n]; None where column i is id i."""

    def __init__(self, ids: Tensor | None, device: torch.device) -> None:
        self.device = device
        self.ids = None if ids is None else ids.to(device)
        self.largest = None if ids is None else int(ids.max())

    def cut(self, logits: Tensor, vocab_size: int) -> Tensor:
        """Logits [1, n] less what lies behind the target's vocabulary, in a longer padded tail, and names nothing."""
        if self.ids is None:
            return logits[:, :vocab_size]
        return logits if self.largest < vocab_size else logits.masked_fill(self.ids >= vocab_size, -torch.inf)

    def spread(self, probs: Tensor, vocab_size: int) -> Tensor:
        """Probabilities [k, n] over the columns to [k, vocab]: 0 for every id that the draft cannot name."""
        if self.ids is None and probs.shape[1] == vocab_size:
            return probs
        if self.ids is None:
            return torch.nn.functional.pad(probs, (0, vocab_size - probs.shape[1]))
        full = probs.new_zeros(probs.shape[0], max(vocab_size, self.largest + 1))
        full[:, self.ids] = probs
        return full[:, :vocab_size]


class Drafting:
    """Collects one proposal from the rows of logits that a model makes."""

    def __init__(self, rule: SamplingRule, columns: Columns) -> None:
        self.rule, self.columns = rule, columns
        self.tokens: list[Tensor] = []
        self.rows: list[Tensor] = []  # greedy: the largest logit of each row; sampling: the distribution

    def add(self, logits: Tensor) -> Tensor:
        """Choose from logits [1, n]: the id, int64 [1]."""
        logits = self.columns.cut(logits, self.rule.vocab_size)
        if self.rule.greedy:
            row, column = greedy(logits)
        else:
            row = self.rule.probabilities(logits)
            column = self.rule.sample(row)
        token = column if self.columns.ids is None else self.columns.ids[column]
        self.tokens.append(token)
        self.rows.append(row)
        return token

    def proposal(self) -> Proposal:
        """What was chosen so far."""
        if not self.tokens:
            return Proposal(ids_on(self.columns.device, []))
        tokens, rows = torch.cat(self.tokens), torch.cat(self.rows)  # [k]; [k] or [k, n]
        if self.rule.greedy:
            return Proposal(tokens, largest=rows)
        return Proposal(tokens, probs=self.columns.spread(rows, self.rule.vocab_size))


def ids_on(device: torch.device, tokens: list[int]) -> Tensor:
    """The ids there, int64 [k]. `torch.tensor(..., device=device)` would wait for all that a GPU still has to do."""
    return torch.tensor(tokens, dtype=torch.int64).to(device, non_blocking=True)
