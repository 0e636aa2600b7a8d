"""A draft of one layer that reads the target's last hidden state: EAGLE's idea (arXiv 2401.15077).

The target's feature of token t (its hidden state after the final norm) says much about what comes next, but not which
token was sampled from it. So the layer sees both, the feature of token t and the embedding of token t + 1, and predicts
the feature of token t + 1; the target's own head makes logits for token t + 2 of that. Fed back with the token drawn
from them, it drafts further. Embedding and head are the target's and are not stored here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llm_latency.arguments import check_count
from llm_latency.compat import head_dim
from llm_latency.engine.attention import StaticKV, attend_grouped, causal_mask, rotary_tables, rotate
from llm_latency.models import drafts, load_config


@dataclass(frozen=True, slots=True)
class FeatureShape:
    """Sizes of a feature layer, those of the target's own layers. positions: longest text it can read."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    rope_theta: float
    norm_eps: float
    positions: int

    @classmethod
    def of_config(cls, config) -> FeatureShape:
        """From a transformers configuration of a Llama-like model.

        Raises ValueError for scaled rotary positions, which this layer does not compute.
        """
        rope = dict(getattr(config, "rope_parameters", None) or {})
        kind = rope.get("rope_type", "default")
        if kind != "default":
            raise ValueError(f"a feature layer computes plain rotary positions; this model has rope_type {kind!r}")
        return cls(
            hidden=config.hidden_size,
            intermediate=config.intermediate_size,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=head_dim(config),
            rope_theta=float(rope.get("rope_theta") or getattr(config, "rope_theta", 10000.0)),
            norm_eps=config.rms_norm_eps,
            positions=config.max_position_embeddings,
        )


class Memory(Protocol):
    """Keys and values of tokens read before."""

    def extend(self, keys: Tensor, values: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Store k more keys and values [batch, kv_heads, k, head_dim] at positions [k]; return all that they may see,
        and who may see whom: bool [1, 1, k, all], None where everyone may see everything."""


class FeatureCache(StaticKV):
    """Keys and values of one feature layer, and how many tokens of them count."""

    length = 0

    def extend(self, keys: Tensor, values: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """As in `Memory`, positions being those behind what is stored. Raises ValueError for more than fit."""
        tokens = keys.shape[2]
        end = self.length + tokens
        if end > self.slots:
            raise ValueError(f"{end} tokens do not fit into a cache of {self.slots}")
        self.store(torch.cat((keys, values), dim=1), positions)
        self.length = end
        return *self.read(end), causal_mask(positions, end) if tokens > 1 else None

    def crop_to(self, length: int) -> None:
        """Forget every token after the first `length`: what was drafted and refused."""
        self.length = check_count("crop_to", length, 0, self.length)


class FeatureLayer(nn.Module):
    """Predicts the target's next feature from its last one and the token that followed.

    head_ids: int64 [v], rising, the ids of the target's vocabulary that this draft can name. Its logits have v columns;
    column j stands for id head_ids[j], and every other id has probability 0.
    """

    def __init__(self, shape: FeatureShape, head_ids: Tensor) -> None:
        super().__init__()
        if head_ids.dtype != torch.int64 or head_ids.dim() != 1 or head_ids.numel() == 0:
            raise ValueError(f"head_ids must be int64 [v], got {head_ids.dtype} {list(head_ids.shape)}")
        if not bool((head_ids.diff() > 0).all()):
            raise ValueError("head_ids must rise from each to the next")
        self.shape = shape
        hidden, q_dim, kv_dim = shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.token_norm, self.feature_norm, self.attention_norm, self.ffn_norm, self.out_norm = (
            nn.Parameter(torch.ones(hidden)) for _ in range(5)
        )
        self.join = nn.Linear(2 * hidden, hidden, bias=False)
        self.qkv = nn.Linear(hidden, q_dim + 2 * kv_dim, bias=False)
        self.output = nn.Linear(q_dim, hidden, bias=False)
        self.gate_up = nn.Linear(hidden, 2 * shape.intermediate, bias=False)
        self.down = nn.Linear(shape.intermediate, hidden, bias=False)
        self.register_buffer("head_ids", head_ids.clone())
        frequencies = 1.0 / shape.rope_theta ** (torch.arange(0, shape.head_dim, 2).float() / shape.head_dim)
        cos, sin = rotary_tables(frequencies, shape.positions)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def new_cache(self, max_length: int) -> FeatureCache:
        """An empty cache for up to `max_length` tokens of one text, in this layer's dtype and on its device."""
        check_count("max_length", max_length, 1, self.shape.positions)
        like = self.out_norm  # a matrix may have been quantised, a norm never is
        return FeatureCache(self.shape.kv_heads, max_length, self.shape.head_dim, like.dtype, like.device)

    def forward(self, embeddings: Tensor, features: Tensor, positions: Tensor, cache: Memory | None = None) -> Tensor:
        """Predict the next features [b, k, hidden].

        embeddings [b, k, hidden]: the target's, of tokens t + 1; features [b, k, hidden]: the target's after its final
        norm, or this layer's own, of tokens t; positions int64 [k]: of tokens t. Without a cache the k tokens are a
        whole text and see each other causally; with one they come after what it holds. What is returned is comparable
        to the target's features after its final norm: it goes to `logits`, and back in as the next step's feature.
        """
        shape, eps = self.shape, self.shape.norm_eps
        batch, tokens, hidden = features.shape
        token = F.rms_norm(embeddings, (hidden,), self.token_norm, eps)
        feature = F.rms_norm(features, (hidden,), self.feature_norm, eps)
        x = self.join(torch.cat((token, feature), dim=-1))  # [b, k, hidden]

        qkv = self.qkv(F.rms_norm(x, (hidden,), self.attention_norm, eps))
        qkv = qkv.view(batch, tokens, -1, shape.head_dim).transpose(1, 2)  # [b, heads + 2 * kv_heads, k, head_dim]
        qk, v = qkv.split((shape.heads + shape.kv_heads, shape.kv_heads), dim=1)
        q, k = rotate(qk, self.cos[positions], self.sin[positions]).split((shape.heads, shape.kv_heads), dim=1)
        k, v, mask = (k, v, None) if cache is None else cache.extend(k, v, positions)
        y = attend_grouped(q, k, v, mask, causal=cache is None and tokens > 1)
        x = x + self.output(y.transpose(1, 2).reshape(batch, tokens, -1))

        gate, up = self.gate_up(F.rms_norm(x, (hidden,), self.ffn_norm, eps)).chunk(2, dim=-1)
        x = x + self.down(F.silu(gate) * up)
        return F.rms_norm(x, (hidden,), self.out_norm, eps)

    def logits(self, features: Tensor, head_rows: Tensor) -> Tensor:
        """Logits [..., v] of predicted features [..., hidden] under the target's head rows [v, hidden] of `head_ids`.

        The final norm is part of `forward`, so that this is the product alone.
        """
        return F.linear(features, head_rows)


def load_feature_layer(*, dtype: torch.dtype = torch.float32, device: str | torch.device | None = None) -> FeatureLayer:
    """The layer that ships with the package, in evaluation mode, for the target of the profile "smollm2-135m" alone.

    Its weights are stored in BF16; FP32 holds the same values.
    """
    tensors = drafts.draft_tensors(drafts.CONDITIONED)
    layer = FeatureLayer(FeatureShape.of_config(load_config("smollm2-135m")), tensors["head_ids"])
    layer.load_state_dict(tensors)
    return layer.to(dtype=dtype, device=device).eval().requires_grad_(False)
