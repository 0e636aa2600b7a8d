"""Why speculation pays or not, and the replay of a recording."""

from __future__ import annotations

import io

import pytest
import torch
from rich.console import Console
from speculative_toys import Markov, chain, random_table
from test_speculative_decoder import like, prompt, tiny

from every_millisecond.laboratory.replay import replay
from every_millisecond.laboratory.speculation import explain, reasons
from every_millisecond.laboratory.speculation_costs import (
    Costs,
    bytes_share,
    shares,
    unhindered,
    verification_cost,
)
from llm_latency.engine import FastDecoder
from llm_latency.speculative import (
    Cycle,
    ModelDraft,
    PromptLookupDraft,
    SpeculativeDecoder,
    SpeculativeOutput,
    expected_speedup,
)


def costs(alpha: float = 0.7, draft: float = 0.5, verification: float = 0.0, **changes) -> Costs:
    """A plain step of 10 ms; each further row `verification` ms; drafting 5 tokens per cycle at most."""
    passes = {n: 10 + verification * (n - 1) for n in (1, 2, 4, 8)}
    survival = tuple(alpha ** (i + 1) for i in range(5))
    fields = dict(
        survival=survival,
        offered=(1.0,) * 5,
        alpha=alpha,
        draft_fixed_ms=0.0,
        draft_token_ms=draft,
        verification_ms=passes,
    )
    return Costs(**fields | dict(choose_ms=0.0) | changes)


def test_prediction_is_the_papers_where_verification_is_free():
    """With flat verification and no fixed costs the prediction must be Leviathan's formula."""
    for gamma in range(1, 6):
        assert costs().speedup(gamma) == pytest.approx(expected_speedup(0.7, gamma, 0.05))
    assert costs().cost_ratio == pytest.approx(0.05)
    costly = costs(verification=2.0)
    assert costly.pass_ms(3) == pytest.approx(14) and costly.pass_ms(16) == pytest.approx(40)  # between and beyond
    assert costly.speedup(3) == pytest.approx(expected_speedup(0.7, 3, 0.05, verification=1.6))


def test_survival_counts_cycles_with_room_for_all_proposals():
    """A last cycle that had room for less says nothing about later positions; one in which the draft had nothing to
    say does count, or prompt lookup would seem to propose at every turn."""
    cycles = (Cycle(3, 0, 1), Cycle(3, 1, 2), Cycle(0, 0, 1), Cycle(3, 3, 4), Cycle(3, 3, 4), Cycle(1, 1, 2))
    output = SpeculativeOutput(torch.zeros(1, 1), cycles, {})
    free = unhindered(output, max_new_tokens=1 + 14, gamma=3)
    assert free == list(cycles[:5])
    assert shares(free, "accepted", 3) == (0.6, 0.4, 0.4) and shares(free, "proposed", 3) == (0.8, 0.8, 0.8)
    assert shares([], "accepted", 2) == (0, 0)
    seldom = costs(verification=2.0, offered=(0.5,) * 5, draft=0.0)
    assert seldom.rows(2) == 2 and seldom.speedup(2) == pytest.approx(10 * 2.19 / 12)


@pytest.mark.parametrize(
    ("case", "cause"),
    [
        (costs(alpha=0.2), "acceptance"),
        (costs(alpha=0.85, draft=6.0), "draft"),
        (costs(alpha=0.85, verification=5.0), "verification"),
    ],
)
def test_the_obstacle_that_costs_most_is_named_first(case, cause):
    """The explanation must blame what is to blame: each machine here has one fault."""
    found = reasons(case, {gamma: case.speedup(gamma) for gamma in range(1, 6)})
    assert [reason.cause for reason in found][:2] == ["verdict", cause]
    assert found[1].gain > 1.1 and found[1].text


def test_verdicts():
    """Said plainly, at the gamma that was measured best."""
    texts = [reasons(costs(), dict.fromkeys((1, 2), 0.4) | {3: best})[0].text for best in (1.5, 1.0, 0.6)]
    assert texts[0] == "It pays here: gamma 3 is 1.50 times as fast as plain decoding."
    assert texts[1].startswith("It makes no difference") and texts[2].startswith("It does not pay here")
    good = costs(alpha=0.9, draft=0.01)
    assert [r.cause for r in reasons(good, {3: 2.0})] == ["verdict", "batch"], "nothing stands in its way"


def test_a_draft_bound_by_launches_is_not_one_that_reads_much():
    """A twentieth of the bytes in two fifths of the time: fewer bytes would not help."""
    launch = costs(draft=4.0, draft_bytes_share=0.05)
    assert "launch" in [r.cause for r in reasons(launch, {1: 0.9})]
    memory = costs(draft=4.0, draft_bytes_share=0.4)
    assert "launch" not in [r.cause for r in reasons(memory, {1: 0.9})]


def test_a_batch_uses_up_the_idle_arithmetic():
    """Flat up to 8 rows and steep behind: with more requests the checks are no longer free."""
    case = costs(alpha=0.8, verification_ms={1: 10.0, 8: 10.0, 16: 20.0, 48: 60.0})
    assert case.best(1)[1] > 2 and case.best(8)[1] < 1.1
    batch = next(r for r in reasons(case, {4: 2.0}) if r.cause == "batch")
    assert "A batch of 8 is too large for it." in batch.text
    cheap = costs(alpha=0.8, verification_ms={1: 10.0, 48: 10.0})
    assert "It pays at each" in next(r for r in reasons(cheap, {4: 2.0}) if r.cause == "batch").text


def test_bytes_that_a_step_reads():
    """A tied embedding is read whole, as the head; an untied one by one row alone."""
    tied, untied = tiny(1), tiny(1, tie_word_embeddings=False)
    layers = sum(p.nbytes for p in tied.parameters()) - tied.lm_head.weight.nbytes
    decoder = SpeculativeDecoder(untied, tied)
    assert decoder.draft.step_bytes == layers + tied.lm_head.weight.nbytes
    assert decoder.target.step_bytes == decoder.draft.step_bytes
    assert bytes_share(decoder.target, decoder.draft) == 1
    assert bytes_share(decoder.target, PromptLookupDraft()) is None
    assert bytes_share(Markov(random_table(5, 1)), ModelDraft(Markov(random_table(5, 1)))) is None


def test_verification_cost_leaves_the_cache_as_it_was():
    """Each trial must read at the same position, or the later ones pay for the earlier."""
    toy = Markov(random_table(9, 1))
    found = verification_cost(toy, torch.tensor([[1, 2, 3]]), (1, 2, 5), rounds=3)
    assert set(found.samples_ms) == {"1", "2", "5"} and toy.text == [1, 2, 3]
    with pytest.raises(ValueError, match="counts"):
        verification_cost(toy, torch.tensor([[1, 2, 3]]), (2, 4))


def test_explain_end_to_end():
    """On a real pair: every part filled from measurements, the words and the table printable."""
    target = tiny(11)
    found = explain(
        target, like(target, 0.08), [prompt(9, 1), prompt(14, 2)], max_new_tokens=24, gammas=(3, 1), rounds=2,
        counts=(1, 2, 4, 8),
    )  # fmt: skip
    assert found.gammas == (1, 3) and 0 < found.costs.alpha < 1
    assert set(found.comparison.samples_ms) == {"plain", "1", "3"} and len(found.comparison.samples_ms["1"]) == 2
    assert found.costs.draft_bytes_share == 1 and found.draft_prefill_ms > 0
    assert found.reasons[0].cause == "verdict" and "- It" in found.report()
    assert found.costs.cost_ratio > 0.1, "a draft as large as its target is not free"
    assert set(found.measured) == {1, 3} and min(found.measured.values()) > 0
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(found.table())
    assert "tokens per cycle" in console.export_text() and found.table().row_count == 2
    with pytest.raises(ValueError, match="0 prompts"):
        explain(target, target, [])


def test_explain_prompt_lookup():
    """A draft without a model: no bytes, next to no cost, no fault found with it."""
    target = Markov(random_table(23, 1))
    found = explain(
        target, PromptLookupDraft(), [torch.tensor([[1, 2, 1, 2]])], max_new_tokens=30, gammas=(2,), rounds=1
    )
    assert found.costs.draft_bytes_share is None and len(found.reasons) >= 1


def test_replay_follows_the_recording():
    """Random models never agree: the replay must accept what the recording accepted, and do the work of every cycle."""
    target, draft = Markov(random_table(9, 1)), Markov(random_table(9, 2))
    cycles = [Cycle(3, 3, 4), Cycle(3, 0, 1), Cycle(2, 1, 2), Cycle(0, 0, 1)]
    found = replay(target, draft, cycles, prompt_tokens=5, rounds=2)
    assert found.tokens == 9 and found.cycles == tuple(cycles)
    assert len(target.text) == len(draft.text) == 5 + 9 - 1
    assert {name: len(times) for name, times in found.comparison.samples_ms.items()} == {"plain": 2, "speculative": 2}
    assert found.report().startswith("REPLAY") and "4 of 8 proposals accepted, 9 new tokens" in found.report()
    target.steps = 0
    replay(target, draft, cycles, prompt_tokens=5, rounds=1)
    assert target.steps == 2 * (8 + 4)  # warm-up and one round: 8 plain steps, 4 verifications


def test_replay_of_shapes_with_random_weights():
    """What it is for: a large shape and a small one, of random weights."""
    found = replay(tiny(1), tiny(2, num_hidden_layers=1), [Cycle(4, 3, 4), Cycle(4, 4, 5)], prompt_tokens=20, rounds=1)
    assert found.tokens == 10 and found.stage_ms["draft"] > 0 and found.speedup.median > 0


@pytest.mark.parametrize("cycles", [[], [Cycle(2, 3, 4)], [Cycle(2, -1, 0)]])
def test_impossible_recordings(cycles):
    """More accepted than proposed, or nothing to time."""
    with pytest.raises(ValueError, match="recorded cycle"):
        replay(Markov(random_table(9, 1)), Markov(random_table(9, 2)), cycles)


def test_a_draft_that_cannot_follow_the_recording():
    """Prompt lookup proposes what it finds: the recording's counts would not be its own."""
    with pytest.raises(ValueError, match=r"proposed \d tokens where the recording has 3"):
        replay(Markov(random_table(300, 1)), PromptLookupDraft(), [Cycle(3, 1, 2), Cycle(3, 3, 4)], prompt_tokens=5)


def test_a_recording_that_ended_with_an_end_of_text():
    """Guards against a replay that draws the limit of a text which was cut short, and blames the draft for it."""
    said, guessed = [1, 2, 3, 4, 5, 6, 7, 0], [1, 2, 3, 4, 5, 6, 5, 0]
    recorder = SpeculativeDecoder(Markov(chain(said)), Markov(chain(guessed)), 4)
    cycles = recorder.generate(torch.tensor([[3]]), 30, eos_token_id=7).cycles
    assert cycles[-1].proposed > cycles[-1].accepted
    played = replay(Markov(chain(said)), Markov(chain(said)), iter(cycles), prompt_tokens=4, rounds=1)
    assert played.tokens == 1 + sum(cycle.accepted + 1 for cycle in cycles) and played.cycles == cycles


def test_costs_near_the_end_of_the_context():
    """Guards against a measurement of 48 rows that refuses a request which fits."""
    target = FastDecoder.from_model(tiny(11), max_length=40)
    turns = verification_cost(target, torch.arange(20)[None], (1, 4, 48), rounds=1)
    assert list(turns.median_ms) == ["1", "4"]
