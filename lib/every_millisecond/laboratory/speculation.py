"""Measure whether speculation pays for a target, a draft and some prompts, and say why: each obstacle in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.table import Table
from torch import Tensor

from every_millisecond.laboratory.speculation_costs import Costs, bytes_share, shares, unhindered, verification_cost
from llm_latency.generation import generate
from llm_latency.speculative.decoder import SpeculativeDecoder
from llm_latency.speculative.output import Cycle, SpeculativeOutput
from llm_latency.speculative.theory import expected_speedup
from llm_latency.timing import Comparison, LatencyTimer

COUNTS = (1, 2, 4, 6, 8, 16, 48)  # rows per pass; the last two for the estimate of batches
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


@dataclass(frozen=True, slots=True)
class Explanation:
    """costs: measured. comparison: ms per token of "plain" and of each gamma, in turns. reasons: the words.

    draft_prefill_ms: the draft's reading of a prompt, once per request, which no column of the table holds.
    """

    costs: Costs
    gammas: tuple[int, ...]
    comparison: Comparison
    draft_prefill_ms: float
    reasons: list[Reason]

    @property
    def measured(self) -> dict[int, float]:
        """gamma -> median speed-up of decoding over plain decoding."""
        return {gamma: self.comparison.speedup(str(gamma), "plain").median for gamma in self.gammas}

    def table(self) -> Table:
        """One row per gamma: tokens per cycle, the ideal of the papers, our prediction, and the measured speed-up."""
        costs = self.costs
        shown = Table(title="Speculative decoding: predicted and measured", title_justify="left")
        for header in ("gamma", "tokens per cycle", "verification (plain steps)", "papers", "predicted", "measured"):
            shown.add_column(header, justify="right")
        for gamma in self.gammas:
            shown.add_row(
                str(gamma),
                f"{costs.tokens_per_cycle(gamma):.2f}",
                f"{costs.pass_ms(costs.rows(gamma)) / costs.pass_ms(1):.2f}",
                f"{expected_speedup(costs.alpha, gamma, costs.cost_ratio):.2f} times",
                f"{costs.speedup(gamma):.2f} times",
                str(self.comparison.speedup(str(gamma), "plain")),
            )
        return shown

    def report(self) -> str:
        """Acceptance and costs in one line, then the reasons."""
        costs = self.costs
        facts = (
            f"acceptance {costs.alpha:.2f}; plain step {costs.pass_ms(1):.2f} ms; a drafted token "
            f"{costs.draft_fixed_ms / max(self.gammas) + costs.draft_token_ms:.2f} ms ({costs.cost_ratio:.3f} of it); "
            f"the draft reads the prompt in {self.draft_prefill_ms:.1f} ms"
        )
        return "\n".join([facts, *(f"- {reason.text}" for reason in self.reasons)])


def explain(
    target,
    draft,
    prompts: Sequence[Tensor],
    *,
    max_new_tokens: int = 48,
    gammas: Sequence[int] = (1, 2, 3, 4, 5),
    rounds: int = 3,
    counts: Sequence[int] = COUNTS,
    eos_token_id: int | None = None,
    **sampling,
) -> Explanation:
    """Explain speculation with `draft` on prompts, each int64 [1, n]: acceptance, costs, prediction, measurement, why.

    Plain decoding and every gamma take turns on the same prompts, in both orders, so that a machine that slows down
    does so for all. `sampling` goes to `generate`.

    Raises ValueError for no prompts, no gammas, or fewer than one round.
    """
    gammas = tuple(sorted(set(gammas)))
    if not prompts or not gammas or rounds < 1 or max_new_tokens < 2 + gammas[-1]:
        raise ValueError(
            f"expected a prompt, a gamma, a round, and max_new_tokens above the largest gamma by 2; got {len(prompts)} "
            f"prompts, gammas {gammas}, rounds={rounds}, max_new_tokens={max_new_tokens}"
        )
    first = SpeculativeDecoder(target, draft, gammas[0])
    reader = first.target  # wrapped once for all
    decoders = {gamma: SpeculativeDecoder(reader, first.draft, gamma) for gamma in gammas}
    options = dict(eos_token_id=eos_token_id, **sampling)

    def answer(gamma: int) -> list[SpeculativeOutput]:
        return [decoders[gamma].generate(ids, max_new_tokens, **options) for ids in prompts]

    answer(gammas[-1])  # warm-up: the first passes compile, allocate and fill caches
    fewest, most = answer(gammas[0]), answer(gammas[-1])
    costs = _costs_of(reader, first.draft, prompts, gammas, fewest, most, counts, max_new_tokens)
    comparison = _take_turns(decoders, prompts, max_new_tokens, rounds, options)
    measured = {gamma: comparison.speedup(str(gamma), "plain").median for gamma in gammas}
    prefill = sum(output.stage_ms["draft prefill"] for output in most) / len(most)
    return Explanation(costs, gammas, comparison, prefill, reasons(costs, measured))


def measure_costs(
    target,
    draft,
    prompts: Sequence[Tensor],
    *,
    gammas: Sequence[int],
    max_new_tokens: int,
    counts: Sequence[int] = (1, 2, 4, 6),
) -> Costs:
    """Acceptance and costs of greedy speculation with `draft`, from two answers to each prompt: what `explain` finds,
    without the race against plain decoding.

    Raises ValueError for no prompts, fewer than two gammas, or an answer too short for the larger.
    """
    few, many = min(gammas, default=0), max(gammas, default=0)
    if not prompts or few == many or max_new_tokens < 2 + many:
        raise ValueError(
            f"expected a prompt, two gammas, and max_new_tokens above the larger by 2; got {len(prompts)} prompts, "
            f"gammas {tuple(gammas)}, max_new_tokens={max_new_tokens}"
        )
    decoders = [SpeculativeDecoder(target, draft, gamma) for gamma in (few, many)]
    reader = decoders[0].target
    decoders[1].generate(prompts[0], 2 + many)  # warm-up
    fewest, most = ([decoder.generate(ids, max_new_tokens) for ids in prompts] for decoder in decoders)
    drafter = decoders[0].draft
    return _costs_of(reader, drafter, prompts, (few, many), fewest, most, counts, max_new_tokens)


def _costs_of(reader, draft, prompts, gammas, fewest, most, counts, max_new_tokens: int) -> Costs:
    passes = verification_cost(reader, prompts[0], counts)
    free = [cycle for output in most for cycle in unhindered(output, max_new_tokens, gammas[-1])]
    return _costs(gammas, fewest, most, free, passes, bytes_share(reader, draft))


def _costs(
    gammas: tuple[int, ...],
    fewest: list[SpeculativeOutput],
    most: list[SpeculativeOutput],
    free: list[Cycle],
    passes: Comparison,
    share: float | None,
) -> Costs:
    """Costs of outputs at the smallest and at the largest gamma: two points make the line of a draft's time.

    free: the cycles of the latter that had room for every proposal.
    """
    cycles = [cycle for output in most for cycle in output.cycles]
    tested = sum(cycle.accepted + (cycle.accepted < cycle.proposed) for cycle in cycles)
    low, high = (_draft_point(outputs) for outputs in (fewest, most))
    slope = (high[1] - low[1]) / (high[0] - low[0]) if high[0] > low[0] else 0.0
    slope = min(max(slope, 0.0), high[1] / high[0] if high[0] else 0.0)  # a line through noise may fall
    return Costs(
        survival=shares(free, "accepted", gammas[-1]),
        offered=shares(free, "proposed", gammas[-1]),
        alpha=sum(cycle.accepted for cycle in cycles) / tested if tested else 0.0,
        draft_fixed_ms=max(0.0, high[1] - slope * high[0]),
        draft_token_ms=slope,
        verification_ms={int(name): ms for name, ms in passes.median_ms.items()},
        choose_ms=sum(output.stage_ms["bookkeeping"] for output in most) / max(1, len(cycles)),
        draft_bytes_share=share,
    )


def _draft_point(outputs: list[SpeculativeOutput]) -> tuple[float, float]:
    """Tokens proposed per cycle, and the milliseconds that a cycle's drafting took."""
    cycles = max(1, sum(len(output.cycles) for output in outputs))
    return (
        sum(output.proposed for output in outputs) / cycles,
        sum(output.stage_ms["draft"] for output in outputs) / cycles,
    )


def _take_turns(
    decoders: dict[int, SpeculativeDecoder], prompts: Sequence[Tensor], max_new_tokens: int, rounds: int, options: dict
) -> Comparison:
    """Milliseconds of decoding per token, the first token left out, of plain decoding and of each gamma."""
    reader = next(iter(decoders.values())).target
    names = ["plain", *(str(gamma) for gamma in decoders)]
    samples: dict[str, list[float]] = {name: [] for name in names}
    timer = LatencyTimer(reader.device)
    for turn in range(1 + rounds):  # the first is a warm-up
        for name in names if turn % 2 == 0 else reversed(names):
            timer.reset()
            tokens = 0
            for ids in prompts:
                if name == "plain":
                    output = generate(reader, ids, max_new_tokens, timer=timer, **options)
                else:
                    output = decoders[int(name)].generate(ids, max_new_tokens, timer=timer, **options)
                tokens += output.sequences.shape[1] - ids.shape[1] - 1
            if turn > 0:
                samples[name].append(timer.get_elapsed_ms("decode") / max(1, tokens))
    return Comparison({name: tuple(times) for name, times in samples.items()}, {}, timer.device)


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
