"""The acceptance rule: closed forms, its distribution, and what it refuses."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from properties import property_settings
from speculative_toys import chi_square_p
from torch import Tensor

from llm_latency.sampling import probabilities, sample
from llm_latency.speculative import acceptance_probability, residual, verify, verify_greedy

P, Q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.5, 0.3])
CYCLES = 8_000
LEVEL = 0.001


def one(token: int, u: float, p: Tensor = P, q: Tensor = Q) -> tuple[int, list[float]]:
    """Verify a single drafted token; the row after it is certain to give token 2."""
    after = torch.tensor([0.0, 0.0, 1.0])
    accepted, next_probs = verify(torch.tensor([token]), q[None], torch.stack([p, after]), torch.tensor([u]))
    return accepted, next_probs.tolist()


def test_closed_form_of_case_8():
    """p = (.5, .3, .2), q = (.2, .5, .3): guards against q / p, a residual of p, and a bonus from the wrong row."""
    assert one(0, 0.999) == (1, [0, 0, 1])  # p > q: always accepted
    assert one(1, 0.59) == (1, [0, 0, 1]) and one(2, 0.66) == (1, [0, 0, 1])
    for token, u in ((1, 0.61), (2, 0.67)):
        accepted, next_probs = one(token, u)
        assert accepted == 0 and next_probs == pytest.approx([1, 0, 0])
    assert float(acceptance_probability(P, Q)) == pytest.approx(0.7)
    torch.testing.assert_close(residual(P, Q), torch.tensor([1.0, 0.0, 0.0]))


def test_the_residual_is_that_of_the_first_rejection():
    """Guards against a residual of the last row, and against accepting what stands behind a rejection."""
    q = torch.tensor([[0.5, 0.5], [0.9, 0.1], [0.5, 0.5]])
    p = torch.tensor([[0.5, 0.5], [0.2, 0.8], [0.5, 0.5], [1.0, 0.0]])
    accepted, next_probs = verify(torch.tensor([1, 0, 1]), q, p, torch.tensor([0.1, 0.99, 0.1]))
    assert accepted == 1 and next_probs.tolist() == pytest.approx([0, 1])


def test_what_the_target_rules_out_is_never_accepted():
    """A uniform of exactly 0 must not let through a token of probability 0; nor may token id 0 be special (case 14)."""
    accepted, next_probs = one(0, 0.0, p=torch.tensor([0.0, 0.4, 0.6]))
    assert accepted == 0 and next_probs[0] == 0
    assert one(0, 0.0, p=torch.tensor([1.0, 0, 0]), q=torch.tensor([1.0, 0, 0]))[0] == 1


def test_equal_distributions_accept_everything():
    """Draft = target: a strict comparison gone wrong would reject now and then, and p = q leaves no residual."""
    for seed in range(50):
        probs = torch.rand(6, 9, generator=torch.Generator().manual_seed(seed)).softmax(-1)
        tokens = sample(probs[:5], torch.Generator().manual_seed(seed))
        accepted, next_probs = verify(tokens, probs[:5], probs, torch.rand(5))
        assert accepted == 5 and torch.equal(next_probs, probs[5])
    torch.testing.assert_close(residual(P, P), P)
    assert not residual(P, P + 1e-8).isnan().any()


def test_no_draft_is_a_plain_step():
    """gamma 0: the target's own distribution, not an error."""
    accepted, next_probs = verify(torch.empty(0, dtype=torch.int64), torch.empty(0, 3), P[None], torch.empty(0))
    assert accepted == 0 and torch.equal(next_probs, P)


@given(st.integers(0, 2**31), st.integers(0, 5), st.integers(1, 7))
@property_settings(60)
def test_the_greedy_shortcut_is_the_same_rule(seed, gamma, vocab):
    """At temperature 0 the decoder compares ids: this must be `verify` on one-hot distributions."""
    numbers = torch.Generator().manual_seed(seed)
    target_logits = torch.randn(gamma + 1, vocab, generator=numbers)
    draft_logits = torch.where(
        torch.rand(gamma, 1, generator=numbers) < 0.5, target_logits[:gamma], -target_logits[:gamma]
    )
    target, draft = probabilities(target_logits, 0), probabilities(draft_logits, 0)
    tokens = draft.argmax(-1)
    accepted, next_probs = verify(tokens, draft, target, torch.rand(gamma, generator=numbers))
    assert (accepted, int(next_probs.argmax())) == verify_greedy(tokens, target.argmax(-1))
    assert float(next_probs.max()) == 1


@given(st.integers(0, 2**31), st.integers(1, 4), st.integers(2, 30))
@property_settings(60)
def test_next_probs_is_a_distribution_inside_the_targets(seed, gamma, vocab):
    """Guards against a residual that does not sum to 1, or gives mass to what the target rules out."""
    numbers = torch.Generator().manual_seed(seed)
    rows = probabilities(3 * torch.randn(2 * gamma + 1, vocab, generator=numbers), 1.0, top_k=1 + vocab // 2)
    p, q = rows[: gamma + 1], rows[gamma + 1 :]
    accepted, next_probs = verify(sample(q, numbers), q, p, torch.rand(gamma, generator=numbers))
    assert 0 <= accepted <= gamma
    assert float(next_probs.sum()) == pytest.approx(1, abs=1e-5) and float(next_probs.min()) >= 0
    assert float(next_probs[p[accepted] == 0].sum()) == 0


# -- the distribution of the output -------------------------------------------------------------------------------


def output_p_value(rule, p: Tensor, q: Tensor, sampled_from: Tensor | None = None) -> float:
    """Run CYCLES cycles and compare what stands at every position with the target's row there.

    p: [gamma + 1, vocab]; q: [gamma, vocab], what the rule is told; sampled_from: what the tokens really come from.
    """
    gamma, vocab = q.shape
    numbers = torch.Generator().manual_seed(7)
    drafts = sample((q if sampled_from is None else sampled_from).expand(CYCLES, gamma, vocab), numbers)
    uniforms = torch.rand(CYCLES, gamma, generator=numbers)
    rows, stopped = [], []
    for tokens, u in zip(drafts, uniforms, strict=True):
        accepted, next_probs = rule(tokens, q, p, u)
        rows.append(next_probs)
        stopped.append(accepted)
    stopped = torch.tensor(stopped)
    following = sample(torch.stack(rows), numbers)  # [CYCLES]
    counts = torch.zeros(gamma + 1, vocab)
    for i in range(gamma):
        counts[i] += torch.bincount(drafts[stopped > i, i], minlength=vocab)
    for i in range(gamma + 1):
        counts[i] += torch.bincount(following[stopped == i], minlength=vocab)
    return chi_square_p(counts, p)


def random_rows(seed: int, gamma: int, vocab: int) -> tuple[Tensor, Tensor]:
    numbers = torch.Generator().manual_seed(seed)
    p, q = (torch.randn(gamma + 1, vocab, generator=numbers).softmax(-1) for _ in "pq")
    return p, q[:gamma]


@pytest.mark.parametrize(
    ("seed", "gamma", "vocab"), [(1, 1, 5), pytest.param(2, 2, 7, marks=pytest.mark.long), (3, 3, 4)]
)
def test_the_output_is_distributed_as_the_targets(seed, gamma, vocab):
    """Lossless: over 8,000 cycles every position follows the target's distribution, whatever the draft's is."""
    assert output_p_value(verify, *random_rows(seed, gamma, vocab)) > LEVEL


def residual_is_the_target(tokens, q, p, uniforms):
    accepted, _ = verify(tokens, q, p, uniforms)
    return accepted, p[accepted]


def forgets_to_divide_by_q(tokens, q, p, uniforms):
    rows = torch.arange(len(tokens))
    accepted = int((uniforms < p[rows, tokens]).long().cumprod(0).sum())
    return accepted, p[-1] if accepted == len(tokens) else residual(p[accepted], q[accepted])


def accepts_by_agreement(tokens, q, p, uniforms):
    """Accept what is likelier under the target, else reject: a rule that looks plausible and needs no uniforms."""
    rows = torch.arange(len(tokens))
    accepted = int((p[rows, tokens] >= q[rows, tokens]).long().cumprod(0).sum())
    return accepted, p[-1] if accepted == len(tokens) else residual(p[accepted], q[accepted])


@pytest.mark.parametrize("wrong", [residual_is_the_target, forgets_to_divide_by_q, accepts_by_agreement])
def test_wrong_rules_are_found_out(wrong):
    """A test of a distribution that no wrong rule fails would prove nothing."""
    assert output_p_value(wrong, *random_rows(1, 1, 5)) < LEVEL


def test_a_draft_whose_distribution_is_not_the_one_sampled_from_is_found_out():
    """Case 8: told the unfiltered softmax of a draft that samples at temperature 0.5, the rule bends the output."""
    p, q = random_rows(2, 2, 7)
    sharper = q**2 / (q**2).sum(-1, keepdim=True)
    assert output_p_value(verify, p, q, sampled_from=sharper) < LEVEL


# -- what it refuses ----------------------------------------------------------------------------------------------


def arguments(**changes) -> dict:
    p, q = random_rows(5, 2, 4)
    return (
        dict(draft_tokens=torch.tensor([1, 3]), draft_probs=q, target_probs=p, uniforms=torch.tensor([0.5, 0.5]))
        | changes
    )


def spoiled(probs: Tensor, value: float) -> Tensor:
    probs = probs.clone()
    probs[-1, 2] = value
    return probs


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (dict(draft_tokens=[1, 3]), TypeError, "draft_tokens is a list"),
        (dict(draft_tokens=torch.tensor([1.0, 3.0])), TypeError, "draft_tokens is torch.float32"),
        (dict(uniforms=torch.tensor([0, 1])), TypeError, "uniforms is torch.int64"),
        (dict(draft_tokens=torch.tensor([[1, 3]])), ValueError, r"got \[1, 2\]"),
        (dict(draft_probs=torch.full((3, 4), 0.25)), ValueError, r"draft_probs has shape \[3, 4\]; expected \[2, 4\]"),
        (dict(draft_probs=torch.full((2, 5), 0.2)), ValueError, r"draft_probs has shape \[2, 5\]; expected \[2, 4\]"),
        (dict(target_probs=torch.full((2, 4), 0.25)), ValueError, r"target_probs has shape .* expected \[3, 4\]"),
        (dict(uniforms=torch.rand(3)), ValueError, r"uniforms has shape \[3\]"),
        (dict(draft_tokens=torch.tensor([1, 4])), ValueError, "draft_tokens holds .1, 4.; expected ids from 0 to 3"),
        (dict(draft_tokens=torch.tensor([-1, 2])), ValueError, "draft_tokens holds .-1, 2."),
        (dict(target_probs=torch.randn(3, 4) * 5), ValueError, "a row of target_probs .* it sums to"),
        (dict(uniforms=torch.tensor([0.5, math.nan])), ValueError, "uniforms holds nan"),
        (dict(uniforms=torch.tensor([0.5, 1.5])), ValueError, "uniforms holds 1.5"),
        (dict(draft_probs=torch.tensor([[0.5, 0, 0.5, 0]] * 2)), ValueError, "draft token 1 has probability 0"),
        (dict(draft_probs=torch.tensor([[0.5, 0.7, 0.3, -0.5]] * 2)), ValueError, "draft_probs holds -0.5"),
    ],
)
def test_arguments_that_make_no_sense_are_named(changes, error, message):
    """Guards against broadcasting a wrong shape, logits taken for probabilities, and ids that wrap around."""
    with pytest.raises(error, match=message):
        verify(**arguments(**changes))


@pytest.mark.parametrize("name", ["draft_probs", "target_probs"])
def test_nan_is_refused(name):
    """NaN compares false with everything: it would silently reject, or accept, and then poison the next token."""
    with pytest.raises(ValueError, match=f"a row of {name} holds NaN .* sums to nan"):
        verify(**arguments(**{name: spoiled(arguments()[name], math.nan)}))


def test_arguments_are_left_as_they_were():
    """Pure: a caller's distributions must not change under it."""
    given_arguments = arguments()
    before = {name: value.clone() for name, value in given_arguments.items()}
    verify(**given_arguments)
    assert all(torch.equal(before[name], given_arguments[name]) for name in before)
