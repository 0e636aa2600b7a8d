"""The acceptance rule of speculative decoding, and nothing else: two pure functions.

A draft proposed tokens; the target says which of them stand. The rule leaves the distribution of the output exactly the
target's (Leviathan et al. 2023, arXiv 2211.17192, Appendix A.1; Chen et al. 2023, arXiv 2302.01318, Theorem 1).
"""

from __future__ import annotations

import torch
from torch import Tensor

SUM_TOLERANCE = 1e-3  # a distribution over 150k tokens in FP32 sums to 1 within some 1e-5; logits do not come near


def verify(draft_tokens: Tensor, draft_probs: Tensor, target_probs: Tensor, uniforms: Tensor) -> tuple[int, Tensor]:
    """How many of the draft's tokens stand, and the distribution that the next token is drawn from.

    draft_tokens: int64 [gamma], token i drawn from draft_probs[i]. draft_probs: [gamma, vocab]. target_probs:
    [gamma + 1, vocab], row i being the target's distribution after the draft tokens before i. uniforms: [gamma], drawn
    from [0, 1).

    Token x of row i is accepted with probability min(1, p(x) / q(x)), p the target's and q the draft's row. At the
    first rejection the rest is dropped and the next token comes from the residual distribution, max(0, p - q) made to
    sum to 1; if every token is accepted, from the target's last row (the bonus token).

    Returns (accepted, next_probs [vocab]). Raises TypeError for anything but tensors, ValueError for shapes that do not
    fit, an id outside the vocabulary, rows that are no distributions (NaN included), a token that its own draft gives
    no probability, or uniforms outside [0, 1].
    """
    _check_shapes(draft_tokens, draft_probs, target_probs, uniforms)
    _check_distributions(draft_probs, target_probs)
    gamma, vocab = draft_probs.shape
    tokens = draft_tokens.tolist()
    if gamma and not (0 <= min(tokens) and max(tokens) < vocab):
        raise ValueError(f"draft_tokens holds {tokens}; expected ids from 0 to {vocab - 1}")
    column = draft_tokens[:, None].long()
    p, q = target_probs[:-1].gather(1, column), draft_probs.gather(1, column)  # [gamma, 1]: of the drafted tokens
    numbers = torch.cat([p.double(), q.double(), uniforms[:, None].double()], dim=1).tolist()  # to the host at once
    for token, (_, draft, u) in zip(tokens, numbers, strict=True):
        if not 0 <= u <= 1:
            raise ValueError(f"uniforms holds {u}; expected numbers drawn from [0, 1)")
        if draft <= 0:
            raise ValueError(
                f"draft token {token} has probability {draft:g} in draft_probs; "
                "expected the distribution that it was drawn from"
            )
    for i, (target, draft, u) in enumerate(numbers):
        # u <= p / q without a division. What the target rules out is never accepted, u = 0 included.
        if u * draft > target or target == 0:
            return i, residual(target_probs[i], draft_probs[i])
    return gamma, target_probs[gamma].clone()


def residual(target_probs: Tensor, draft_probs: Tensor) -> Tensor:
    """max(0, p - q) made to sum to 1, for p and q [vocab]: what a rejected token is replaced from.

    Where p = q there is nothing left over and nothing is ever rejected but by rounding: then p itself is returned.
    """
    excess = (target_probs - draft_probs).clamp_min(0)
    total = excess.sum()
    return torch.where(total > 0, excess / total.clamp_min(torch.finfo(excess.dtype).tiny), target_probs)


def verify_greedy(draft_tokens: Tensor, target_tokens: Tensor) -> tuple[int, int]:
    """`verify` at temperature 0: how many tokens stand, and the next token.

    draft_tokens: int64 [gamma]. target_tokens: int64 [gamma + 1], the target's own choice at each position. With
    one-hot distributions p(x) / q(x) is 1 where the choices agree and 0 where they differ, and the residual is the
    target's choice: so the rule is a comparison of ids, and no distribution need be built.
    """
    if draft_tokens.dim() != 1 or target_tokens.shape != (draft_tokens.shape[0] + 1,):
        raise ValueError(
            f"expected draft_tokens [gamma] and target_tokens [gamma + 1]; got {list(draft_tokens.shape)} and "
            f"{list(target_tokens.shape)}"
        )
    accepted = int((draft_tokens == target_tokens[:-1]).long().cumprod(0).sum())
    return accepted, int(target_tokens[accepted])


def _check_shapes(draft_tokens: Tensor, draft_probs: Tensor, target_probs: Tensor, uniforms: Tensor) -> None:
    named = dict(draft_tokens=draft_tokens, draft_probs=draft_probs, target_probs=target_probs, uniforms=uniforms)
    for name, value in named.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} is a {type(value).__name__}; expected a tensor")
        if value.is_floating_point() == (name == "draft_tokens") or value.dtype == torch.bool:
            kind = "int64" if name == "draft_tokens" else "floating-point"
            raise TypeError(f"{name} is {value.dtype}; expected a {kind} tensor")
    if draft_tokens.dim() != 1 or target_probs.dim() != 2 or target_probs.shape[1] == 0:
        raise ValueError(
            f"expected draft_tokens [gamma] and target_probs [gamma + 1, vocab]; got {list(draft_tokens.shape)} and "
            f"{list(target_probs.shape)}"
        )
    gamma, vocab = draft_tokens.shape[0], target_probs.shape[1]
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


def _check_distributions(draft_probs: Tensor, target_probs: Tensor) -> None:
    rows = {"draft_probs": draft_probs, "target_probs": target_probs}
    # NaN spoils the sum of its row, so the sums find it without a pass of their own.
    sums = torch.cat([probs.sum(dim=-1, dtype=torch.float64) for probs in rows.values()]).tolist()
    names = ["draft_probs"] * len(draft_probs) + ["target_probs"] * len(target_probs)
    for name, total in zip(names, sums, strict=True):
        if not abs(total - 1) <= SUM_TOLERANCE:
            raise ValueError(f"a row of {name} holds NaN or does not sum to 1: it sums to {total:g}")
    for name, probs in rows.items():
        if probs.numel() and float(probs.amin()) < 0:
            raise ValueError(f"{name} holds {float(probs.amin()):g}; expected probabilities")
