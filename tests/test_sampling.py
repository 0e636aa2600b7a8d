"""From logits to tokens."""

from __future__ import annotations

import math

import pytest
import torch
from scipy import stats

from llm_latency.sampling import SamplingRule, check_end, probabilities, sample


def test_temperature_zero_is_one_hot_at_the_first_maximum():
    """Greedy must be a distribution like any other, so that speculative decoding needs no second rule."""
    probs = probabilities(torch.tensor([[1.0, 3.0, 3.0, -5.0]]), temperature=0)
    assert probs.tolist() == [[0, 1, 0, 0]]


def test_token_zero_can_be_chosen():
    """Id 0 once stood for 'nothing'."""
    assert int(sample(torch.tensor([1.0, 0.0, 0.0]))) == 0


def test_closed_forms_of_temperature_top_k_and_top_p():
    """p = (.5, .3, .15, .05): oracles by hand."""
    logits = torch.log(torch.tensor([0.5, 0.3, 0.15, 0.05]))
    torch.testing.assert_close(probabilities(logits, 1.0, top_k=2), torch.tensor([0.625, 0.375, 0, 0]))
    torch.testing.assert_close(probabilities(logits, 1.0, top_p=0.6), torch.tensor([0.625, 0.375, 0, 0]))
    torch.testing.assert_close(probabilities(logits, 1.0, top_p=0.5), torch.tensor([1.0, 0, 0, 0]))
    squared = torch.tensor([0.25, 0.09, 0.0225, 0.0025])
    torch.testing.assert_close(probabilities(logits, 0.5), squared / squared.sum())


@pytest.mark.parametrize("temperature", [1e-6, 1e-5, 1e-3])
def test_low_temperatures_are_greedy(temperature):
    """Guards against a refusal, or NaN from logits that overflow, where a score is divided by next to nothing: large
    scores, a banned token and both filters are among them (cases.md 52)."""
    logits = torch.tensor([[3e4, 2.9e4, -3e4, -math.inf], [-7.0, -8.0, -6.5, -9.0]])
    expected = [[1, 0, 0, 0], [0, 0, 1, 0]]
    assert probabilities(logits, temperature).tolist() == expected
    assert probabilities(logits, temperature, top_k=3, top_p=0.9).tolist() == expected
    rule = SamplingRule(4, temperature=temperature)
    assert [rule.choose(row[None]) for row in logits] == [0, 2]


def test_equally_likely_tokens_under_top_p():
    """Guards against a docstring that says another token is kept: of equals the lower ids, to the mass asked for."""
    assert (probabilities(torch.zeros(4), 1.0, top_p=0.6) > 0).tolist() == [True, True, True, False]


def test_top_k_keeps_ties_and_top_p_keeps_the_best_token():
    """A tiny top_p must not leave an empty set, whose normalisation is NaN."""
    assert probabilities(torch.zeros(5), 1.0, top_p=1e-6).sum() == 1
    assert (probabilities(torch.tensor([2.0, 2.0, 1.0]), 1.0, top_k=1) > 0).tolist() == [True, True, False]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -1.0}, "temperature=-1.0"),
        ({"temperature": math.nan}, "temperature=nan"),
        ({"temperature": 1e-9}, "temperature=1e-09; expected 0 .greedy. or at least 1e-06"),
        ({"top_k": 0}, "top_k=0"),
        ({"top_k": 9}, "top_k=9"),
        ({"top_p": 0.0}, "top_p=0.0"),
        ({"top_p": 1.5}, "top_p=1.5"),
    ],
)
def test_options_out_of_range_are_named(options, message):
    """Each wrong option is told by name and value."""
    with pytest.raises(ValueError, match=message):
        probabilities(torch.zeros(4), **options)


def test_nan_logits_are_refused():
    """NaN compares false with everything and would turn into an arbitrary token."""
    with pytest.raises(ValueError, match="NaN"):
        probabilities(torch.tensor([0.0, math.nan]))


@pytest.mark.parametrize("logits", [[0.0, math.inf], [math.inf, math.inf], [-math.inf, -math.inf]])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_whose_largest_logit_is_infinite_is_refused(logits, temperature):
    """Its softmax is NaN, from which the last token of the vocabulary was drawn; a single -inf is a banned token."""
    with pytest.raises(ValueError, match="infinity"):
        probabilities(torch.tensor([logits]), temperature)
    assert probabilities(torch.tensor([0.0, -math.inf]), 1.0).tolist() == [1.0, 0.0]


@pytest.mark.parametrize("options", [{"temperature": "1"}, {"temperature": None}, {"top_k": True}, {"top_p": "a"}])
def test_options_of_the_wrong_type_are_named(options):
    """`math.isfinite` says only "must be real number", and True passes for a top_k of 1."""
    with pytest.raises(TypeError, match=f"{next(iter(options))}="):
        probabilities(torch.zeros(4), **options)


@pytest.mark.parametrize(("end", "error"), [([2, 3], TypeError), ("2", TypeError), (True, TypeError), (97, ValueError)])
def test_an_end_that_no_token_equals_is_refused(end, error):
    """A list of ids, as some models' generation settings hold, equals no token: the answer never ended."""
    check_end(0, 97)
    check_end(None, 97)
    with pytest.raises(error, match="eos_token_id="):
        check_end(end, 97)


def test_sampling_follows_the_distribution():
    """Chi-square over 20,000 draws; a token of probability 0 never appears; the seed repeats the draw."""
    probs = torch.tensor([0.0, 0.5, 0.0, 0.3, 0.2, 0.0])
    drawn = sample(probs.expand(20_000, -1), torch.Generator().manual_seed(1))
    counts = torch.bincount(drawn, minlength=6)
    assert counts[[0, 2, 5]].tolist() == [0, 0, 0]
    live = [1, 3, 4]
    assert stats.chisquare(counts[live].numpy(), [10_000, 6_000, 4_000]).pvalue > 0.001
    again = sample(probs.expand(20_000, -1), torch.Generator().manual_seed(1))
    assert torch.equal(drawn, again)
    wrong = [9_000, 7_000, 4_000]
    assert stats.chisquare(counts[live].numpy(), wrong).pvalue < 0.001
