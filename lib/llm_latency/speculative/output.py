"""What a speculative generation returns: the tokens, every cycle, and where the time went."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

STAGES = ("draft prefill", "draft", "verify", "bookkeeping")


@dataclass(frozen=True, slots=True)
class Cycle:
    """One pass of the target: tokens proposed to it, those of them accepted, and the tokens that the text grew by.

    The text grows by accepted + 1, but by `accepted` alone if it ends with an accepted end-of-text token. What was
    proposed behind an end-of-text token does not count as proposed.
    """

    proposed: int
    accepted: int
    tokens: int


@dataclass(frozen=True, slots=True)
class SpeculativeOutput:
    """sequences: int64 [1, prompt + new], end-of-text included if it was reached. cycles: in order.

    stage_ms: milliseconds by stage. "draft": the draft's work; "draft prefill": its reading of the prompt; "verify":
    the target's passes; "bookkeeping": choosing, comparing, committing. The target's reading of the prompt is in none.
    """

    sequences: Tensor
    cycles: tuple[Cycle, ...]
    stage_ms: dict[str, float]

    @property
    def proposed(self) -> int:
        """Tokens proposed in all."""
        return sum(cycle.proposed for cycle in self.cycles)

    @property
    def accepted(self) -> int:
        """Proposed tokens that stand in the text."""
        return sum(cycle.accepted for cycle in self.cycles)

    @property
    def acceptance_rate(self) -> float | None:
        """accepted / proposed, as most tools report it; None if nothing was proposed. It falls as gamma grows, since
        tokens behind a rejection count as proposed though nothing was found out about them: see `alpha`."""
        return self.accepted / self.proposed if self.proposed else None

    @property
    def alpha(self) -> float | None:
        """The acceptance of the theory: accepted tokens over those that were tested, None if none was.

        Tested are the accepted ones and each cycle's first rejected one.
        """
        tested = sum(cycle.accepted + (cycle.accepted < cycle.proposed) for cycle in self.cycles)
        return self.accepted / tested if tested else None

    @property
    def tokens_per_cycle(self) -> float | None:
        """New tokens over passes of the target; the first token, which the prompt's own pass gives, is in neither.

        None if that was the only one.
        """
        return sum(cycle.tokens for cycle in self.cycles) / len(self.cycles) if self.cycles else None
