"""The regression gate: it lets equal models pass, and stops each of the ways in which an optimisation goes wrong."""

from __future__ import annotations

import copy
import io
import math
import sys
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
import torch
from scipy.stats import chi2_contingency
from typer.testing import CliRunner

from every_millisecond import cli
from every_millisecond.ladder.gate import table
from llm_latency.compat import with_cache
from llm_latency.generation import Stepper, TransformersStepper, generate
from llm_latency.quality import Thresholds, regression_test, standard_cases
from llm_latency.quality.regression import homogeneity_p
from llm_latency.quality.regression_report import CaseResult, RegressionReport
from llm_latency.sampling import probabilities, sample
from llm_latency.speculative import verify
from llm_latency.timing import Comparison


def own_text(model, start: int, tokens: int = 60) -> torch.Tensor:
    """A text that the model itself finds likely, so that whoever differs from it is more surprised."""
    return generate(TransformersStepper(model), torch.tensor([[start, start + 1]]), tokens).sequences


@pytest.fixture
def cases(tiny_llama):
    return {
        "short": own_text(tiny_llama, 5, 10),
        "medium": own_text(tiny_llama, 20, 40),
        "long": own_text(tiny_llama, 40, 90),
        "one token": torch.tensor([7]),
        "repeated": torch.full((1, 20), 9),
    }


def where(report: RegressionReport) -> dict[str, str]:
    """What is wrong, by case."""
    names = dict(report.failures)
    return {name: "; ".join(what for place, what in report.failures if place == name) for name in names}


def test_equal_models_pass(tiny_llama, cases):
    """A gate that stops everything would soon be switched off."""
    report = regression_test(tiny_llama, copy.deepcopy(tiny_llama), cases, exact=True, rounds=1)
    assert report.passed, report.failures
    assert report.agreement == 1.0 and report.mean_kl < 1e-9
    assert report.perplexities[0] == pytest.approx(report.perplexities[1])
    for case in report.cases:
        assert case.same_text == case.new_tokens == 16 and case.times is not None
    assert {case.name: case.positions for case in report.cases}["one token"] == 1
    assert {case.name: case.perplexities for case in report.cases}["one token"] is None


def test_int2_weights_fail(tiny_llama, cases):
    """Two bits a weight lose the model: perplexity, divergence and choices all say so."""
    broken = copy.deepcopy(tiny_llama)
    with torch.no_grad():
        for module in broken.model.layers.modules():
            if isinstance(module, torch.nn.Linear):
                scale = module.weight.abs().amax(dim=1, keepdim=True) / 1.5  # four levels: -1.5, -0.5, 0.5, 1.5
                module.weight.copy_(((module.weight / scale - 0.5).round().clamp(-2, 1) + 0.5) * scale)
    report = regression_test(tiny_llama, broken, cases, rounds=0)
    assert not report.passed
    words = " ".join(what for _, what in report.failures)
    assert "perplexity" in words and "mean KL" in words and "same first choice" in words


class ShiftedStepper(TransformersStepper):
    """Counts a step's position one too far: the classic fault of a cache that was cropped or padded."""

    @torch.inference_mode()
    def step(self, token_ids):
        held = self.cache.get_seq_length()
        positions = torch.arange(held, held + token_ids.shape[1])[None] + 1
        options = dict(input_ids=token_ids, position_ids=positions, use_cache=True)
        return self.model(**options, **with_cache(self.cache)).logits


def test_a_shifted_cache_fails(tiny_llama, cases):
    """Positions off by one in every step: one pass over a text would not show it, since there is no step in one."""
    with torch.no_grad():  # random attention is nearly uniform, and would not notice where a token stands
        for layer in tiny_llama.model.layers:
            for weight in (layer.self_attn.q_proj.weight, layer.self_attn.k_proj.weight, layer.self_attn.o_proj.weight):
                weight.mul_(6.0)
    shifted = ShiftedStepper(tiny_llama)
    shifted_prompt = shifted.prefill(cases["medium"])
    assert torch.equal(shifted_prompt, TransformersStepper(tiny_llama).prefill(cases["medium"]))
    report = regression_test(tiny_llama, shifted, cases, exact=True, rounds=0)
    # The greedy text may survive for a while; the distributions do not.
    assert "where exactness is promised" in where(report)["medium"]
    assert report.mean_kl > 10 * report.thresholds.exact_kl
    assert regression_test(tiny_llama, TransformersStepper(tiny_llama), cases, exact=True, rounds=0).passed


P, Q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.5, 0.3])


class Table(Stepper):
    """A stepper that gives every position the same distribution."""

    device, max_positions = torch.device("cpu"), 64

    def __init__(self, probs: torch.Tensor):
        self.logits, self.vocab_size = probs.log(), probs.numel()

    def prefill(self, input_ids):
        return self.logits[None]

    def step(self, token_ids):
        return self.logits.expand(1, token_ids.shape[1], -1)

    def crop_to(self, length):
        """Nothing is stored."""


class Speculating(Table):
    """A toy speculative decoder over two tables, with a rule of choice: `verify`, or a planted wrong one."""

    def __init__(self, rule):
        super().__init__(P)
        self.rule = rule

    def generate(self, input_ids, max_new_tokens, *, temperature=0.0, generator=None):
        p, q = (probabilities(table.log(), temperature) for table in (P, Q))
        tokens = [int(sample(p, generator))]
        while len(tokens) < max_new_tokens:
            drafted = torch.stack([sample(q, generator) for _ in range(2)])
            uniforms = torch.rand(2, generator=generator)
            accepted, following = self.rule(drafted, q.expand(2, -1), p.expand(3, -1), uniforms)
            tokens += [*drafted[:accepted].tolist(), int(sample(following, generator))]
        new = torch.tensor([tokens[:max_new_tokens]])
        return SimpleNamespace(sequences=torch.cat([input_ids, new], dim=1))


def accept_always(drafted, draft_probs, target_probs, uniforms):
    return len(drafted), target_probs[-1]


def no_residual(drafted, draft_probs, target_probs, uniforms):
    accepted, _ = verify(drafted, draft_probs, target_probs, uniforms)
    return accepted, target_probs[accepted]  # a rejected token is replaced from p, not from max(0, p - q)


@pytest.mark.long
def test_a_wrong_acceptance_rule_fails():
    """Accepting every draft is wrong in greedy text; forgetting the residual only where text is sampled."""
    cases, options = {"any": torch.tensor([[0, 1]])}, dict(rounds=0, exact=True, samples=800)
    assert regression_test(Table(P), Speculating(verify), cases, **options).passed
    careless = regression_test(Table(P), Speculating(accept_always), cases, **options)
    assert "greedy text differs after 1 of 16 tokens" in where(careless)["any"]
    assert "another distribution" in where(careless)["all cases"]
    subtle = regression_test(Table(P), Speculating(no_residual), cases, **options)
    assert list(where(subtle)) == ["all cases"] and "another distribution" in where(subtle)["all cases"]
    assert regression_test(Table(P), Speculating(no_residual), cases, rounds=0, exact=True).passed, "greedy is blind"


def test_divergence_by_hand():
    """KL is from the original to the optimised, in nats, the mean over positions."""
    report = regression_test(Table(P), Table(Q), {"any": torch.tensor([[0, 1, 2]])}, rounds=0)
    expected = 0.5 * math.log(0.5 / 0.2) + 0.3 * math.log(0.3 / 0.5) + 0.2 * math.log(0.2 / 0.3)
    assert report.mean_kl == pytest.approx(expected, rel=1e-5)
    assert report.agreement == 0.0
    # Tokens 1 and 2 are scored, each once.
    assert report.perplexities == pytest.approx(
        [(1 / (p[1] * p[2])) ** 0.5 for p in (P.tolist(), Q.tolist())], rel=1e-5
    )


def test_near_ties_are_no_difference(monkeypatch):
    """In FP32 two kernels may order a near tie differently (cases.md 13); a clear margin may not be crossed."""
    tie = torch.tensor([0.4, 0.4 - 1e-5, 0.2 + 1e-5])
    other = torch.tensor([0.4 - 1e-5, 0.4, 0.2 + 1e-5])
    case = {"any": torch.tensor([[0, 1]])}
    report = regression_test(Table(tie), Table(other), case, rounds=0, exact=True, thresholds=Thresholds(agreement=0))
    assert report.passed and report.cases[0].near_tie
    monkeypatch.setitem(regression_test.__globals__, "NEAR_TIE", 0)
    strict = regression_test(Table(tie), Table(other), case, rounds=0, exact=True, thresholds=Thresholds(agreement=0))
    assert "greedy text differs" in where(strict)["any"]


class Broken(Table):
    """A stepper that spoils its logits, or raises, beyond some number of tokens."""

    def __init__(self, fault):
        super().__init__(P)
        self.fault = fault

    def prefill(self, input_ids):
        return self.fault(super().prefill(input_ids), input_ids.shape[1])


def test_nan_vocabularies_and_empty_cases_are_clear_errors():
    """A test of nothing would pass, NaN compares as no increase, and two vocabularies have nothing to compare."""
    cases = {"any": torch.tensor([[0, 1]])}
    nan = Broken(lambda logits, n: logits * float("nan"))
    with pytest.raises(ValueError, match="case 'any': the optimised model's logits hold NaN"):
        regression_test(Table(P), nan, cases, rounds=0)
    with pytest.raises(ValueError, match="case 'any': the original model's logits hold NaN"):
        regression_test(nan, Table(P), cases, rounds=0)
    with pytest.raises(ValueError, match="the vocabularies differ: 3 and 4"):
        regression_test(Table(P), Table(torch.full((4,), 0.25)), cases)
    with pytest.raises(ValueError, match="no cases"):
        regression_test(Table(P), Table(P), {})
    with pytest.raises(ValueError, match="case 'none' has shape"):
        regression_test(Table(P), Table(P), {"none": torch.zeros(1, 0, dtype=torch.int64)})
    with pytest.raises(ValueError, match="case 'far' holds 3; expected ids from 0 to 2"):
        regression_test(Table(P), Table(P), {"far": torch.tensor([[3]])})
    with pytest.raises(TypeError, match="case 'text' is str"):
        regression_test(Table(P), Table(P), {"text": "hello"})
    with pytest.raises(TypeError, match="model is a int"):
        regression_test(Table(P), 3, cases)


def raise_beyond(limit):
    def fault(logits, n):
        if n > limit:
            raise IndexError(f"index {n} is out of bounds")
        return logits

    return fault


def test_a_case_that_only_the_optimised_model_cannot_do_fails_and_the_others_go_on():
    """The context limit is where static caches break: that is a finding, not a crash of the gate."""
    cases = {"limit": torch.zeros(1, 60, dtype=torch.int64), "short": torch.tensor([[0, 1]])}
    report = regression_test(Table(P), Broken(raise_beyond(20)), cases, rounds=0, new_tokens=4)
    assert where(report) == {"limit": "only the optimised model fails: IndexError: index 28 is out of bounds"}
    assert report.cases[1].positions == 2
    with pytest.raises(ValueError, match="'limit': the original itself cannot do it"):
        regression_test(Broken(raise_beyond(20)), Table(P), cases, rounds=0, new_tokens=4)
    too_long = {"beyond": torch.zeros(1, 62, dtype=torch.int64)}
    with pytest.raises(ValueError, match="need 66 positions"):
        regression_test(Table(P), Table(P), too_long, rounds=0, new_tokens=4)


def report_of(*cases: CaseResult, **options) -> RegressionReport:
    thresholds = options.pop("thresholds", Thresholds())
    return RegressionReport(cases, thresholds, options.get("exact", False))


def test_no_odd_text_decides_an_average():
    """A text that no model would write costs thousands in perplexity: pooled, it failed sound weights or hid bad."""
    sound = CaseResult("short", 32, 32, losses=(120.0, 120.1), kl=0.1, same_first=32)
    odd = CaseResult("one token, repeated", 48, 32, losses=(260.0, 263.5), kl=0.2, same_first=32)
    assert odd.perplexities[0] > Thresholds().unlikely and odd.perplexities[1] > 1.1 * odd.perplexities[0]
    assert report_of(sound, odd).failures == []
    spoilt = CaseResult("long", 768, 32, losses=(80.0, 82.0), kl=0.2, same_first=32)
    assert [name for name, _ in report_of(sound, odd, spoilt).failures] == ["long"]
    assert "+6.66%" in report_of(spoilt).failures[0][1], "with its digits"
    divergent = CaseResult("one token, repeated", 48, 32, losses=(260.0, 260.0), kl=6.4, same_first=32)
    assert "mean KL 0.2" in report_of(sound, divergent).failures[0][1], "its distribution is judged all the same"


def test_perplexity_counts_each_token_once():
    """A mean over cases would let a short case hide what a long one lost (cases.md 24)."""
    short = CaseResult("short", 2, positions=2, losses=(3.0, 3.0))
    long = CaseResult("long", 4, positions=4, losses=(3.0, 6.0))
    assert report_of(short, long).perplexities == pytest.approx((math.exp(6 / 4), math.exp(9 / 4)))
    assert all(math.isnan(value) for value in report_of(CaseResult("one", 1, positions=1)).perplexities)


def test_time_is_judged_only_where_asked():
    """A gate that fails because a neighbour compiled something would be flaky."""
    times = Comparison({"original": (10.0, 12.0), "optimised": (20.0, 24.0)}, {}, "a clock")
    case = CaseResult("any", 2, positions=1, same_first=1, times=times)
    assert report_of(case).failures == []
    ((name, what),) = report_of(case, thresholds=Thresholds(speedup=1.0)).failures
    assert name == "any" and what.startswith("speed-up 0.50 times")
    assert report_of(case, thresholds=Thresholds(speedup=0.5)).failures == []


@pytest.mark.parametrize(
    "wrong", [{"kl": -1}, {"agreement": 1.5}, {"perplexity_increase": float("nan")}, {"p_value": "x"}]
)
def test_thresholds_that_judge_nothing_are_refused(wrong):
    """NaN as a limit would let everything pass."""
    with pytest.raises((ValueError, TypeError), match=next(iter(wrong))):
        Thresholds(**wrong)


def test_junit_says_which_case_failed():
    """A CI shows the case by its name, and the number of failures must be right."""
    good = CaseResult("good", 2, positions=1, same_first=1)
    bad = CaseResult("bad", 2, error="IndexError: 3")
    report = report_of(good, bad)
    suite = ElementTree.fromstring(report.junit())
    assert suite.get("tests") == "3" and suite.get("failures") == "1"
    failed = [test.get("name") for test in suite if test.find("failure") is not None]
    assert failed == ["bad"]


def test_a_report_holds_what_an_error_may_quote():
    """Fault (case 46): a terminal's colours or a lone surrogate in an error make the JUnit file unreadable; brackets in
    it, or in a case's name, vanish as markup."""
    from rich.console import Console

    bad = CaseResult("[red]", 2, error="IndexError: \x1b[31m\x00 [bold] \udc80 é\t")
    failure = ElementTree.fromstring(report_of(bad).junit().encode()).find(".//failure")
    assert failure.text.endswith(r"IndexError: \x1b[31m\x00 [bold] \udc80 é" + "\t")
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(table(report_of(CaseResult("[red]", 2, error="IndexError: [bold]"))))
    shown = console.export_text()
    assert "[red]" in shown and "[bold]" in shown


def test_the_table_tells_the_verdict(tiny_llama, cases, capsys):
    """What is printed must carry the failure's own words."""
    from rich.console import Console

    report = regression_test(Table(P), Table(Q), {"any": torch.tensor([[0, 1, 2]])}, rounds=1)
    Console(width=200).print(table(report))
    shown = capsys.readouterr().out
    assert "FAILED: over all cases mean KL" in shown and "perplexity" in shown and "0 of 3" in shown


def test_the_two_sample_test_agrees_with_scipy():
    """A wrong number of degrees of freedom would make it blind or hysterical."""
    first, second = [0] * 50 + [1] * 30 + [2] * 20, [0] * 20 + [1] * 50 + [2] * 30
    expected = chi2_contingency([[50, 30, 20], [20, 50, 30]], correction=False).pvalue
    assert homogeneity_p(first, second) == pytest.approx(expected, rel=1e-9)
    assert homogeneity_p(first, list(reversed(first))) == pytest.approx(1.0)
    assert homogeneity_p([0] * 9, [0] * 9) == 1.0
    rare = [0] * 100 + list(range(1, 40))  # forty values seen once are one cell, not forty
    assert homogeneity_p(rare, [0] * 100 + list(range(100, 139))) == pytest.approx(1.0)
    with pytest.raises(ValueError, match="samples of 0 and 9"):
        homogeneity_p([], [0] * 9)


def test_standard_cases_hold_the_edges(tokenizer):
    """The limit is met exactly: one token fewer would not test it, one more does not fit."""
    cases = standard_cases(tokenizer, 512, new_tokens=16)
    assert {name: ids.shape[1] for name, ids in cases.items()} == {
        "short": 32, "medium": 256, "one token": 1, "one token, repeated": 48, "at the context limit": 496,
    }  # fmt: skip
    assert len(set(cases["one token, repeated"][0].tolist())) == 1
    assert "at the context limit" not in standard_cases(tokenizer, 8192)
    assert list(standard_cases(tokenizer, 20, new_tokens=16)) == ["one token", "at the context limit"]
    with pytest.raises(ValueError, match="max_positions=16"):
        standard_cases(tokenizer, 16, new_tokens=16)


def test_a_tokenizer_that_makes_nothing_ends():
    """Fault (case 40): no tokens, doubled until there are enough, is an endless loop."""
    with pytest.raises(ValueError, match="makes 0 tokens"):
        standard_cases(lambda text, **_: {"input_ids": []}, 512)


def test_comparing_samples_says_what_to_install(monkeypatch):
    """Fault: a plain ModuleNotFoundError from a package that does not need scipy otherwise."""
    monkeypatch.setitem(sys.modules, "scipy.stats", None)
    with pytest.raises(ImportError, match="pip install scipy"):
        homogeneity_p([0] * 50 + [1] * 50, [0] * 50 + [1] * 50)


@pytest.mark.long
def test_the_command_line_gate(tiny_directory, tmp_path):
    """Exit code, JUnit file and table from one command; a rung that is no rung is one sentence."""
    arguments = ["regress", "--model", tiny_directory, "--rounds", "0"]
    junit = tmp_path / "report.xml"
    result = CliRunner().invoke(cli.app, [*arguments, "--rung", "sdpa", "--junit", str(junit)])
    assert result.exit_code == 0, result.output
    assert "PASSED" in result.output and "at the context limit" in result.output
    assert ElementTree.parse(junit).getroot().get("failures") == "0"
    strict = CliRunner().invoke(cli.app, [*arguments, "--rung", "half-alone", "--kl", "0"])
    assert strict.exit_code == 1 and "mean KL" in " ".join(strict.stderr.split())
    wrong = CliRunner().invoke(cli.app, [*arguments, "--rung", "warp"])
    assert wrong.exit_code == 1 and "unknown rung 'warp'" in " ".join(wrong.stderr.split())
