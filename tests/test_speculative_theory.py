"""The closed forms against counting, and their edges."""

from __future__ import annotations

import math
import random

import pytest
import torch

from llm_latency.speculative import (
    acceptance_probability,
    best_gamma,
    expected_speedup,
    expected_tokens_per_cycle,
)


@pytest.mark.parametrize(("gamma", "tokens"), [(1, 1.7), (3, 2.533), (5, 2.94117)])
def test_tokens_per_cycle_by_hand(gamma, tokens):
    """Case 8's figures for acceptance 0.7: guards against forgetting the target's own token."""
    assert expected_tokens_per_cycle(0.7, gamma) == pytest.approx(tokens, abs=1e-5)


def test_edges():
    """At acceptance 1 the formula's quotient is 0 / 0; at 0 a cycle still yields the target's own token."""
    assert expected_tokens_per_cycle(1, 5) == 6 and expected_tokens_per_cycle(0, 5) == 1
    assert expected_tokens_per_cycle(1 - 1e-15, 5) == pytest.approx(6)
    assert expected_tokens_per_cycle(0.3, 0) == 1
    assert expected_speedup(1, 4, 0) == 5 and expected_speedup(0, 4, 0.25) == 0.5
    assert best_gamma(0, 0.1) == 0 and best_gamma(0, 0) == 0
    assert best_gamma(1, 0.1, max_gamma=9) == 9  # more is always better
    assert best_gamma(1, 1) == 0


def test_tokens_per_cycle_by_simulation():
    """The closed form against counting: accept until the first failure, then one token of the target's own."""
    numbers, alpha, gamma, cycles = random.Random(3), 0.6, 4, 40_000
    total = 0
    for _ in range(cycles):
        accepted = 0
        while accepted < gamma and numbers.random() < alpha:
            accepted += 1
        total += accepted + 1
    assert total / cycles == pytest.approx(expected_tokens_per_cycle(alpha, gamma), rel=0.01)


@pytest.mark.parametrize(("alpha", "cost"), [(0.6, 0.05), (0.8, 0.05), (0.9, 0.1), (0.75, 0.2), (0.5, 0.5), (0.3, 0.4)])
def test_best_gamma_is_the_best(alpha, cost):
    """Against trying all; and it pays exactly where the acceptance is above the cost ratio (Corollary 3.9)."""
    best = best_gamma(alpha, cost)
    tried = {gamma: expected_speedup(alpha, gamma, cost) for gamma in range(33)}
    assert tried[best] == max(tried.values())
    assert (best >= 1) == (alpha > cost) == (tried[best] > 1)


def test_verification_that_is_not_free_costs():
    """Papers take the check of gamma + 1 tokens for one step; where it takes two, half of the gain is gone."""
    assert expected_speedup(0.7, 3, 0, verification=2) == pytest.approx(2.533 / 2)


def test_acceptance_is_one_less_the_total_variation():
    """Corollary 3.6, row by row."""
    p, q = torch.rand(2, 5, 11, generator=torch.Generator().manual_seed(1)).softmax(-1)
    torch.testing.assert_close(acceptance_probability(p, q), 1 - (p - q).abs().sum(-1) / 2)
    with pytest.raises(ValueError, match="shapes differ"):
        acceptance_probability(p, q[:1])


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: expected_tokens_per_cycle(1.1, 3), ValueError, "acceptance=1.1"),
        (lambda: expected_tokens_per_cycle(math.nan, 3), ValueError, "acceptance=nan"),
        (lambda: expected_tokens_per_cycle(0.5, -1), ValueError, "gamma=-1"),
        (lambda: expected_tokens_per_cycle(0.5, 2.0), TypeError, "gamma=2.0"),
        (lambda: expected_tokens_per_cycle("0.5", 2), TypeError, "acceptance='0.5'"),
        (lambda: expected_speedup(0.5, 2, -0.1), ValueError, "cost_ratio=-0.1"),
        (lambda: expected_speedup(0.5, 0, 0, verification=0), ValueError, "takes no time"),
        (lambda: best_gamma(0.5, math.inf), ValueError, "cost_ratio=inf"),
    ],
)
def test_arguments_out_of_range_are_named(call, error, message):
    """A percentage for a share, or a negative cost, must not come out as a speed-up."""
    with pytest.raises(error, match=message):
        call()
