"""What the acceptance rule refuses: shapes that do not fit, and numbers that are no probabilities."""

from __future__ import annotations

import torch
from torch import Tensor

SUM_TOLERANCE = 1e-3  # a distribution over 150k tokens in FP32 sums to 1 within some 1e-5; logits do not come near


def check_verify(draft_tokens: Tensor, draft_probs: Tensor, target_probs: Tensor, uniforms: Tensor) -> None:
    """Raise TypeError or ValueError, naming the value, for arguments that `verify` cannot judge."""
    named = dict(draft_tokens=draft_tokens, draft_probs=draft_probs, target_probs=target_probs, uniforms=uniforms)
    _check_shapes(named)
    tokens, vocab = draft_tokens.tolist(), draft_probs.shape[1]
    if tokens and not (0 <= min(tokens) and max(tokens) < vocab):
        raise ValueError(f"draft_tokens holds {tokens}; expected ids from 0 to {vocab - 1}")
    chances = draft_probs.gather(1, draft_tokens[:, None].long())[:, 0]  # [gamma]
    # NaN spoils the sum of its row, so the sums find it without a pass of their own. All goes to the host at once.
    sums = [probs.sum(dim=-1, dtype=torch.float64) for probs in (draft_probs, target_probs)]
    minima = [probs.amin(dim=-1) for probs in (draft_probs, target_probs)]
    facts = (*sums, *minima, chances, uniforms)
    sizes = [len(fact) for fact in facts]
    numbers = [fact.tolist() for fact in torch.cat([fact.double() for fact in facts]).cpu().split(sizes)]
    for name, totals, least in zip(("draft_probs", "target_probs"), numbers[:2], numbers[2:4], strict=True):
        for total in totals:
            if not abs(total - 1) <= SUM_TOLERANCE:
                raise ValueError(f"a row of {name} holds NaN or does not sum to 1: it sums to {total:g}")
        if least and min(least) < 0:
            raise ValueError(f"{name} holds {min(least):g}; expected probabilities")
    for token, chance, u in zip(tokens, *numbers[4:], strict=True):
        if not 0 <= u <= 1:
            raise ValueError(f"uniforms holds {u}; expected numbers drawn from [0, 1)")
        if chance <= 0:
            raise ValueError(
                f"draft token {token} has probability {chance:g} in draft_probs; "
                "expected the distribution that it was drawn from"
            )


def _check_shapes(named: dict[str, Tensor]) -> None:
    for name, value in named.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} is a {type(value).__name__}; expected a tensor")
        if value.is_floating_point() == (name == "draft_tokens") or value.dtype == torch.bool:
            kind = "int64" if name == "draft_tokens" else "floating-point"
            raise TypeError(f"{name} is {value.dtype}; expected a {kind} tensor")
    tokens, target = named["draft_tokens"], named["target_probs"]
    if tokens.dim() != 1 or target.dim() != 2 or target.shape[1] == 0:
        raise ValueError(
            f"expected draft_tokens [gamma] and target_probs [gamma + 1, vocab]; got {list(tokens.shape)} and "
            f"{list(target.shape)}"
        )
    gamma, vocab = tokens.shape[0], target.shape[1]
    wanted = dict(draft_probs=(gamma, vocab), target_probs=(gamma + 1, vocab), uniforms=(gamma,))
    for name, shape in wanted.items():
        if named[name].shape != shape:
            raise ValueError(
                f"{name} has shape {list(named[name].shape)}; expected {list(shape)} for {gamma} drafted tokens and "
                f"a vocabulary of {vocab}"
            )
    if len({value.device for value in named.values()}) > 1:
        places = ", ".join(f"{name} on {value.device}" for name, value in named.items())
        raise ValueError(f"expected one device; got {places}")
