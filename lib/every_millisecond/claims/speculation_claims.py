"""Claims about speculative decoding: its gain, its best gamma, and whether it costs any accuracy."""

from __future__ import annotations

import torch

from every_millisecond.claims.check import (
    CONDITION,
    HOLDS,
    IMPOSSIBLE,
    ClaimCheck,
    Figures,
    claim,
    from_parts,
    least_number,
)
from every_millisecond.claims.published import PUBLISHED
from llm_latency.speculative import theory
from llm_latency.speculative.verify import verify

COST = 0.1  # "a draft of 10% of the target"
GAMMAS = (3, 4, 5)
ACCEPTANCES = (0.75, 0.80, 0.85)


def least_acceptance(gain: float, gamma: int, cost_ratio: float) -> float:
    """The least acceptance, in hundredths, at which speculation is `gain` times faster; 1.01 if none is."""

    def reached(hundredths: int) -> bool:
        return hundredths > 100 or theory.expected_speedup(min(hundredths, 100) / 100, gamma, cost_ratio) >= gain

    return least_number(reached, limit=101) / 100


def output_distance(target: torch.Tensor, draft: torch.Tensor, draws: int = 400) -> float:
    """Total variation distance between the target's distribution [vocab] and what the acceptance rule puts out.

    Summed up, not sampled: every token the draft may propose, with its probability, at `draws` evenly spaced uniforms.
    The spacing leaves at most 1 / draws of error for a right rule.
    """
    found = torch.zeros_like(target)
    for token in range(target.numel()):
        if draft[token] == 0:
            continue
        for i in range(draws):
            uniform = torch.tensor([(i + 0.5) / draws], dtype=target.dtype)
            rows = torch.stack((target, target))
            accepted, following = verify(torch.tensor([token]), draft[None], rows, uniform)
            share = draft[token] / draws
            if accepted:
                found[token] += share
            else:
                found += share * following
    return float((found - target).abs().sum() / 2)


def _speculation_arithmetic() -> tuple[str, ...]:
    gains = [theory.expected_speedup(a, g, COST) for a in (ACCEPTANCES[0], ACCEPTANCES[-1]) for g in GAMMAS]
    return (
        f"at acceptance 0.75 to 0.85, gamma 3 to 5 and a draft of a tenth: {min(gains):.2f} to {max(gains):.2f} times",
        f"2 times need an acceptance of {least_acceptance(2, 4, COST):.2f} at gamma 4; at 0.5 it is "
        f"{theory.expected_speedup(0.5, 4, COST):.2f}",
        *(str(PUBLISHED[name]) for name in ("speculation-t5", "speculation-tiny", "speculation-load")),
    )


def _gain_verdict(here: Figures) -> str:
    if "gain" in here:
        return HOLDS if here["gain"] >= 2 else CONDITION
    needed = least_acceptance(2, 4, COST)
    if needed > 1:
        return IMPOSSIBLE
    return CONDITION if needed > 0 else HOLDS


def _measured(here: Figures) -> tuple[str, ...]:
    words = {"gain": "times as fast", "acceptance": "of the drafted tokens accepted", "cost_ratio": "of a target step"}
    return tuple(f"{here[name]:.2f} {text}" for name, text in words.items() if name in here)


@claim("A9", "a draft of 10% of the target guesses 3-5 tokens: 2-3x faster", "gain", "acceptance", "cost_ratio")
def a_draft_of_a_tenth(here: Figures) -> ClaimCheck:
    return ClaimCheck(
        f"at an acceptance of {least_acceptance(2, 4, COST):.2f} or more, if reading five tokens costs as much as one",
        _gain_verdict(here),
        _speculation_arithmetic(),
        _measured(here),
    )


@claim("A10", "acceptance of 75-85% in this domain makes gamma 3-5 best", "acceptance", "cost_ratio")
def best_gamma_3_to_5(here: Figures) -> ClaimCheck:
    costs = (0.02, 0.05, 0.1, 0.2, 0.3)
    best = {c: [theory.best_gamma(a, c) for a in ACCEPTANCES] for c in costs}
    inside = {c: all(3 <= g <= 5 for g in gammas) for c, gammas in best.items()}
    parts = {f"gamma 3-5 best at a draft of {c:g}": holds for c, holds in inside.items()}
    verdict, measured = from_parts(parts) if any(parts.values()) else IMPOSSIBLE, ()
    if "acceptance" in here and "cost_ratio" in here:
        own = theory.best_gamma(here["acceptance"], here["cost_ratio"])
        measured = (f"acceptance {here['acceptance']:.2f}, draft step {here['cost_ratio']:.2f}: best gamma {own}",)
        verdict = HOLDS if 3 <= own <= 5 else CONDITION
    return ClaimCheck(
        "the best gamma falls with the draft's cost and rises with the acceptance",
        verdict,
        tuple(
            f"draft step of {c:g} target steps: best gamma {min(gammas)} to {max(gammas)}" for c, gammas in best.items()
        ),
        measured,
    )


@claim("A16", "INT8 and speculative decoding both trade accuracy for speed", "int8_kl", "speculative_distance")
def both_trade_accuracy(here: Figures) -> ClaimCheck:
    p = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    q = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
    distance = here.get("speculative_distance", output_distance(p, q))
    # Both must lose something for the claim to hold. That the rule loses nothing is a theorem, not a measurement.
    lossless = distance <= 1 / 400
    int8_lossless = here.get("int8_kl", 1.0) == 0
    if lossless:
        verdict = IMPOSSIBLE
    else:
        verdict = CONDITION if int8_lossless else HOLDS
    return ClaimCheck(
        "INT8 rounds; the right acceptance rule leaves the distribution of the output as it was",
        verdict,
        (
            f"the library's own `verify`, every draft token and uniform summed up: distance {distance:.4f} from the "
            "target's distribution (0.0025 is the sum's own step)",
            "proof: min(p, q) and the residual max(0, p - q) add up to p (Leviathan et al., 2023, appendix A.1)",
        ),
        (f"INT8 cache: mean KL {here['int8_kl']:.1e} nats",) if "int8_kl" in here else (),
    )


@claim("B14", "speculative decoding makes decode 2-3x faster", "gain", "acceptance", "cost_ratio")
def speculation_doubles(here: Figures) -> ClaimCheck:
    return ClaimCheck(
        f"at an acceptance of {least_acceptance(2, 4, COST):.2f} or more, a draft of a tenth, and few requests at once",
        _gain_verdict(here),
        _speculation_arithmetic(),
        _measured(here),
    )
