"""Trace replay: a recorded sequence of accepts and rejects, timed on models of any shape.

Two models of random weights never agree, so nothing could be learnt about speculation from them. But the time of a
cycle depends on shapes and counts alone, not on what the tokens say. So the decisions come from a recording of models
that do agree, and the time from the shapes in question. The result holds for those shapes if they agreed as often; it
is a replay, and says so wherever it is printed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from llm_latency.generation import generate
from llm_latency.sampling import SamplingRule
from llm_latency.speculative import Cycle, Proposal, SpeculativeDecoder
from llm_latency.timing import Comparison, LatencyTimer, Ratio


@dataclass(frozen=True, slots=True)
class Replay:
    """comparison: ms of decoding the same number of tokens, "plain" and "speculative", in turns."""

    comparison: Comparison
    tokens: int
    cycles: tuple[Cycle, ...]
    stage_ms: dict[str, float]

    @property
    def speedup(self) -> Ratio:
        """Times faster than plain decoding on these shapes, if the draft were accepted as in the recording."""
        return self.comparison.speedup("speculative", "plain")

    def report(self) -> str:
        """Lines for `print`, the first of which says what this is."""
        accepted, proposed = (sum(getattr(c, name) for c in self.cycles) for name in ("accepted", "proposed"))
        median = self.comparison.median_ms
        return "\n".join(
            [
                "REPLAY of recorded accepts and rejects; the times are these shapes', the decisions are not",
                f"{len(self.cycles)} cycles, {accepted} of {proposed} proposals accepted, {self.tokens} new tokens",
                f"plain {median['plain']:.1f} ms, speculative {median['speculative']:.1f} ms: {self.speedup}",
                ", ".join(f"{name} {ms:.1f} ms" for name, ms in self.stage_ms.items()),
            ]
        )


def replay(target, draft, cycles: Sequence[Cycle], *, prompt_tokens: int = 256, rounds: int = 5) -> Replay:
    """Time `target` and `draft` on recorded cycles (of `SpeculativeOutput.cycles`), after a prompt of some tokens.

    draft: one that proposes as many tokens as it is asked for, so not prompt lookup. Plain decoding and the replay take
    turns. Raises ValueError for an empty or impossible recording, or a draft that proposed fewer tokens.
    """
    if rounds < 1 or prompt_tokens < 1:
        raise ValueError(f"expected rounds and prompt_tokens of 1 or more; got {rounds} and {prompt_tokens}")
    cycles = tuple(cycles)
    decoder = _Replaying(target, draft, cycles)
    ids = torch.arange(prompt_tokens)[None] % min(decoder.vocab_size, 100)
    tokens = 1 + sum(cycle.accepted + 1 for cycle in cycles)
    samples: dict[str, list[float]] = {"plain": [], "speculative": []}
    stage_ms: dict[str, float] = {}
    timer = LatencyTimer(decoder.device)
    for turn in range(1 + rounds):  # the first is a warm-up
        for name in samples if turn % 2 == 0 else reversed(samples):
            timer.reset()
            if name == "plain":
                generate(decoder.target, ids, tokens, timer=timer)
            else:
                stage_ms = decoder.play(ids, tokens, timer)
            if turn > 0:
                samples[name].append(timer.get_elapsed_ms("decode"))
    comparison = Comparison({name: tuple(times) for name, times in samples.items()}, {}, timer.device)
    return Replay(comparison, tokens, cycles, stage_ms)


class _Replaying(SpeculativeDecoder):
    """Does all the work of a speculative decoder, and then decides as the recording did."""

    def __init__(self, target, draft, cycles: tuple[Cycle, ...]) -> None:
        if not cycles or any(not 0 <= cycle.accepted <= cycle.proposed for cycle in cycles):
            raise ValueError("expected one recorded cycle or more, each with 0 <= accepted <= proposed")
        super().__init__(target, draft)
        self.recording = cycles
        self.now: Cycle = cycles[0]

    def play(self, input_ids: Tensor, new_tokens: int, timer: LatencyTimer) -> dict[str, float]:
        """Every cycle of the recording after a prompt; the milliseconds of each stage."""
        # In a recording that ended with an end of text, more may have been proposed than the text then grew by.
        most = max(cycle.proposed for cycle in self.recording)
        with timer.stage("prefill"):
            request = self.start(input_ids, new_tokens + most)
        with timer.stage("decode"):
            for cycle in self.recording:
                self.now, self.num_speculative = cycle, cycle.proposed
                self.cycle(request)
        return {name: request.timer.get_elapsed_ms(name) for name in request.timer.stages}

    def _decide(self, proposal: Proposal, logits: Tensor, rule: SamplingRule) -> tuple[list[int], int, int]:
        drafted, _, following = super()._decide(proposal, logits, rule)
        if len(drafted) != self.now.proposed:
            raise ValueError(f"the draft proposed {len(drafted)} tokens where the recording has {self.now.proposed}")
        return drafted, self.now.accepted, following
