"""The claims' arithmetic by hand, and verdicts that follow the figures instead of being written down."""

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
    CONDITION,
    HOLDS,
    IMPOSSIBLE,
    NOT_MEASURED,
    claim,
    ffn_compute_bound,
    least_number,
)
from every_millisecond.claims.serving_claims import simulated_flattery
from llm_latency import hardware
from llm_latency.roofline import Peak, gpu_peak

# Every id of the two articles. It never changes; a claim that is missing is a claim that was dropped.
IDS = [f"A{i}" for i in range(1, 17)] + [f"B{i}" for i in range(1, 18)]


def test_no_claim_is_missing():
    """A claim that nobody wants to answer must not vanish from the ledger."""
    assert list(claims.CHECKS) == IDS
    assert [row.id for row in claims.ledger()] == IDS


def test_a_claim_is_named_once():
    """A second check of the same id would replace the first in silence."""
    with pytest.raises(ValueError, match="claim A3 is checked twice"):
        claim("A3", "the same once more")(lambda here: None)


def test_every_check_is_complete_and_carries_its_own_id():
    """A claim under another's id, or without a verdict or arithmetic."""
    for name, judge in claims.CHECKS.items():
        result = judge()
        assert result.id == name
        assert result.verdict in claims.VERDICTS
        assert result.claim and result.allowed and len(result.arithmetic) >= 2
        assert str(result).startswith(f"{name}: {result.verdict}")
        assert result.measured == (), "nothing was measured"


# Figures of one claim, and the verdict that follows from them: each claim at least twice, with different outcomes.
FLIPS = {
    "A4": [({"power": 2.0}, HOLDS), ({"power": 0.8}, CONDITION)],
    "A5": [
        ({"memory_less": 60.0, "max_error": 1e-6, "gain_256": 2.5, "gain_1024": 2.6}, HOLDS),
        ({"memory_less": 60.0, "max_error": 1e-6, "gain_256": 1.1, "gain_1024": 2.6}, CONDITION),
        ({"memory_less": 3.0, "gain_256": 2.5}, IMPOSSIBLE),
        ({"max_error": 0.1, "gain_256": 2.5}, IMPOSSIBLE),
    ],
    "A6": [
        ({"bytes_ratio": 0.53, "step_ratio_256": 0.9, "step_ratio_4096": 0.7}, HOLDS),
        ({"bytes_ratio": 0.53, "step_ratio_256": 1.2, "step_ratio_4096": 0.7}, CONDITION),
        ({"bytes_ratio": 0.9, "step_ratio_4096": 0.7}, IMPOSSIBLE),
    ],
    "A7": [({"ms_per_token": 1.2}, HOLDS), ({"ms_per_token": -0.1}, IMPOSSIBLE)],
    "A9": [({"gain": 2.2}, HOLDS), ({"gain": 1.1}, CONDITION)],
    "A10": [({"acceptance": 0.8, "cost_ratio": 0.2}, HOLDS), ({"acceptance": 0.3, "cost_ratio": 0.2}, CONDITION)],
    "A11": [
        ({"whole_128": 1.0, "whole_256": 2.0, "whole_1024": 2.4}, HOLDS),
        ({"whole_128": 1.1, "whole_256": 1.1, "whole_1024": 2.4}, CONDITION),
        ({"whole_128": 1.2, "whole_256": 1.0, "whole_1024": 1.0}, IMPOSSIBLE),
    ],
    "A12": [
        ({"bytes_ratio": 0.53, "loss": 0.015}, HOLDS),
        ({"bytes_ratio": 0.53, "loss": 0.0001}, CONDITION),
        ({"bytes_ratio": 0.9, "loss": 0.015}, IMPOSSIBLE),
    ],
    "A13": [
        ({"throughput": 2.0, "slower": 1.1}, HOLDS),
        ({"throughput": 2.0, "slower": 3.0}, CONDITION),
        ({"throughput": 0.9, "slower": 3.0}, IMPOSSIBLE),
    ],
    "A14": [
        ({"ends_share": 0.001, "ends_share_best": 0.01}, HOLDS),
        ({"ends_share": 0.001, "ends_share_best": 0.05}, CONDITION),
        ({"ends_share": 0.05}, IMPOSSIBLE),
    ],
    "A15": [
        ({"waste_paged": 0.02, "waste_contiguous": 0.5}, HOLDS),
        ({"waste_paged": 0.2, "waste_contiguous": 0.5}, CONDITION),
        ({"waste_paged": 0.6, "waste_contiguous": 0.5}, IMPOSSIBLE),
    ],
    "A16": [
        ({"speculative_distance": 0.0, "int8_kl": 1e-4}, IMPOSSIBLE),
        ({"speculative_distance": 0.1, "int8_kl": 1e-4}, HOLDS),
        ({"speculative_distance": 0.1, "int8_kl": 0.0}, CONDITION),
    ],
    "B1": [({"flattery": 900.0}, HOLDS), ({"flattery": 1.5}, CONDITION), ({"flattery": 0.9}, IMPOSSIBLE)],
    "B3": [({"attention_share": 0.6}, HOLDS), ({"attention_share": 0.37}, CONDITION)],
    "B5": [
        ({"decode_share_512_256": 0.98, "decode_share": 0.97}, HOLDS),
        ({"decode_share_512_256": 0.98, "decode_share": 0.88}, CONDITION),
    ],
    "B7": [
        ({"growth_without": 5.0, "growth_with": 1.1}, CONDITION),
        ({"growth_without": 5.0, "growth_with": 5.0}, HOLDS),
        ({"growth_without": 1.0, "growth_with": 1.0}, IMPOSSIBLE),
    ],
    "B8": [({"gain": 1.2, "first_call_ms": 9e3, "step_ms": 30.0}, HOLDS), ({"gain": 4.0}, CONDITION)],
    "B9": [({"prefill_gain": 2.0, "decode_gain": 1.9}, HOLDS), ({"prefill_gain": 2.0, "decode_gain": 0.9}, CONDITION)],
    "B10": [
        ({"saved_64": 0.25, "saved_256": 0.35}, HOLDS),
        ({"saved_64": 0.1, "saved_256": 0.5}, CONDITION),
        ({"saved_64": 0.05, "saved_256": 0.1}, IMPOSSIBLE),
    ],
    "B11": [
        ({"smaller": 0.75, "decode_gain": 1.3, "loss": 0.01}, HOLDS),
        ({"smaller": 0.69, "decode_gain": 1.3, "loss": 0.01}, CONDITION),
        ({"smaller": 0.69, "decode_gain": 1.0, "loss": 0.5}, IMPOSSIBLE),
    ],
    "B12": [({"gain": 4.5}, HOLDS), ({"gain": 1.2}, CONDITION)],
    "B13": [({"prefill_gain": 3.0, "decode_gain": 3.0}, HOLDS), ({"prefill_gain": 3.0, "decode_gain": 1.0}, CONDITION)],
    "B14": [({"gain": 2.2}, HOLDS), ({"gain": 0.8}, CONDITION)],
    "B15": [({"held_ratio": 1.5}, HOLDS), ({"held_ratio": 0.9}, IMPOSSIBLE)],
}
# These follow from datasheets and published figures alone, and are perturbed below.
BY_ARITHMETIC = {"A2", "A3", "A8", "B2", "B4", "B6", "B16"}


@pytest.mark.parametrize("name", FLIPS)
def test_verdicts_follow_from_the_figures(name):
    """A verdict written by hand would stay where the figures change."""
    for figures, verdict in FLIPS[name]:
        result = claims.CHECKS[name](figures)
        assert result.verdict == verdict, figures
        assert result.measured, "what was measured must be shown"
    assert len({verdict for _, verdict in FLIPS[name]}) >= 2


def test_every_verdict_is_perturbed_somewhere():
    """A claim added without a test that its verdict moves; A1 and B17 say why nothing here can measure them."""
    assert set(FLIPS) | BY_ARITHMETIC | {"A1", "B17"} == set(IDS)
    for name in ("A1", "B17"):
        judge = claims.CHECKS[name]
        assert judge().verdict == NOT_MEASURED and judge.figures == ()
        assert any(line.startswith("why: ") for line in judge().arithmetic)


def test_the_total_follows_from_published_rates(monkeypatch):
    """A2: at eight times the best published rate 256 tokens would fit, and the claim would hold."""
    from every_millisecond.claims import published

    assert claims.CHECKS["A2"]().verdict == CONDITION
    faster = dataclasses.replace(published.PUBLISHED["best"], value=2000)
    monkeypatch.setitem(published.PUBLISHED, "best", faster)
    assert claims.CHECKS["A2"]().verdict == HOLDS
    monkeypatch.setitem(published.PUBLISHED, "best", dataclasses.replace(faster, value=1))
    assert claims.CHECKS["A2"]().verdict == IMPOSSIBLE


@pytest.mark.parametrize(("name", "field", "factor"), [("A8", "bandwidth_gbps", 1000), ("B6", "bf16_tflops", 5)])
def test_bounds_follow_from_the_datasheet(name, field, factor, monkeypatch):
    """With a thousand times the bandwidth, decode is no longer bound by it; with five times the arithmetic, a prefill
    of 512 tokens is."""
    changed = {
        key: dataclasses.replace(peak, **{field: factor * getattr(peak, field)})
        for key, peak in hardware.DATASHEET.items()
    }
    monkeypatch.setattr(hardware, "DATASHEET", changed)
    assert claims.CHECKS[name]().verdict == IMPOSSIBLE


def test_the_acceptance_rule_is_summed_up_and_a_wrong_one_is_seen(monkeypatch):
    """A16 must rest on the library's rule: one that accepts everything puts out the draft's distribution."""
    p, q = torch.tensor([0.5, 0.3, 0.2]).double(), torch.tensor([0.2, 0.5, 0.3]).double()
    assert speculation_claims.output_distance(p, q) <= 1 / 400
    monkeypatch.setattr(speculation_claims, "verify", lambda tokens, *_: (1, p))
    assert speculation_claims.output_distance(p, q) == pytest.approx(0.3)  # total variation of p and q
    assert claims.CHECKS["A16"]().verdict == HOLDS


def test_figures_that_a_check_does_not_know_are_refused():
    """A misspelt figure would be ignored, and the verdict would rest on something else."""
    with pytest.raises(KeyError, match="A4 knows no figure 'powers'; expected power, longest"):
        claims.CHECKS["A4"]({"powers": 2.0})
    for bad in (float("nan"), float("inf"), True, "2"):
        with pytest.raises(ValueError, match="A4: power="):
            claims.CHECKS["A4"]({"power": bad})


@pytest.fixture
def own_figures(tmp_path, monkeypatch):
    monkeypatch.setenv("LLM_LATENCY_SCORECARD", str(tmp_path / "card.json"))
    return tmp_path


def test_what_a_notebook_settles_stands_in_the_ledger(own_figures, capsys):
    """The notebook's verdict and the ledger's must come from the same figures."""
    claims.settle("B9", decode_gain=0.9, prefill_gain=2.2)
    assert capsys.readouterr().out.startswith("on this machine: B9 holds under a condition: ")
    claims.settle("B9", decode_gain=2.0)  # a second run replaces that figure and keeps the other
    row = next(row for row in claims.ledger([claims.own()]) if row.id == "B9")
    assert (row.verdict, row.settled_by) == (HOLDS, "here")
    assert "decode 2.00 times" in row.here and "prefill 2.20 times" in row.here
    with pytest.raises(KeyError, match="no claim 'C1'"):
        claims.settle("C1", gain=1.0)
    with pytest.raises(KeyError, match="B9 knows no figure"):
        claims.settle("B9", speed=1.0)


def test_recorded_runs_carry_date_and_machine_and_give_way_to_this_machine(own_figures):
    """A recorded figure must never pass for one measured here."""
    machine = {"cpu": "a chip", "threads": 2, "gpu": None}
    for date, power in (("2026-01-01", 2.0), ("2026-01-02", 0.9)):
        record = {"kind": "claims", "date": date, "machine": machine, "figures": {"A4": {"power": power}}}
        (own_figures / f"{date}-claims.json").write_text(json.dumps(record))
    (own_figures / "other.json").write_text("[1, 2]")
    found = claims.recorded(own_figures)
    assert [entry.date for entry in found] == ["2026-01-01", "2026-01-02"]
    row = next(row for row in claims.ledger(found) if row.id == "A4")
    assert (row.verdict, row.settled_by, row.here) == (CONDITION, "recorded", ())
    assert row.recorded[0].startswith("2026-01-01, a chip, 2 threads: ") and len(row.recorded) == 2
    assert row.cells()[-1] == "holds under a condition (recorded)"
    claims.settle("A4", power=2.0)
    row = next(row for row in claims.ledger([*found, claims.own()]) if row.id == "A4")
    assert (row.verdict, row.settled_by) == (HOLDS, "here")
    with pytest.raises(KeyError, match="unknown claims: Z9"):
        claims.ledger([claims.Findings("x", "y", "z", {"Z9": {}})])


def test_the_ladder_settles_claims_by_its_medians():
    """A ratio turned upside down would make the slower rung win."""
    from test_experiment import a_run, record

    slow = record(scale=9.0, perplexity=20.0, share_of_limit={"prefill": 0.5, "decode": 0.4})
    run = a_run(slow, record("sdpa", scale=8.0), record("half", scale=4.0, perplexity=20.4))
    found = claims.from_ladder(run)
    assert found.values["A2"]["speedup"] == pytest.approx(9 / 4)
    assert found.values["A2"]["perplexity_change"] == pytest.approx(0.02)
    assert found.values["B9"] == pytest.approx({"prefill_gain": 2.0, "decode_gain": 2.0})
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
        record("speculative", scale=0.4, weights="bfloat16", acceptance=0.7, draft_cost=0.2, tokens_per_pass=2.5),
    ]
    found = claims.from_ladder(a_run(*entries)).values
    assert found["B14"] == found["A9"] == pytest.approx({"gain": 1.25, "acceptance": 0.7, "cost_ratio": 0.2})
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
    assert found.values == {"B13": {"prefill_gain": 4.0, "decode_gain": 4.0}} and found.machine == "H200"
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


@pytest.mark.parametrize(
    ("name", "verdict"),
    [
        ("A3", IMPOSSIBLE),
        ("A4", CONDITION),
        ("A8", CONDITION),
        ("B2", CONDITION),
        ("B4", IMPOSSIBLE),
        ("B6", CONDITION),
        ("B16", IMPOSSIBLE),
    ],
)
def test_verdicts_agree_with_the_independent_reading(name, verdict):
    """The verdict of an independent calculation; a change of the code must not change it unseen."""
    assert claims.CHECKS[name]().verdict == verdict


@pytest.mark.parametrize("name", ["A3", "B4", "B16"])
def test_verdicts_change_with_the_machine(name, monkeypatch):
    """A verdict written by hand would stay when the hardware is ten times faster."""
    fast = {
        key: dataclasses.replace(
            peak, bandwidth_gbps=20 * peak.bandwidth_gbps, fp8_tflops=peak.fp8_tflops and 10 * peak.fp8_tflops
        )
        for key, peak in hardware.DATASHEET.items()
    }
    monkeypatch.setattr(hardware, "DATASHEET", fast)
    assert claims.CHECKS[name]().verdict == HOLDS


def test_a_part_below_its_roof_is_impossible(monkeypatch):
    """B2 on a GPU of a tenth of the speed: 46 ms would lie beyond the roof."""
    slow = {
        key: dataclasses.replace(peak, bandwidth_gbps=peak.bandwidth_gbps / 10, bf16_tflops=peak.bf16_tflops / 10)
        for key, peak in hardware.DATASHEET.items()
    }
    monkeypatch.setattr(hardware, "DATASHEET", slow)
    assert claims.CHECKS["B2"]().verdict == IMPOSSIBLE


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
    assert shown.exit_code == 0 and "A16: impossible as stated (arithmetic)" in shown.output
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


def test_the_simulated_clock_flatters():
    """Guards against a simulated device that is waited for: a clock read too early would then flatter nothing.

    By how much depends on how busy the machine is, so no bound but 1 stands here.
    """
    assert simulated_flattery() > 1


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
        assert claims.CHECKS[id](figures).measured
