"""Acceptance rules for exercises 10, run over many cycles. Those behind `left_over` are broken; do not mend them here.

A rule is called with the place in the draft, the drafted tokens and uniform numbers [cycles], the target's rows
[gamma + 1, vocab] and the draft's [gamma, vocab]. It returns which tokens are kept, bool [cycles], and the distribution
[vocab] that a refused one is replaced from.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def run_cycles(rule: Callable, target: Tensor, draft: Tensor, cycles: int, generator: torch.Generator) -> Tensor:
    """The tokens of many cycles, int64 [cycles, gamma + 1]; -1 stands behind the last token of a cycle.

    target [gamma + 1, vocab] and draft [gamma, vocab] hold the same distributions in every cycle, whatever was drawn.
    """

    def draw(probs: Tensor) -> Tensor:
        return torch.multinomial(probs, cycles, replacement=True, generator=generator)

    out = torch.full((cycles, len(target)), -1)
    going_on = torch.ones(cycles, dtype=torch.bool)
    for place in range(len(draft)):
        tokens, uniforms = draw(draft[place]), torch.rand(cycles, generator=generator)
        kept, replacement = rule(place, tokens, uniforms, target, draft)
        out[going_on, place] = torch.where(kept, tokens, draw(replacement))[going_on]
        going_on = going_on & kept
    out[going_on, len(draft)] = draw(target[-1])[going_on]  # all kept: one more from the target
    return out


def left_over(p: Tensor, q: Tensor) -> Tensor:
    """The residual distribution of p and q [vocab]."""
    excess = (p - q).clamp(min=0)
    return excess / excess.sum() if excess.any() else p


def constant(place, tokens, uniforms, target, draft):
    p, q = target[place], draft[place]
    return p[tokens] / q[tokens] > 0.5, left_over(p, q)


def no_residual(place, tokens, uniforms, target, draft):
    p, q = target[place], draft[place]
    return uniforms * q[tokens] < p[tokens], p


def one_late(place, tokens, uniforms, target, draft):
    p, q = target[place + 1], draft[place]
    return uniforms * q[tokens] < p[tokens], left_over(p, q)
