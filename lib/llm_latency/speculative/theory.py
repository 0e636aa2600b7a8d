"""What speculative decoding can gain: the closed forms of Leviathan et al. 2023 (arXiv 2211.17192).

alpha is the chance that a drafted token is accepted once every one before it was, the same at every position and
independent of the others; gamma the tokens drafted per cycle; c the time of a draft step over that of a target step.
The papers assume that verifying gamma + 1 tokens takes as long as one plain step; `verification` lifts that.
"""

from __future__ import annotations

import math

from torch import Tensor

from llm_latency.arguments import check_count, check_number

MAX_GAMMA = 32


def acceptance_probability(target_probs: Tensor, draft_probs: Tensor) -> Tensor:
    """alpha of one position: sum over x of min(p(x), q(x)), for p and q [..., vocab]. One less their total variation
    distance (Leviathan et al., Corollary 3.6)."""
    if target_probs.shape != draft_probs.shape:
        raise ValueError(
            f"the shapes differ: target_probs {list(target_probs.shape)}, draft_probs {list(draft_probs.shape)}"
        )
    return target_probs.minimum(draft_probs).sum(dim=-1)


def expected_tokens_per_cycle(acceptance: float, gamma: int) -> float:
    """(1 - alpha^(gamma + 1)) / (1 - alpha): tokens one cycle yields on average, from 1 to gamma + 1 (their eq. 1).

    Chen et al. 2023 (arXiv 2302.01318) count the same. Raises TypeError or ValueError for an acceptance outside [0, 1]
    or a gamma below 0.
    """
    check_number("acceptance", acceptance, 0, 1)
    check_count("gamma", gamma, 0)
    return math.fsum(acceptance**i for i in range(gamma + 1))  # the sum holds at 1, where the quotient does not


def expected_speedup(acceptance: float, gamma: int, cost_ratio: float, *, verification: float = 1.0) -> float:
    """Times faster than plain decoding: tokens per cycle over gamma * c + 1 (their Theorem 3.8).

    cost_ratio: c. verification: time of the target's pass over gamma + 1 tokens, in plain steps; 1 in the papers.
    """
    check_number("cost_ratio", cost_ratio, 0)
    check_number("verification", verification, 0)
    cost = gamma * cost_ratio + verification
    if cost == 0:
        raise ValueError("cost_ratio and verification are both 0; a cycle that takes no time has no speed-up")
    return expected_tokens_per_cycle(acceptance, gamma) / cost


def best_gamma(acceptance: float, cost_ratio: float, *, max_gamma: int = MAX_GAMMA) -> int:
    """The gamma from 0 to max_gamma with the largest expected speed-up, the smallest of equals.

    0 means that speculation does not pay: so it is for every alpha up to c (their Corollary 3.9).
    """
    check_count("max_gamma", max_gamma, 0)
    speedups = [expected_speedup(acceptance, gamma, cost_ratio) for gamma in range(max_gamma + 1)]
    # Equal but for rounding is equal: at acceptance c the gain of the first token is exactly its cost.
    return next(gamma for gamma, gain in enumerate(speedups) if gain >= max(speedups) * (1 - 1e-12))
