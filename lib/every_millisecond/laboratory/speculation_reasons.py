"""Why speculation pays or not, in words: each obstacle, and what its removal would bring."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from every_millisecond.laboratory.speculation_costs import Costs

PAYS = 1.05  # below this a gain is lost in the spread of the measurement
MATTERS = 1.10  # an obstacle is worth a sentence if its removal would bring a tenth
GOOD_ACCEPTANCE = 0.8  # what published drafts reach on text that suits them
OVERHEAD = 2.0  # a draft that takes this many times its share of the bytes is not waiting for memory
BATCHES = (2, 4, 8)


@dataclass(frozen=True, slots=True)
class Reason:
    """cause: "verdict", "acceptance", "draft", "launch", "verification" or "batch". text: one sentence or two.

    gain: how many times faster than now it would be without this obstacle; 1 for what is no obstacle.
    """

    cause: str
    text: str
    gain: float = 1.0


def reasons(costs: Costs, measured: Mapping[int, float]) -> list[Reason]:
    """The verdict, then the obstacles that matter, the greatest first; measured: gamma -> speed-up."""
    obstacles = [found for found in (_acceptance(costs), _draft(costs), _verification(costs)) if found.gain > MATTERS]
    return [_verdict(measured), *sorted(obstacles, key=lambda found: -found.gain), *_launch(costs), *_batch(costs)]


def _verdict(measured: Mapping[int, float]) -> Reason:
    gamma, best = max(measured.items(), key=lambda entry: entry[1])
    if best >= PAYS:
        return Reason("verdict", f"It pays here: gamma {gamma} is {best:.2f} times as fast as plain decoding.")
    if best > 1 / PAYS:
        return Reason("verdict", f"It makes no difference here: the best gamma, {gamma}, is {best:.2f} times as fast.")
    return Reason("verdict", f"It does not pay here: even the best gamma, {gamma}, is only {best:.2f} times as fast.")


def _gain(now: Costs, then: Costs) -> tuple[float, float]:
    """Predicted speed-up without an obstacle, and how many times the present one that is."""
    better = then.best()[1]
    return better, better / max(now.best()[1], 1e-9)


def _acceptance(costs: Costs) -> Reason:
    if costs.alpha >= GOOD_ACCEPTANCE:
        return Reason("acceptance", "")
    better, gain = _gain(costs, costs.with_acceptance(GOOD_ACCEPTANCE))
    low = "too low" if costs.alpha < 0.5 else "not high"
    text = (
        f"The acceptance is {low}: of the tokens that were tested, {costs.alpha:.0%} stood. "
        f"At {GOOD_ACCEPTANCE:.0%} the same machine would reach {better:.2f} times."
    )
    return Reason("acceptance", text, gain)


def _draft(costs: Costs) -> Reason:
    better, gain = _gain(costs, costs.with_free_draft())
    text = (
        f"The draft is dear: a drafted token takes {costs.cost_ratio:.0%} of a plain step. "
        f"A free one would give {better:.2f} times."
    )
    return Reason("draft", text, gain)


def _verification(costs: Costs) -> Reason:
    gamma = costs.with_free_verification().best()[0]
    better, gain = _gain(costs, costs.with_free_verification())
    steps = costs.pass_ms(gamma + 1) / costs.pass_ms(1)
    text = (
        f"Verification is not free: reading {gamma + 1} tokens at once takes {steps:.2f} plain steps, where the theory "
        f"says 1. If it were, {better:.2f} times."
    )
    return Reason("verification", text, gain)


def _launch(costs: Costs) -> list[Reason]:
    share, ratio = costs.draft_bytes_share, costs.cost_ratio
    if share is None or share <= 0 or ratio < OVERHEAD * share or ratio < 0.05:
        return []
    text = (
        f"The draft is bound by launches and Python, not by memory: it reads {share:.1%} of the target's bytes and "
        f"takes {ratio:.1%} of its time. Compiling it, CUDA graphs, or fewer and wider layers help; fewer bytes do not."
    )
    return [Reason("launch", text)]


def _batch(costs: Costs) -> list[Reason]:
    """Where the gain ends as requests are added. Estimated from passes over as many rows, not measured."""
    if costs.best()[1] < PAYS:
        return []
    gains = {batch: costs.best(batch)[1] for batch in BATCHES}
    lost = next((batch for batch, gain in gains.items() if gain < PAYS), None)
    listed = ", ".join(f"{gain:.2f} times with {batch}" for batch, gain in gains.items())
    ending = f"A batch of {lost} is too large for it." if lost else "It pays at each of these."
    text = f"More requests at once leave less idle arithmetic for the checks; estimated: {listed}. {ending}"
    return [Reason("batch", text)]
