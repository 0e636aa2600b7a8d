"""LatencyBreakdown: its figures by hand, what is undefined, what is refused."""

from __future__ import annotations

import math

import pytest

from llm_latency.timing import LatencyBreakdown

GOOD = dict(
    tokenize_ms=20.0,
    prefill_ms=80.0,
    decode_ms=40.0,
    detokenize_ms=5.0,
    total_ms=150.0,
    prompt_tokens=256,
    tokens_generated=5,
)


def test_figures_by_hand():
    """Guards against decode time spread over the first token, which prefill made: 10 ms, not 8 or 28 (case 23)."""
    breakdown = LatencyBreakdown(**GOOD)
    assert breakdown.time_to_first_token_ms == 100
    assert breakdown.time_per_output_token_ms == 10
    assert breakdown.tokens_per_second == pytest.approx(5 / 0.150)
    assert breakdown.unaccounted_ms == pytest.approx(5)
    assert breakdown.stages_ms == {"tokenise": 20, "prefill": 80, "decode": 40, "detokenise": 5}


def test_one_token_has_no_time_per_output_token():
    """Guards against 0 or inf where no interval between tokens was seen (case 23)."""
    breakdown = LatencyBreakdown(**{**GOOD, "tokens_generated": 1, "decode_ms": 0.0})
    assert breakdown.time_per_output_token_ms is None
    assert breakdown.time_to_first_token_ms == 100
    assert "time per output token  undefined" in breakdown.report()


def test_no_token_has_no_first_one():
    """Guards against a time to a first token that never came."""
    breakdown = LatencyBreakdown(**{**GOOD, "tokens_generated": 0})
    assert breakdown.time_to_first_token_ms is None
    assert breakdown.time_per_output_token_ms is None
    assert breakdown.tokens_per_second == 0


def test_report_shows_time_and_share_of_each_stage():
    """Guards against a report whose shares do not belong to its times."""
    report = LatencyBreakdown(**GOOD).report()
    lines = {line.split()[0]: line.split()[1:] for line in report.splitlines()}
    assert lines["tokenise"] == ["20.00", "ms", "13.3", "%"]
    assert lines["prefill"] == ["80.00", "ms", "53.3", "%"]
    assert lines["decode"] == ["40.00", "ms", "26.7", "%"]
    assert lines["detokenise"] == ["5.00", "ms", "3.3", "%"]
    assert lines["unaccounted"] == ["5.00", "ms", "3.3", "%"]
    assert lines["total"] == ["150.00", "ms", "100.0", "%"]
    assert "256 tokens in, 5 out, 33.3 tok/s" in report
    assert str(LatencyBreakdown(**GOOD)) == report


@pytest.mark.parametrize("name", ["tokenize_ms", "prefill_ms", "decode_ms", "detokenize_ms", "total_ms"])
@pytest.mark.parametrize("value", [-0.001, math.nan, math.inf])
def test_impossible_times_are_named(name, value):
    """Guards against a negative or missing time that hides in a sum."""
    with pytest.raises(ValueError, match=f"{name}={value}"):
        LatencyBreakdown(**{**GOOD, name: value})


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("decode_ms", "40", TypeError),
        ("decode_ms", None, TypeError),
        ("prefill_ms", True, TypeError),
        ("total_ms", 0.0, ValueError),
        ("prompt_tokens", 0, ValueError),
        ("prompt_tokens", 2.5, TypeError),
        ("tokens_generated", -1, ValueError),
        ("tokens_generated", 5.0, TypeError),
    ],
)
def test_wrong_arguments_are_named(name, value, error):
    """Guards against token counts that are no counts, and times that are no numbers."""
    with pytest.raises(error, match=name):
        LatencyBreakdown(**{**GOOD, name: value})


def test_stages_cannot_exceed_the_total():
    """Guards against stages that overlap, or a total taken of something else; two clocks may differ a little."""
    with pytest.raises(ValueError, match=r"add up to 145\.000 ms, more than total_ms 100\.000"):
        LatencyBreakdown(**{**GOOD, "total_ms": 100.0})
    assert LatencyBreakdown(**{**GOOD, "total_ms": 144.9}).unaccounted_ms == pytest.approx(-0.1)
