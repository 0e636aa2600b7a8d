"""What speculation costs and gains on a machine, in numbers that were measured, and what follows from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from llm_latency.generation import Stepper
from llm_latency.speculative import Cycle, Draft, SpeculativeOutput
from llm_latency.timing import Comparison, compare


@dataclass(frozen=True, slots=True)
class Costs:
    """Everything that decides whether speculation pays.

    survival: entry i is the share of cycles whose first i + 1 proposals were all accepted, so that a cycle at gamma
    yields 1 + sum(survival[:gamma]) tokens on average. offered: entry i is the share of cycles that proposed more than
    i tokens, 1 for a draft that always proposes. alpha: acceptance per tested token. draft_fixed_ms,
    draft_token_ms: a cycle's drafting takes the first, and the second for every token. verification_ms: rows read at
    once -> time of the target's pass; holds 1. choose_ms: choosing and comparing, once per pass of the target.
    draft_bytes_share: bytes that a draft step reads over those of a target step, None if unknown.
    """

    survival: tuple[float, ...]
    offered: tuple[float, ...]
    alpha: float
    draft_fixed_ms: float
    draft_token_ms: float
    verification_ms: dict[int, float]
    choose_ms: float
    draft_bytes_share: float | None = None

    @property
    def cost_ratio(self) -> float:
        """c of the theory: time of one drafted token over that of a plain step of the target."""
        return (self.draft_fixed_ms / len(self.survival) + self.draft_token_ms) / self.verification_ms[1]

    def pass_ms(self, rows: float) -> float:
        """Time of a target pass over this many rows, on straight lines between and beyond the measured ones."""
        known = sorted(self.verification_ms)
        if len(known) == 1:
            return self.verification_ms[known[0]]
        above = next((i for i, n in enumerate(known) if n >= rows and i > 0), len(known) - 1)
        left, right = known[above - 1], known[above]
        share = (rows - left) / (right - left)
        return self.verification_ms[left] * (1 - share) + self.verification_ms[right] * share

    def tokens_per_cycle(self, gamma: int) -> float:
        return 1 + sum(self.survival[:gamma])

    def rows(self, gamma: int) -> float:
        """Rows of the target's pass on average: gamma + 1, or fewer where the draft has not always a guess."""
        return 1 + sum(self.offered[:gamma])

    def speedup(self, gamma: int, batch: int = 1) -> float:
        """Predicted: times faster than plain decoding at this gamma.

        batch: estimated for so many requests side by side, by the time of so many times the rows; the draft's time is
        taken to grow with the rows as the target's does.
        """
        plain = self.pass_ms(batch) + self.choose_ms
        rows = self.rows(gamma)
        draft = (self.draft_fixed_ms + (rows - 1) * self.draft_token_ms) * self.pass_ms(batch) / self.pass_ms(1)
        cycle = draft + self.pass_ms(batch * rows) + self.choose_ms
        return plain * self.tokens_per_cycle(gamma) / cycle

    def best(self, batch: int = 1) -> tuple[int, float]:
        """The gamma with the largest predicted speed-up, and that speed-up."""
        return max(
            ((gamma, self.speedup(gamma, batch)) for gamma in range(1, len(self.survival) + 1)), key=lambda g: g[1]
        )

    # What if: the same machine with one obstacle taken away.

    def with_free_draft(self) -> Costs:
        return replace(self, draft_fixed_ms=0.0, draft_token_ms=0.0)

    def with_free_verification(self) -> Costs:
        return replace(self, verification_ms={1: self.verification_ms[1]})

    def with_acceptance(self, alpha: float) -> Costs:
        survival = tuple(alpha ** (i + 1) for i in range(len(self.survival)))
        return replace(self, alpha=alpha, survival=survival)


@torch.inference_mode()
def verification_cost(
    target: Stepper, input_ids: torch.Tensor, counts: Sequence[int] = (1, 2, 4, 6, 8), *, rounds: int = 10
) -> Comparison:
    """Time of a target pass over each number of tokens after input_ids [1, n], in turns; names are the numbers.

    On paper checking six tokens costs what one costs, since the weights are read once. Whether it does depends on how
    much arithmetic the machine has left, and on the kernels. Counts that do not fit behind input_ids into the target's
    context are left out.
    """
    if 1 not in counts or min(counts) < 1:
        raise ValueError(f"counts={tuple(counts)}; expected 1, and nothing below it")
    input_ids = input_ids.to(target.device)
    target.prefill(input_ids)
    start = input_ids.shape[1]
    counts = [n for n in counts if n == 1 or start + n <= target.max_positions]
    text = input_ids[0].repeat(1 + max(counts) // start)

    def reading(count: int):
        tokens = text[None, :count]

        def read() -> None:
            target.step(tokens)
            target.crop_to(start)

        return read

    return compare({str(n): reading(n) for n in counts}, rounds=rounds, device=target.device)


def shares(cycles: Sequence[Cycle], name: str, gamma: int) -> tuple[float, ...]:
    """Share of the cycles whose `name`, "accepted" or "proposed", is above 0, 1, .. gamma - 1."""
    return tuple(sum(getattr(cycle, name) > i for cycle in cycles) / max(1, len(cycles)) for i in range(gamma))


def unhindered(output: SpeculativeOutput, max_new_tokens: int, gamma: int) -> list[Cycle]:
    """The cycles that had room for gamma proposals: the last ones of an answer say nothing about later positions."""
    room, kept = max_new_tokens - 1, []
    for cycle in output.cycles:
        if room > gamma:
            kept.append(cycle)
        room -= cycle.tokens
    return kept


def bytes_share(target: Stepper, draft: Draft) -> float | None:
    """Bytes of weights that a draft step reads over those of a target step; None if one of them cannot tell."""
    return None if draft.step_bytes is None or not target.step_bytes else draft.step_bytes / target.step_bytes
