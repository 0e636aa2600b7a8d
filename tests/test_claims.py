"""Figures reach every verdict of every claim; what arithmetic says is no verdict; bad input is refused."""

from __future__ import annotations

import dataclasses
import inspect
import io
import json
import re

import pytest
import torch
from typer.testing import CliRunner

from every_millisecond import claims, cli
from every_millisecond.claims import measuring, speculation_claims
from every_millisecond.claims.check import (
    FALSE,
    NOT_MEASURED,
    TIE,
    TRUE,
    Arithmetic,
    Claim,
    Part,
    claim,
    ffn_compute_bound,
    least_number,
)
from every_millisecond.notebook.outcome import Interval
from llm_latency import hardware
from llm_latency.roofline import Peak, gpu_peak
from llm_latency.timing.compare import Ratio

# Every id of the two articles. It never changes; a claim that is missing is a claim that was dropped.
IDS = [f"A{i}" for i in range(1, 17)] + [f"B{i}" for i in range(1, 18)]


def spread(low: float, high: float) -> Interval:
    return Interval((low + high) / 2, low, high)


@dataclasses.dataclass(frozen=True)
class Witness:
    """Figures that make a claim true; what to change in them (None: leave it out) so that it is false, a tie, or not
    measured. alarm: figures that would make it true beat physics."""

    true: dict
    false: dict
    unmet: dict
    tie: dict | None = None
    alarm: bool = False

    def figures(self, changes: dict) -> dict:
        return {name: value for name, value in (self.true | changes).items() if value is not None}


A100_7B = {"parameters": 6.74e9, "a100": 1}
ANSWER = A100_7B | {"new_tokens": 256, "tokens_per_pass": 8}
SAME = spread(0.98, 1.03)  # undecided where "more than 1" is claimed; false where more than 1.5 is
DRAFT = {"gain": Ratio(2.2, 2.1, 2.3), "acceptance": 0.8, "cost_ratio": 0.1}

WITNESSES = {
    "A1": Witness({"users": 400, "left_share": 0.3}, {"left_share": 0.1}, {"users": 5}),
    "A2": Witness(
        ANSWER | {"best_ms": 205, "speedup": 9.0}, {"best_ms": 900}, {"new_tokens": 50}, {"speedup": spread(8, 9)}
    ),
    "A3": Witness(
        ANSWER | {"prefill_ms": 110, "decode_ms": 78}, {"decode_ms": 980}, {"a100": 0}, {"decode_ms": spread(70, 90)}
    ),
    "A4": Witness({"power": 2.0, "longest": 512}, {"power": 0.97}, {"longest": 256}, {"power": spread(1.7, 1.9)}),
    "A5": Witness(
        {"memory_less": 60.0, "max_error": 1e-6, "gain_256": 2.5, "gain_1024": 2.6},
        {"gain_256": 1.1},
        {"max_error": None},
        {"gain_256": spread(1.8, 2.1)},
    ),
    "A6": Witness(
        {"bytes_ratio": 0.53, "step_ratio_256": 0.9, "step_ratio_4096": 0.7},
        {"step_ratio_256": 1.2},
        {"step_ratio_256": None},
        {"step_ratio_256": SAME},
    ),
    "A7": Witness(
        {"first_512_over_256": spread(1.8, 2.1), "ms_per_token": 1.4},
        {"first_512_over_256": spread(0.7, 0.9)},
        {"first_512_over_256": None},
        {"first_512_over_256": SAME},
    ),
    "A8": Witness({"limit_share": 0.7}, {"limit_share": 0.2}, {"limit_share": None}, {"limit_share": spread(0.4, 0.6)}),
    "A9": Witness(DRAFT | {"gamma": 4}, {"gain": 1.2}, {"gamma": None}, {"gain": spread(1.8, 2.1)}),
    "A10": Witness(
        {"acceptance": 0.8, "best_gamma": 4}, {"best_gamma": 7}, {"acceptance": 0.52}, {"best_gamma": Interval(3, 2, 4)}
    ),
    "A11": Witness(
        {"whole_128": 1.0, "whole_256": 2.0, "whole_1024": 2.4},
        {"whole_256": 1.1},
        {"whole_1024": None},
        {"whole_1024": SAME},
    ),
    "A12": Witness(
        {"bytes_ratio": 0.53, "loss": 0.015}, {"loss": 0.0003}, {"loss": None}, {"loss": spread(0.005, 0.015)}
    ),
    "A13": Witness({"throughput": 5.0, "slower": 1.2}, {"slower": 3.0}, {"slower": None}, {"throughput": SAME}),
    "A14": Witness(
        {"ends_share": 0.001, "ends_share_best": 0.01, "lookup_share": 0.005, "noticed": 1.5},
        {"noticed": 0.01},  # it saves time, and nobody would notice
        {"noticed": None},
        {"lookup_share": Interval(0, -0.001, 0.001)},
    ),
    "A15": Witness({"waste_paged": 0.02, "waste_contiguous": 0.5}, {"waste_paged": 0.2}, {"waste_paged": None}),
    "A16": Witness(
        {"speculative_distance": 0.1, "int8_kl": 1e-4},
        {"speculative_distance": 0.0},
        {"speculative_distance": None},
    ),
    "B1": Witness({"cuda": 1, "flattery": 14.0}, {"flattery": 1.5}, {"cuda": 0}, {"flattery": spread(3, 6)}),
    "B2": Witness(
        A100_7B | {"tokens": 512, "prefill_ms": 46, "embedding_ms": 0.5, "head_ms": 0.3},
        {"embedding_ms": 0.01},
        {"tokens": 256},
        {"prefill_ms": spread(38, 44)},
    ),
    "B3": Witness(
        {"tokens": 512, "attention_share": 0.6},
        {"attention_share": 0.34},
        {"tokens": 256},
        {"attention_share": spread(0.5, 0.6)},
    ),
    "B4": Witness(A100_7B | {"step_ms": 6.2}, {"step_ms": 9.4}, {"parameters": 1.35e8}, alarm=True),
    "B5": Witness(
        {"decode_share_512_256": 0.97, "decode_share": 0.84},
        {"decode_share_512_256": 0.93},
        {"decode_share_512_256": None},
        {"decode_share_512_256": spread(0.95, 0.97)},
    ),
    "B6": Witness(
        {"prefill_share": 0.8, "decode_share": 0.6},
        {"decode_share": 0.2},
        {"prefill_share": None},
        {"decode_share": spread(0.4, 0.6)},
    ),
    "B7": Witness(
        {"growth_with": 5.0, "growth_without": 5.0}, {"growth_with": 1.1}, {"growth_with": None},
        {"growth_with": spread(2.5, 3.5)},
    ),
    "B8": Witness(
        {"cuda": 1, "gain": 1.2, "first_call_ms": 9e3, "step_ms": 30.0},
        {"gain": 4.0},
        {"cuda": 0},
        {"gain": spread(1, 1.2)},
    ),
    "B9": Witness(
        {"prefill_gain": 2.0, "decode_gain": 1.9},
        {"prefill_gain": 0.5},
        {"prefill_gain": None},
        {"decode_gain": spread(1.4, 1.7)},
    ),
    "B10": Witness(
        {"saved_512": 0.35, "saved_64": 0}, {"saved_512": 0.6}, {"saved_512": None}, {"saved_512": spread(-0.1, 0.3)}
    ),
    "B11": Witness(
        {"smaller": 0.75, "decode_gain": 1.3, "loss": 0.01},
        {"smaller": 0.65},
        {"loss": None},
        {"decode_gain": spread(1.1, 1.4)},
    ),
    "B12": Witness({"gain": 4.5}, {"gain": SAME}, {"gain": None}, {"gain": spread(2.5, 3.5)}),
    "B13": Witness(
        {"cuda": 1, "prefill_gain": 3, "decode_gain": 3},
        {"decode_gain": 1.3},
        {"cuda": None},
        {"prefill_gain": spread(1.9, 2.2)},
    ),
    "B14": Witness(DRAFT, {"gain": SAME}, {"gain": None}, {"gain": spread(1.8, 2.1)}),
    "B15": Witness(
        {"held_ratio": 1.5, "waste_paged": 0.02}, {"held_ratio": 0.9}, {"waste_paged": None}, {"held_ratio": SAME}
    ),
    "B16": Witness(
        {"hopper": 1, "bf16_share": 0.8, "gain": 2.2}, {"gain": 1.6}, {"bf16_share": 0.3}, {"gain": spread(1.9, 2.2)}
    ),
    "B17": Witness({"cuda": 1, "lead": 1.2}, {"lead": 0.8}, {"cuda": 0}, {"lead": SAME}),
}  # fmt: skip


def reach_every_verdict(check: Claim, witness: Witness) -> None:
    """Each verdict by its witness; a claim that compares two times needs a tie, too."""
    wanted = {TRUE: {}, FALSE: witness.false, NOT_MEASURED: witness.unmet}
    if any(part.same is not None for part in check.parts) or witness.tie is not None:
        assert witness.tie is not None, f"{check.id} compares two times and has no tie"
        wanted[TIE] = witness.tie
    for verdict, changes in wanted.items():
        judged = check(witness.figures(changes))
        if verdict == TRUE and witness.alarm:
            assert judged.alarm and judged.verdict == NOT_MEASURED, f"{check.id}: no alarm"
            assert check.arithmetic().word == "impossible" and judged.line.startswith(f"ALARM: {check.id}: ")
            continue
        assert judged.verdict == verdict and not judged.alarm, f"{check.id}: {judged.line}; expected {verdict}"
        assert (
            judged.reason
            and judged.line.startswith(f"{check.id} {judged.words}: ")
            and judged.words.startswith(verdict)
        )


@pytest.mark.parametrize("name", claims.CHECKS)
def test_every_verdict_of_every_claim_is_reached(name):
    """A verdict that cannot be false, or is written by hand, has no place in the course; a claim without a witness
    fails here."""
    reach_every_verdict(claims.CHECKS[name], WITNESSES[name])


def test_a_claim_that_cannot_be_false_is_caught():
    """The test above must see a planted claim whose range holds every figure, and one that has no tie."""
    witness = Witness({"gain": 2.0}, {"gain": 0.1}, {"gain": None}, {"gain": spread(1.4, 1.7)})
    work = Arithmetic("possible", "x", ())
    reach_every_verdict(Claim("Z1", "twice as fast", lambda: work, (Part("gain", "{v}", 1.5, same=1),)), witness)
    with pytest.raises(AssertionError, match="expected false here"):
        reach_every_verdict(Claim("Z1", "faster or not", lambda: work, (Part("gain", "{v}"),)), witness)
    with pytest.raises(AssertionError, match="has no tie"):
        reach_every_verdict(
            Claim("Z1", "twice as fast", lambda: work, (Part("gain", "{v}", 1.5, same=1),)),
            dataclasses.replace(witness, tie=None),
        )


@pytest.mark.parametrize("name", sorted(set(IDS) - {"B4"}))
def test_a_part_refuted_refutes_the_whole_and_a_premise_missing_settles_nothing(name):
    """A claim of three parts held where two of them did; a figure of another model spoke of the claim's."""
    check, right = claims.CHECKS[name], WITNESSES[name].true
    for part in check.parts:
        beyond = 1e-6 + 2 * part.tolerance
        ends = (part.low - 0.4 * abs(part.low) - beyond, part.high + 0.4 * abs(part.high) + beyond)
        wrong = [end * right.get(part.over, 1) for end in ends if abs(end) < float("inf")]
        assert FALSE in [check(right | {part.figure: value}).verdict for value in wrong], part
    for figure in (*(need.figure for need in check.needs), *(part.figure for part in check.parts if part.needed)):
        judged = check({name: value for name, value in right.items() if name != figure})
        assert judged.verdict == NOT_MEASURED and figure in judged.reason


def test_no_claim_is_missing():
    """A claim that nobody wants to answer must not vanish from the ledger."""
    assert list(claims.CHECKS) == IDS
    assert [row.id for row in claims.ledger()] == IDS


def test_a_claim_is_named_once():
    """A second check of the same id would replace the first in silence."""
    with pytest.raises(ValueError, match="claim A3 is checked twice"):
        claim("A3", "the same once more", Part("x", "{v}"))(lambda: None)


# What an independent calculation says of each claim; a change of the code must not change it unseen.
BY_ARITHMETIC = {
    "impossible": {"A2", "A3", "A4", "A11", "A16", "B4", "B16"},
    "only if": {"A5", "A8", "A9", "A10", "A14", "B3", "B5", "B6", "B7", "B8", "B9", "B11", "B12", "B14"},
    "possible": {"A6", "A7", "A12", "A13", "A15", "B1", "B2", "B10", "B13", "B15"},
    "says nothing": {"A1", "B17"},
}


def test_arithmetic_settles_nothing_and_agrees_with_the_independent_reading():
    """What was computed or published must not stand as a verdict of this machine; a claim without its working."""
    for name, check in claims.CHECKS.items():
        judged = check()
        assert judged.verdict == NOT_MEASURED and judged.here == () and judged.id == name
        assert name in BY_ARITHMETIC[judged.arithmetic.word], judged.arithmetic.word
        assert len(judged.arithmetic.lines) >= 2 and judged.claim and judged.premise
        assert f"by arithmetic: {judged.arithmetic.word}" in str(judged)
    assert {row.verdict for row in claims.ledger()} == {NOT_MEASURED}
    with pytest.raises(ValueError, match="expected one of possible"):
        Arithmetic("likely", "x", ())


@pytest.mark.parametrize(
    ("name", "field", "factor", "word"),
    [
        ("A3", "bandwidth_gbps", 20, "possible"),
        ("B4", "bandwidth_gbps", 20, "possible"),
        ("B16", "fp8_tflops", 10, "possible"),
        ("A8", "bandwidth_gbps", 1000, "impossible"),
        ("B6", "bf16_tflops", 5, "impossible"),
        ("B2", "bf16_tflops", 0.1, "impossible"),
        ("B9", "bf16_tflops", 0.05, "impossible"),
    ],
)
def test_what_arithmetic_says_follows_from_the_datasheet(name, field, factor, word, monkeypatch):
    """Words written by hand would stay when the hardware is twenty times faster."""
    changed = {
        key: dataclasses.replace(peak, **{field: getattr(peak, field) and factor * getattr(peak, field)})
        for key, peak in hardware.DATASHEET.items()
    }
    monkeypatch.setattr(hardware, "DATASHEET", changed)
    assert claims.CHECKS[name].arithmetic().word == word


def test_a_claim_that_contains_a_refuted_one_is_refuted(own_figures, monkeypatch, capsys):
    """A2 held although its 0.21 s contain A3: by arithmetic, by figures beside it, and by what a notebook kept."""
    assert str(claims.CHECKS["A2"].arithmetic()) == "impossible: it contains A3, which is impossible"
    right, slow = WITNESSES["A2"].true, WITNESSES["A3"].true | {"decode_ms": 980}
    judged = claims.CHECKS["A2"](right, {"A3": slow})
    assert judged.line == "A2 false here: it contains A3, which is false here"
    assert claims.CHECKS["A2"](right, {"A3": WITNESSES["A3"].true}).verdict == TRUE
    claims.settle("A15", waste_paged=0.3)
    claims.settle("B15", **WITNESSES["B15"].true)
    assert "B15 false here: it contains A15" in capsys.readouterr().out
    assert next(row for row in claims.ledger([claims.own()]) if row.id == "B15").verdict == FALSE
    monkeypatch.setattr(speculation_claims, "RULE_STEP", -1)
    assert claims.CHECKS["A16"].arithmetic().word == "possible"


def test_what_beats_physics_raises_an_alarm(own_figures, capsys):
    """A step of less time than its bytes take is a wrong clock, and no verdict."""
    for name, figures in (
        ("A8", {"limit_share": 1.4}),
        ("B6", {"prefill_share": 0.8, "decode_share": 1.2}),
        ("A3", WITNESSES["A3"].true | {"tokens_per_pass": 2}),
        ("A2", WITNESSES["A2"].true | {"tokens_per_pass": 2}),
        ("B2", WITNESSES["B2"].true | {"prefill_ms": 15}),
        ("B16", WITNESSES["B16"].true | {"gain": 2.9}),
    ):
        claims.settle(name, **figures)
        out = capsys.readouterr().out
        assert out.startswith(f"on this machine: ALARM: {name}: ") and "physics allows" in out
    row = next(row for row in claims.ledger([claims.own()]) if row.id == "A8")
    assert row.verdict == NOT_MEASURED and row.cells()[-1].startswith("not measured here: ALARM: limit_share is 1.4")


def test_a_verdict_reads_as_a_sentence():
    """Both sides of the comparison, the claim's own range, the condition in words with its number."""
    assert claims.CHECKS["B9"]({"prefill_gain": Ratio(2.84, 2.79, 2.91), "decode_gain": 1.7}).line == (
        "B9 false here: in 16 bits a prefill is 2.84 times (2.79 to 2.91) as fast as in FP32 (the claim needs 1.6 to "
        "2.5 times); this part holds: in 16 bits a decode step is 1.70 times as fast as in FP32 (the claim needs 1.6 "
        "to 2.5 times)"
    )
    # Sixteen tokens say little of a prompt of 256: where the length was given, the verdict names it.
    short = claims.CHECKS["B9"]({"prefill_gain": 0.5, "prefill_tokens": 16})
    assert short.line.startswith("B9 false here: in 16 bits a prefill of 16 tokens is 0.50 times as fast as in FP32")
    assert short.stated[0] == "in 16 bits a prefill is 1.6 to 2.5 times as fast as in FP32"
    assert claims.CHECKS["A13"]({"throughput": SAME, "slower": 1.2}).line.startswith(
        "A13 no measurable difference: eight requests at once get 1.00 times (0.98 to 1.03) as many tokens a "
        "second as one alone, which cannot be told apart from 1.00 times (the claim needs more than 1.00 times); "
    )
    # Three times as many are claimed: that one as many were measured refutes it, whatever the spread says of none.
    assert claims.CHECKS["B12"]({"gain": spread(0.98, 1.04)}).line.startswith(
        "B12 false here: eight requests at once get 1.01 times (0.98 to 1.04) as many tokens a second as one at a "
        "time, which cannot be told apart from 1.00 times (the claim needs 3 to 10 times)"
    )
    # Rounded, 1.198 stood under "false" beside "the claim needs 1.2 to 1.5 times".
    assert "takes 1.198 times as long" in claims.CHECKS["B11"]({"smaller": 0.75, "decode_gain": 1.198, "loss": 0}).line
    # 28% is a difference from none: what the spread leaves open is the claim's limit, and the verdict says so.
    assert claims.CHECKS["B10"]({"saved_512": spread(0.28, 0.69)}).line.startswith(
        "B10 no measurable difference from the claim's limit: at 512 tokens SDPA saves"
    )
    assert claims.CHECKS["B10"]({"saved_512": spread(-0.1, 0.3)}).words == "no measurable difference"
    # The last pass is cut short, so that three guesses a pass are 2.9 on average: the premise of 3 to 5 is met.
    judged = claims.CHECKS["A9"](DRAFT | {"gamma": 2.91, "gain": 1.2})
    assert judged.verdict == FALSE and "by arithmetic: only if the acceptance is 0.71 or more" in str(judged)
    assert claims.CHECKS["A9"](DRAFT | {"gamma": 2.4}).reason.endswith("3 to 5 guesses; here it is 2")
    assert claims.CHECKS["B1"]({"cuda": 0, "flattery": 900}).line == (
        "B1 not measured here: the claim speaks of a CUDA GPU, and here there is none"
    )
    assert claims.CHECKS["A10"]({"acceptance": 0.52, "cost_ratio": 0.06}).reason == (
        "the claim speaks of an acceptance of 75 to 85%; here it is 52.0%"
    )


def test_the_acceptance_rule_is_summed_up_and_a_wrong_one_is_seen(monkeypatch):
    """A16 must rest on the library's rule: one that accepts everything puts out the draft's distribution."""
    p, q = torch.tensor([0.5, 0.3, 0.2]).double(), torch.tensor([0.2, 0.5, 0.3]).double()
    assert speculation_claims.output_distance(p, q) <= 1 / 400
    monkeypatch.setattr(speculation_claims, "verify", lambda tokens, *_: (1, p))
    assert speculation_claims.output_distance(p, q) == pytest.approx(0.3)  # total variation of p and q
    assert claims.CHECKS["A16"].arithmetic().word == "possible"


def test_figures_that_a_check_does_not_know_are_refused():
    """A misspelt figure would be ignored, and the verdict would rest on something else."""
    with pytest.raises(KeyError, match="A4 knows no figure 'powers'; expected longest, power"):
        claims.CHECKS["A4"]({"powers": 2.0})
    for bad in (
        float("nan"), float("inf"), True, "2", None, Ratio(2.0, float("nan"), 3.0), Ratio(1.0, 2.0, 3.0),
        {"median": 1.0}, {"median": "1", "low": 0, "high": 2},
    ):  # fmt: skip
        with pytest.raises(ValueError, match="A4: power="):
            claims.CHECKS["A4"]({"power": bad})


@pytest.fixture
def own_figures(tmp_path, monkeypatch):
    monkeypatch.setenv("LLM_LATENCY_SCORECARD", str(tmp_path / "card.json"))
    return tmp_path


def test_what_a_notebook_settles_stands_in_the_ledger(own_figures, capsys):
    """The notebook's verdict and the ledger's must come from the same figures, their spread included."""
    claims.settle("B9", decode_gain=Ratio(0.9, 0.8, 0.95), prefill_gain=2.2)
    assert capsys.readouterr().out.startswith("on this machine: B9 false here: in 16 bits a decode step is 0.90 times")
    claims.settle("B9", decode_gain=2.0)  # a second run replaces that figure and keeps the other
    row = next(row for row in claims.ledger([claims.own()]) if row.id == "B9")
    assert (row.verdict, row.settled_by) == (TRUE, "here") and "2.20 times" in row.here[0]
    undecided = spread(1.4, 1.8)
    claims.settle("B9", decode_gain=undecided)
    kept = json.loads((own_figures / "claims.json").read_text())["B9"]["figures"]
    assert kept == {"prefill_gain": 2.2, "decode_gain": dataclasses.asdict(undecided)}
    row = next(row for row in claims.ledger([claims.own()]) if row.id == "B9")
    assert row.verdict == TIE and str(row).count("measured here: ") == 2
    with pytest.raises(KeyError, match="no claim 'C1'"):
        claims.settle("C1", gain=1.0)
    # Kept by an earlier edition, whose claims had other figures: no reason to fail at this one's.
    kept = {"B9": {"prefill_gain": 2.0, "prefill_speed": 1.0}, "C1": {"gain": 1.0}}
    kept = {id: {"date": "2026-01-01", "figures": figures} for id, figures in kept.items()}
    (own_figures / "claims.json").write_text(json.dumps(kept))
    assert claims.own().values == {"B9": {"prefill_gain": 2.0}}
    claims.settle("B9", decode_gain=2.0)
    assert capsys.readouterr().out.splitlines()[-1].startswith("on this machine: B9 true here: ")
    with pytest.raises(KeyError, match="B9 knows no figure"):
        claims.settle("B9", speed=1.0)


def test_recorded_runs_carry_date_and_machine_and_give_way_to_this_machine(own_figures):
    """A recorded figure must never pass for one measured here."""
    machine = {"cpu": "a chip", "threads": 2, "gpu": None}
    for date, power in (("2026-01-01", 2.0), ("2026-01-02", 0.9)):
        record = {
            "kind": "claims",
            "date": date,
            "machine": machine,
            "figures": {"A4": {"power": power, "longest": 512}},
        }
        (own_figures / f"{date}-claims.json").write_text(json.dumps(record))
    (own_figures / "other.json").write_text("[1, 2]")
    found = claims.recorded(own_figures)
    assert [entry.date for entry in found] == ["2026-01-01", "2026-01-02"]
    row = next(row for row in claims.ledger(found) if row.id == "A4")
    assert (row.verdict, row.settled_by, row.here) == (NOT_MEASURED, "recorded", ())
    assert row.recorded[0].startswith("2026-01-01, a chip, 2 threads: true there: ") and len(row.recorded) == 2
    assert row.cells()[-1].startswith("not measured here: ")
    claims.settle("A4", power=2.0, longest=512)
    row = next(row for row in claims.ledger([*found, claims.own()]) if row.id == "A4")
    assert (row.verdict, row.settled_by) == (TRUE, "here")
    with pytest.raises(KeyError, match="unknown claims: Z9"):
        claims.ledger([claims.Findings("x", "y", "z", {"Z9": {}})])


def test_the_ladder_settles_claims_by_its_medians():
    """A ratio turned upside down would make the slower rung win."""
    from test_experiment import a_run, record

    slow = record(scale=9.0, perplexity=20.0, share_of_limit={"prefill": 0.5, "decode": 0.4})
    run = a_run(slow, record("sdpa", scale=8.0), record("half", scale=4.0, perplexity=20.4))
    found = claims.from_ladder(run)
    assert found.values["A2"]["speedup"].median == pytest.approx(9 / 4)
    assert found.values["A2"]["perplexity_change"] == pytest.approx(0.02)
    b9 = dict(found.values["B9"])
    assert b9.pop("prefill_tokens") == 256
    assert [gain.median for gain in b9.values()] == pytest.approx([2.0, 2.0])
    assert found.values["A14"]["ends_share"] == pytest.approx(2 / 131)
    assert found.values["A8"] == {"limit_share": 0.4}
    assert claims.ledger([found])  # every figure is one that its check knows


def test_the_ladder_settles_speculation_against_the_same_weights():
    """Against a slower format's plain decoding every speculation would win."""
    from test_experiment import a_run, record

    entries = [
        record(),
        record("int4", scale=0.1, weights="int4", launch_ms=0.5),
        record("fast", scale=0.5, weights="bfloat16"),
        record("speculative", scale=0.4, weights="bfloat16", acceptance=0.7, draft_cost=0.2, tokens_per_pass=2.5,
               rows_per_pass=5.0),
    ]  # fmt: skip
    found = claims.from_ladder(a_run(*entries)).values
    gain = found["B14"]["gain"]
    assert gain.median == pytest.approx(1.25) and gain.low <= gain.median <= gain.high
    assert found["B14"] == {"gain": gain, "acceptance": 0.7, "cost_ratio": 0.2}
    assert found["A9"] == found["B14"] | {"gamma": 4.0}
    assert found["A10"] == pytest.approx({"acceptance": 0.7, "cost_ratio": 0.2})
    assert "B14" not in claims.from_ladder(a_run(*entries[:3])).values


def test_a_gpu_record_settles_b13():
    """The kernels' times are compared with the form that keeps its scores in memory, and an interpreted run claims
    nothing."""
    rows = [
        {
            "case": {"kind": kind},
            "interpreted": False,
            "median_ms": {"sdpa:math": 8.0, "sdpa:flash": 2.0, "triton": 2.5},
        }
        for kind in ("prefill", "decode")
    ]
    report = {"machine": {"gpu": "H200"}, "date": "2026-01-01", "kernels": rows}
    found = claims.from_gpu_check(report, source="x.json")
    assert found.values == {"B13": {"prefill_gain": 4.0, "decode_gain": 4.0, "cuda": 1.0}} and found.machine == "H200"
    for row in rows:
        row["interpreted"] = True
    assert claims.from_gpu_check(report, source="x.json").values == {}


def test_the_table_shows_every_claim():
    """A cell that rich reads as markup would vanish."""
    from rich.console import Console

    console = Console(width=220, record=True, file=io.StringIO())
    console.print(claims.table(claims.ledger()))
    text = console.export_text()
    assert all(name in text for name in IDS)
    counted = claims.counts(claims.ledger())
    assert sum(counted.values()) == len(IDS) and list(counted) == list(claims.VERDICTS)


def test_the_shared_arithmetic_by_hand():
    """A factor of a thousand between ms and s."""
    assert "a pass takes 6.58 ms at least, 12.2 fit into 80 ms" in str(claims.CHECKS["A3"]())  # 80 / 6.58
    assert "850 ms is 1.3% of the machine" in str(claims.CHECKS["A3"]())  # 3.4e12 / 0.85 / 312e12
    assert "13.48 GB of parameters in 6.2 ms: 2.17 TB/s" in str(claims.CHECKS["B4"]())
    # 4 n^2 heads head_dim layers over that plus 2 n times the matrices' parameters, and one head
    linear = 2 * 256 * 32 * (4 * 4096**2 + 3 * 4096 * 11008) + 2 * 32000 * 4096
    square = 4 * 256**2 * 4096 * 32
    assert claims.quadratic_share("llama-2-7b", 256) == pytest.approx(square / (square + linear), rel=1e-12)


def test_thresholds_are_the_least_number():
    """Off by one in the search moves every condition."""
    assert least_number(lambda n: n >= 1) == 1
    assert least_number(lambda n: n >= 1000) == 1000
    with pytest.raises(ValueError, match="up to 64"):
        least_number(lambda n: False, limit=64)
    peak = gpu_peak("A100-80GB-SXM")
    least = least_number(lambda n: ffn_compute_bound("llama-2-7b", peak, n))
    assert ffn_compute_bound("llama-2-7b", peak, least)
    assert not ffn_compute_bound("llama-2-7b", peak, least - 1)
    assert not ffn_compute_bound("llama-2-7b", Peak("slow", 1.0, 1e6), least)


def test_the_command_shows_one_claim_in_full_and_refuses_an_unknown_one(own_figures):
    """An id that does not exist must not print an empty ledger."""
    shown = CliRunner().invoke(cli.app, ["claims", "A16", "--results", str(own_figures)])
    assert shown.exit_code == 0 and "by arithmetic: impossible: INT8 rounds" in shown.output
    assert "A16 not measured here: missing: speculative_distance" in shown.output
    assert "add up to p" in shown.output and "A15" not in shown.output
    wrong = CliRunner().invoke(cli.app, ["claims", "B18", "--results", str(own_figures)])
    assert wrong.exit_code == 1 and "no claim 'B18'" in wrong.stderr
    everything = CliRunner().invoke(cli.app, ["claims", "--results", str(own_figures)])
    assert everything.exit_code == 0 and all(name in everything.output for name in IDS)
    missing = CliRunner().invoke(cli.app, ["claims", "--run", str(own_figures)])
    assert missing.exit_code == 1 and "llm-latency run" in " ".join(missing.stderr.split())


def test_what_was_measured_is_written_and_read_again(own_figures, monkeypatch):
    """A record that its own reader does not know would never reach the ledger."""
    monkeypatch.setattr(measuring, "Subject", lambda profile: None)
    monkeypatch.setattr(measuring, "MEASUREMENTS", {"clock": lambda subject: {"B1": {"flattery": 7.0}}})
    found = measuring.measure_claims()
    assert found.here and found.values == {"B1": {"flattery": 7.0}}
    path = measuring.write(found, own_figures)
    assert path.name.endswith("-claims.json")
    (read,) = claims.recorded(own_figures)
    assert read.values == found.values and not read.here and read.date == found.date
    with pytest.raises(ValueError, match="unknown measurement 'warp'"):
        measuring.measure_claims(["warp"])


def test_measurements_name_only_figures_that_the_checks_know():
    """A misspelt name would show only at the end of two minutes of measuring."""
    source = inspect.getsource(measuring)
    for name, known in ((name, judge.figures) for name, judge in claims.CHECKS.items()):
        for block in re.findall(rf'"{name}": \{{(.*?)\}}[,\n}}]', source, re.DOTALL):
            for figure in re.findall(r'"([a-z_0-9]+)":', block):
                assert figure in known, f"{name}: {figure}"


@pytest.mark.parametrize("name", list(measuring.MEASUREMENTS))
def test_every_measurement_runs_and_its_figures_are_known(name, tiny_directory):
    """On a small model, whose figures mean nothing: what breaks after two minutes on the real one must break here."""
    found = measuring.measure_claims([name], profile=tiny_directory)
    assert found.values
    for id, figures in found.values.items():
        assert claims.CHECKS[id](figures).here or figures == {"cuda": 0.0}
