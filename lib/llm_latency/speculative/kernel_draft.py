"""The conditioned draft in the kernel: a guess is one pass of one layer, and takes a tenth of a millisecond."""

from __future__ import annotations

import torch
from torch import Tensor

from llm_latency.arguments import check_count, check_id_range
from llm_latency.engine import kernel_library
from llm_latency.engine.kernel_rows import BLOCK, KernelRows
from llm_latency.engine.kernel_weights import KernelWeights
from llm_latency.sampling import SamplingRule
from llm_latency.speculative.drafts import Columns, Draft, Drafting, Proposal
from llm_latency.speculative.feature_layer import FeatureLayer


class KernelDraft(Draft):
    """Drafts as `ConditionedDraft` does, with the layer's matrices in 8 or 4 bits and the head's rows in 8.

    model: the transformers model whose embedding and head the layer was trained with. bits: 8 or 4. max_length: tokens
    of the longest text, None for 2048 or the layer's own limit if lower. activations, threads: as for `KernelDecoder`.

    Raises ValueError or TypeError for options that do not fit, `KernelUnavailable` where the kernel cannot be built.
    """

    needs_features = True
    device = torch.device("cpu")

    def __init__(
        self,
        layer: FeatureLayer,
        model,
        *,
        bits: int = 8,
        max_length: int | None = None,
        activations: str = "int16",
        threads: int | None = None,
    ) -> None:
        embedding = model.get_input_embeddings().weight
        check_id_range(layer.head_ids, embedding.shape[0], name="head_ids")
        limit = layer.shape.positions
        self.max_positions = check_count("max_length", min(2048, limit) if max_length is None else max_length, 1, limit)
        head = model.get_output_embeddings().weight[layer.head_ids]
        lanes = kernel_library.load().kernel_lanes()
        with torch.no_grad():
            weights = KernelWeights.from_feature_layer(layer, embedding, head, lanes, self.max_positions, bits)
        blocks = -(-self.max_positions // BLOCK)
        self.kernel = KernelRows(weights, blocks, activations=activations, threads=threads, cache=None)
        self.step_bytes = weights.step_bytes
        self.vocab_size, self.columns = embedding.shape[0], Columns(layer.head_ids, self.device)
        self._table = torch.arange(blocks)[None]
        self.length = 0
        self.start = 0  # entries made of true features
        self.ahead: tuple[Tensor, Tensor] | None = None  # logits [1, v] and feature [1, hidden] of the last of them

    def begin(self, prompt: Tensor, first: int, capacity: int, features: Tensor | None) -> None:
        if features.shape[1] != self.kernel.weights.struct.hidden:
            raise ValueError(
                f"the target's features are {features.shape[1]} wide and this draft's "
                f"{self.kernel.weights.struct.hidden}"
            )
        if capacity > self.max_positions:
            raise ValueError(
                f"the request may grow to {capacity} tokens; this draft reads texts of up to {self.max_positions}"
            )
        self.start = 0
        self.commit([*prompt[0, 1:].tolist(), first], features)

    def propose(self, count: int, rule: SamplingRule) -> Proposal:
        drafting, (logits, feature) = Drafting(rule, self.columns), self.ahead
        for i in range(count):
            token = drafting.add(logits)
            if i < count - 1:
                logits, feature = self._forward(token, feature)
        return drafting.proposal()

    def commit(self, tokens: list[int], features: Tensor | None) -> None:
        self.length = self.start  # what was drafted stood on the layer's own features
        self.ahead = self._forward(torch.tensor(tokens), features[: len(tokens)])
        self.start = self.length

    def _forward(self, tokens: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """Add entries of tokens [k] and the features [k, hidden] before them: the last one's logits and feature."""
        count, start = tokens.shape[0], self.length
        end = start + count
        tables = self._table[:, : -(-end // BLOCK)].expand(count, -1).contiguous()
        # An id of the target's padded tail that this embedding lacks: any row will do, guesses may be wrong.
        tokens = tokens.clamp(max=self.vocab_size - 1)
        logits, out = self.kernel.compute(
            tokens, torch.arange(start, end), tables, torch.tensor([count - 1]), features.float().contiguous()
        )
        self.length = end
        return logits, out[-1:]
