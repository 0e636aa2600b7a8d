"""Claims about speculative decoding: its gain, its best gamma, and whether it costs any accuracy."""

from __future__ import annotations

import torch

from every_millisecond.claims.check import Arithmetic, Need, Part, claim, least_number
from every_millisecond.claims.published import PUBLISHED
from llm_latency.speculative import theory
from llm_latency.speculative.verify import verify

COST = 0.1  # "a draft of 10% of the target"
GAMMAS = (3, 4, 5)
ACCEPTANCES = (0.75, 0.80, 0.85)
DRAWS = 400
RULE_STEP = 1 / DRAWS  # what a sum over so many uniforms may be off by
RULE_SHIFTS = (
    f"summed over all guesses, the acceptance rule shifts the output's distribution by {{v}}, "
    f"where {DRAWS} draws resolve no less than {RULE_STEP:g}"
)


def least_acceptance(gain: float, gamma: int, cost_ratio: float) -> float:
    """The least acceptance, in hundredths, at which speculation is `gain` times faster; 1.01 if none is."""

    def reached(hundredths: int) -> bool:
        return hundredths > 100 or theory.expected_speedup(min(hundredths, 100) / 100, gamma, cost_ratio) >= gain

    return least_number(reached, limit=101) / 100


def output_distance(target: torch.Tensor, draft: torch.Tensor, draws: int = DRAWS) -> float:
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


GAIN = Part("gain", "decode with the target alone takes {v} as long as with the draft", 2, 3, same=1)
ACCEPTED = "{v:.0%} of the tested draft tokens accepted"
DRAFT_STEP = "a draft step takes {v:.0%} of a target step"


def two_times() -> Arithmetic:
    needed = least_acceptance(2, 4, COST)
    return Arithmetic(
        "impossible" if needed > 1 else "only if",
        f"the acceptance is {needed:.2f} or more (gamma 4, a draft of a tenth, and reading five tokens costs no more "
        "than reading one, which no longer holds with many requests at once)",
        _speculation_arithmetic(),
    )


claim(
    "A9",
    "a draft of 10% of the target guesses 3-5 tokens: 2-3x faster",
    GAIN,
    needs=(
        Need("gamma", "3 to 5 guesses", 3, 5),
        Need("cost_ratio", "a draft a tenth of the target's size, for which we allow 15% of a step", 0, 0.15),
    ),
    notes={"acceptance": ACCEPTED},
    setting="the same weights with and without the draft",
)(two_times)


@claim(
    "A10",
    "acceptance of 75-85% in this domain makes gamma 3-5 best",
    Part("best_gamma", "the fastest gamma is {v}", 3, 5, form=".0f"),
    needs=(Need("acceptance", "an acceptance of 75 to 85%", ACCEPTANCES[0], ACCEPTANCES[-1]),),
    notes={"cost_ratio": DRAFT_STEP},
    setting="gammas timed side by side, not computed",
)
def best_gamma_3_to_5() -> Arithmetic:
    best = {c: [theory.best_gamma(a, c / 100) for a in ACCEPTANCES] for c in range(1, 101)}
    right = [c for c, gammas in best.items() if all(3 <= g <= 5 for g in gammas)]
    return Arithmetic(
        "impossible" if not right else "possible" if len(right) == len(best) else "only if",
        f"a draft step takes {min(right)}% to {max(right)}% of a target step" if right else "at no cost of the draft",
        tuple(f"draft step of {c}%: best gamma {min(best[c])} to {max(best[c])}" for c in (2, 5, 10, 20, 30)),
    )


@claim(
    "A16",
    "INT8 and speculative decoding both trade accuracy for speed",
    Part("speculative_distance", RULE_SHIFTS, RULE_STEP, form=".4f"),
    Part("int8_kl", "the INT8 cache shifts the output's distribution by {v} a token", 1e-9, form=".1e nats"),
    setting="the library's own acceptance rule, every draft token tried",
)
def both_trade_accuracy() -> Arithmetic:
    p = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    q = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
    distance = output_distance(p, q)
    return Arithmetic(
        "impossible" if distance <= RULE_STEP else "possible",
        "INT8 rounds, but the right acceptance rule leaves the distribution of the output as it was",
        (
            f"the library's own `verify`, every draft token and uniform summed up: distance {distance:.4f} from the "
            f"target's distribution ({DRAWS} draws resolve no less than {RULE_STEP})",
            "proof: min(p, q) and the residual max(0, p - q) add up to p (Leviathan et al., 2023, appendix A.1)",
        ),
    )


claim(
    "B14",
    "speculative decoding makes decode 2-3x faster",
    GAIN,
    notes={"acceptance": ACCEPTED, "cost_ratio": DRAFT_STEP},
    setting="the same weights with and without the draft",
)(two_times)
