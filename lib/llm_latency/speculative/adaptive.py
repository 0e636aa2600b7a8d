"""Choosing gamma while the text is written, from the acceptance and the cost seen so far."""

from __future__ import annotations

from llm_latency.speculative.theory import best_gamma

MEMORY = 0.9  # weight of what was seen before, per tested token: the last ten or so count


class AdaptiveGamma:
    """`best_gamma` of a running acceptance and of the measured cost ratio, from 1 to `highest`.

    Never 0, though theory may say so: without proposals nothing would be learnt about a text that becomes easier.
    Raises ValueError for a highest below 1.
    """

    def __init__(self, highest: int) -> None:
        if isinstance(highest, bool) or not isinstance(highest, int) or highest < 1:
            raise ValueError(f"highest={highest!r}; expected an int of at least 1")
        self.highest = highest
        self.acceptance: float | None = None  # running; None before the first cycle

    def choose(self, cost_ratio: float | None) -> int:
        """The gamma for the next cycle. cost_ratio: a draft step over a pass of the target, None if not yet known."""
        if self.acceptance is None or cost_ratio is None:
            return self.highest
        return max(1, best_gamma(self.acceptance, cost_ratio, max_gamma=self.highest))

    def observe(self, proposed: int, accepted: int) -> None:
        """Learn from one cycle: each accepted token is a success, the first rejected one a failure."""
        outcomes = [1.0] * accepted + [0.0] * (accepted < proposed)
        for outcome in outcomes:
            before = outcome if self.acceptance is None else self.acceptance
            self.acceptance = MEMORY * before + (1 - MEMORY) * outcome
