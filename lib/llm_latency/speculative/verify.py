"""The acceptance rule of speculative decoding, and nothing else: pure functions.

A draft proposed tokens; the rule decides which of them the target accepts. It leaves the distribution of the output
exactly the target's (Leviathan et al. 2023, arXiv 2211.17192, Appendix A.1; Chen et al. 2023, arXiv 2302.01318,
Theorem 1).
"""

from __future__ import annotations

import torch
from torch import Tensor

from llm_latency.speculative.verify_arguments import check_verify


def verify(draft_tokens: Tensor, draft_probs: Tensor, target_probs: Tensor, uniforms: Tensor) -> tuple[int, Tensor]:
    """How many of the drafted tokens are accepted, and the distribution that the next token is drawn from.

    draft_tokens: int64 [gamma], token i drawn from draft_probs[i]. draft_probs: [gamma, vocab]. target_probs:
    [gamma + 1, vocab], row i being the target's distribution for the place of draft token i, the last row for the
    token after them all. uniforms: [gamma], random numbers from [0, 1).

    Token x of row i is accepted with probability min(1, p(x) / q(x)), p the target's and q the draft's row. At the
    first rejection the rest is dropped and the next token comes from the residual distribution, max(0, p - q) made to
    sum to 1; if every token is accepted, from the target's last row (the bonus token).

    Returns (accepted, next_probs [vocab]). Raises TypeError for anything but tensors, ValueError for shapes that do not
    fit, an id outside the vocabulary, rows that are not distributions (NaN included), a token to which its own draft
    gives no probability, or uniforms outside [0, 1].
    """
    check_verify(draft_tokens, draft_probs, target_probs, uniforms)
    ids = draft_tokens[:, None].long()  # [gamma, 1]
    p_drafted, q_drafted = target_probs[:-1].gather(1, ids), draft_probs.gather(1, ids)  # [gamma, 1]: p(x) and q(x)
    drafted = torch.cat((p_drafted.double(), q_drafted.double(), uniforms[:, None].double()), dim=1)  # [gamma, 3]
    for i, (p, q, u) in enumerate(drafted.tolist()):  # one transfer to the host
        # Reject unless u <= p / q, written without a division. A token with p = 0 is rejected even if u is 0.
        if u * q > p or p == 0:
            return i, residual(target_probs[i], draft_probs[i])
    return len(draft_tokens), target_probs[-1].clone()


def residual(target_probs: Tensor, draft_probs: Tensor) -> Tensor:
    """max(0, p - q) made to sum to 1, for p and q [vocab]: the distribution that replaces a rejected token.

    If p = q nothing is left over, and only a rounding error can reject: then p itself is returned.
    """
    excess = (target_probs - draft_probs).clamp_min(0)
    total = excess.sum()
    return torch.where(total > 0, excess / total.clamp_min(torch.finfo(excess.dtype).tiny), target_probs)


def verify_greedy(draft_tokens: Tensor, target_tokens: Tensor) -> tuple[int, int]:
    """`verify` at temperature 0: how many tokens are accepted, and the next token.

    draft_tokens: int64 [gamma]. target_tokens: int64 [gamma + 1], the target's own choice at each position. With
    one-hot distributions p(x) / q(x) is 1 where the choices agree and 0 where they differ, and the residual is the
    target's choice: so comparing ids is enough, and no distribution need be built.
    """
    if draft_tokens.dim() != 1 or target_tokens.shape != (draft_tokens.shape[0] + 1,):
        raise ValueError(
            f"expected draft_tokens [gamma] and target_tokens [gamma + 1]; got {list(draft_tokens.shape)} and "
            f"{list(target_tokens.shape)}"
        )
    accepted = int((draft_tokens == target_tokens[:-1]).long().cumprod(0).sum())
    return accepted, int(target_tokens[accepted])
