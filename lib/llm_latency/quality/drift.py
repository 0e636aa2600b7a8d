"""Drift: how far a model wanders from itself when it decodes through another cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from llm_latency.arguments import check_count
from llm_latency.quality.perplexity import CHUNK, check_text, outputs_in_chunks


@dataclass(frozen=True, slots=True)
class DriftReport:
    """One text decoded twice: through the exact cache, and through the one under test.

    layer_error: [layers]; per decoder layer, the norm of the change in its output over the norm of the output, all
        positions together. position_error: [n]; the same per position, all layers together.
    kl: [n]; Kullback-Leibler divergence of the next-token distributions in nats, exact from tested.
    agrees: bool [n]; whether both put the same token first.
    """

    layer_error: Tensor
    position_error: Tensor
    kl: Tensor
    agrees: Tensor

    @property
    def agreement(self) -> float:
        """Share of positions at which both put the same token first, 0 to 1."""
        return float(self.agrees.float().mean())

    @property
    def mean_kl(self) -> float:
        """Mean over positions, in nats."""
        return float(self.kl.double().mean())

    def __str__(self) -> str:
        worst = int(self.layer_error.argmax())
        return (
            f"same first choice at {int(self.agrees.sum())} of {len(self.agrees)} positions, "
            f"mean KL {self.mean_kl:.1e} nats, largest {float(self.kl.max()):.1e}; "
            f"relative error of the layers' outputs up to {float(self.layer_error[worst]):.1e} (layer {worst})"
        )


def drift(
    model: PreTrainedModel, input_ids: Tensor, make_cache: Callable[[], Cache], *, chunk_size: int = CHUNK
) -> DriftReport:
    """Decode input_ids [1, n] through `make_cache()` and through an exact cache, chunk by chunk, and compare.

    make_cache: a function without arguments that returns a fresh cache.

    Both runs see the same text, so an early error cannot send them down different paths: what is measured is the
    cache. The tested cache is read as later steps read it, but each chunk's own tokens are read as `update` returns
    them.

    Raises TypeError or ValueError for ids as `perplexity` does, and ValueError for a cache that already holds tokens.
    """
    input_ids = check_text(model, input_ids)
    check_count("chunk_size", chunk_size)
    exact = outputs_in_chunks(model, input_ids, None, chunk_size, output_hidden_states=True)
    tested = outputs_in_chunks(model, input_ids, make_cache(), chunk_size, output_hidden_states=True)
    changes, sizes, kl, agrees = [], [], [], []
    for (_, a), (_, b) in zip(exact, tested, strict=True):
        # hidden_states[0] is the embedding, which no cache can change. Squared norms: [layers, chunk]
        pairs = list(zip(a.hidden_states[1:], b.hidden_states[1:], strict=True))
        changes.append(torch.stack([(y.float() - x.float()).square().sum(-1)[0] for x, y in pairs]))
        sizes.append(torch.stack([x.float().square().sum(-1)[0] for x, _ in pairs]))
        p, q = a.logits[0].float().log_softmax(-1), b.logits[0].float().log_softmax(-1)  # [chunk, vocab]
        # Rounding can leave a divergence of equal distributions just below zero.
        kl.append((p.exp() * (p - q)).sum(-1).clamp_(min=0.0))
        agrees.append(p.argmax(-1) == q.argmax(-1))
    change, size = torch.cat(changes, dim=1).double().cpu(), torch.cat(sizes, dim=1).double().cpu()
    return DriftReport(
        layer_error=(change.sum(1) / size.sum(1)).sqrt(),
        position_error=(change.sum(0) / size.sum(0)).sqrt(),
        kl=torch.cat(kl).cpu(),
        agrees=torch.cat(agrees).cpu(),
    )
