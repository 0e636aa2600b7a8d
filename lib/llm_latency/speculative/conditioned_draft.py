"""A draft that reads the target's hidden state: EAGLE's idea with one layer (Li et al. 2024, arXiv 2401.15077).

Entry t of its memory is made of the target's feature of token t and the embedding of token t + 1; the layer predicts
the feature of token t + 1, and the target's head makes of it the distribution of token t + 2. Beyond the first drafted
token the target has no features yet, so the layer's own stand in; once the target has verified, they are thrown away
and the true ones are read.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from llm_latency.arguments import check_id_range
from llm_latency.quantization import Int8Linear, QuantizedLinear, quantize_
from llm_latency.sampling import SamplingRule
from llm_latency.speculative.drafts import Columns, Draft, Drafting, Proposal, ids_on
from llm_latency.speculative.feature_layer import FeatureCache, FeatureLayer


class ConditionedDraft(Draft):
    """Drafts with a `FeatureLayer`.

    embedding: the target's input embedding [vocab, hidden]. head: rows of the target's output head for the layer's
    `head_ids` [v, hidden]; every other id has draft probability 0.
    """

    needs_features = True

    def __init__(self, layer: FeatureLayer, embedding: Tensor, head: Tensor) -> None:
        ids = layer.head_ids
        if embedding.dim() != 2 or head.shape != (ids.shape[0], embedding.shape[1]):
            raise ValueError(
                f"expected embedding [vocab, hidden] and head [{ids.shape[0]}, hidden]; got {list(embedding.shape)} "
                f"and {list(head.shape)}"
            )
        check_id_range(ids, embedding.shape[0], name="head_ids")
        self.layer, self.device, self.vocab_size = layer, ids.device, embedding.shape[0]
        self.columns = Columns(ids, ids.device)
        self.embedding = embedding.detach()
        self.head: nn.Module = head_linear(head)
        self.cache: FeatureCache | None = None
        self.ahead: Tensor | None = None  # [1, 1, hidden]: the predicted feature of the last committed token
        self.start = 0  # entries made of true features

    @classmethod
    def for_model(cls, layer: FeatureLayer, model, *, weights: str | None = None) -> ConditionedDraft:
        """With the embedding and head of a transformers model, cast to the layer's dtype.

        weights: "int8" or "int4" quantises a copy of the layer, and the head's rows in INT8; None leaves them.
        """
        dtype = next(layer.parameters()).dtype
        embedding = model.get_input_embeddings().weight.detach().to(dtype)
        head = model.get_output_embeddings().weight.detach()[layer.head_ids].to(dtype)
        if weights is None:
            return cls(layer, embedding, head)
        layer = copy.deepcopy(layer)
        quantize_(layer, weights, keep_bfloat16=True)
        draft = cls(layer, embedding, head)
        draft.head = Int8Linear.from_linear(draft.head, keep_bfloat16=True)
        return draft

    @property
    def length(self) -> int:
        """Entries that the layer's cache holds."""
        return 0 if self.cache is None else self.cache.length

    @property
    def step_bytes(self) -> int:
        """Weight bytes that one drafted token reads: the layer, the head's rows, one row of the embedding."""
        parts = [*self.layer.modules(), self.head]
        quantised = [part for part in parts if isinstance(part, QuantizedLinear)]
        plain = [p for part in parts if not isinstance(part, QuantizedLinear) for p in part.parameters(recurse=False)]
        return sum(part.nbytes for part in quantised + plain) + self.embedding[0].nbytes

    def begin(self, prompt: Tensor, first: int, capacity: int, features: Tensor | None) -> None:
        hidden = self.embedding.shape[1]
        if features.shape[1] != hidden:
            raise ValueError(f"the target's features are {features.shape[1]} wide and this draft's {hidden}")
        positions = self.layer.shape.positions
        if capacity > positions:
            raise ValueError(f"the request may grow to {capacity} tokens; this draft reads texts of up to {positions}")
        self.cache = self.layer.new_cache(capacity)
        tokens = torch.cat([prompt[0, 1:], ids_on(self.device, [first])])  # [n]: those that follow each feature
        self._read(tokens, features)

    def propose(self, count: int, rule: SamplingRule) -> Proposal:
        drafting, feature = Drafting(rule, self.columns), self.ahead
        for i in range(count):
            token = drafting.add(self.head(feature[0]))  # [1, v]
            if i < count - 1:
                feature = self._forward(token, feature[0])
        return drafting.proposal()

    def commit(self, tokens: list[int], features: Tensor | None) -> None:
        self.cache.crop_to(self.start)  # what was drafted stood on the layer's own features
        self._read(ids_on(self.device, tokens), features[: len(tokens)])

    def _read(self, tokens: Tensor, features: Tensor) -> None:
        """Add entries of true features [k, hidden] and the tokens [k] that followed them."""
        self.ahead = self._forward(tokens, features)[:, -1:]
        self.start = self.cache.length

    def _forward(self, tokens: Tensor, features: Tensor) -> Tensor:
        # An id of the target's padded tail that this embedding lacks: any row will do, guesses may be wrong.
        embeddings = self.embedding[tokens.clamp(max=self.vocab_size - 1)]  # [k, hidden]
        start = self.cache.length
        positions = torch.arange(start, start + tokens.shape[0], device=self.device)
        return self.layer(embeddings[None], features.to(embeddings.dtype)[None], positions, self.cache)


def head_linear(rows: Tensor) -> nn.Linear:
    """A linear layer over given rows [v, hidden], without a copy of them."""
    linear = nn.Linear(rows.shape[1], rows.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(rows.detach(), requires_grad=False)
    return linear
