"""The claims' arithmetic by hand, and verdicts that follow the figures instead of being written down."""

from __future__ import annotations

import dataclasses

import pytest

from llm_latency import claims, hardware
from llm_latency.claims import CONDITION, HOLDS, IMPOSSIBLE
from llm_latency.claims.check import ffn_compute_bound, least_number
from llm_latency.roofline import Peak, gpu_peak


def test_every_check_is_complete_and_carries_its_own_id():
    """A claim under another's id, or without a verdict or arithmetic."""
    for name, check in claims.CHECKS.items():
        result = check()
        assert result.id == name
        assert result.verdict in (HOLDS, CONDITION, IMPOSSIBLE)
        assert result.claim and result.allowed and len(result.arithmetic) >= 2
        assert str(result).startswith(f"{name}: {result.verdict}")


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
    assert claims.check_B2().verdict == IMPOSSIBLE


def test_the_shared_arithmetic_by_hand():
    """A factor of a thousand between ms and s."""
    assert claims.passes_that_fit(80, 6.6) == pytest.approx(12.12, abs=0.01)
    assert claims.implied_bandwidth(13.48e9, 6.2) == pytest.approx(2.174e12, rel=1e-3)
    assert claims.implied_flop_rate(3.5e12, 850) / 312e12 == pytest.approx(0.0132, abs=1e-4)
    # 4 n^2 heads head_dim layers over that plus 2 n times the matrices' parameters, and one head
    linear = 2 * 256 * 32 * (4 * 4096**2 + 3 * 4096 * 11008) + 2 * 32000 * 4096
    square = 4 * 256**2 * 4096 * 32
    assert claims.quadratic_share("llama-2-7b", 256) == pytest.approx(square / (square + linear), rel=1e-12)
    for bad in (0, -1, float("nan")):
        with pytest.raises(ValueError, match="pass_ms"):
            claims.passes_that_fit(80, bad)


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
