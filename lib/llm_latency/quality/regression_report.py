"""What a regression test found: case by case, the verdict, and the forms in which people and machines read it."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, fields
from xml.etree import ElementTree

from llm_latency.arguments import check_number
from llm_latency.quality.perplexity import exponential
from llm_latency.timing import Comparison

ORIGINAL, OPTIMISED = "original", "optimised"
ALL = "all cases"
# What XML 1.0 cannot hold, escaped or not: a model's error may quote a terminal's colours.
NOT_XML = re.compile("[^\\t\\n\\r\\x20-\\ud7ff\\ue000-\\ufffd\\U00010000-\\U0010ffff]")


@dataclass(frozen=True, slots=True)
class Thresholds:
    """The most that an optimisation may cost.

    Case by case: perplexity_increase, relative, 0.05 is 5%; kl, the mean over the case's positions, in nats; exact_kl,
    the same where exactness is promised, which leaves room for rounding alone. unlikely: from this perplexity of the
    original on, a text is one that the model would never write, and perplexity says nothing of its answers: such a case
    is judged by its distributions alone.

    Over all cases: agreement, the least share of positions at which both put the same token first; p_value, the least
    p of the sampling test. speedup: least median speed-up of a case, or None: time is shown and decides nothing.
    """

    perplexity_increase: float = 0.05
    kl: float = 0.1
    exact_kl: float = 1e-4
    agreement: float = 0.9
    unlikely: float = 1000.0
    speedup: float | None = None
    p_value: float = 1e-4

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is None and field.name == "speedup":
                continue
            check_number(field.name, value, least=0, most=1 if field.name == "agreement" else math.inf)


@dataclass(frozen=True, slots=True)
class CaseResult:
    """One case. tokens: of its prompt. positions: compared. losses: summed negative log-likelihood of the scored
    tokens, original and optimised. kl: summed, in nats. same_first: positions with the same first choice.

    same_text: leading new tokens that are equal, of new_tokens; near_tie: the first different one was a near tie in the
    original. times: None if not timed. error: what the optimised raised, where the original did not.
    """

    name: str
    tokens: int
    positions: int = 0
    losses: tuple[float, float] = (0.0, 0.0)
    kl: float = 0.0
    same_first: int = 0
    same_text: int = 0
    new_tokens: int = 0
    near_tie: bool = False
    times: Comparison | None = None
    error: str = ""

    @property
    def text_is_exact(self) -> bool:
        """The greedy text is the original's, or leaves it at a near tie."""
        return self.same_text == self.new_tokens or self.near_tie

    @property
    def perplexities(self) -> tuple[float, float] | None:
        """Original and optimised over this case's scored tokens; None for a prompt of one token, which scores none."""
        if self.positions < 2:
            return None
        return tuple(exponential(loss / (self.positions - 1)) for loss in self.losses)

    @property
    def mean_kl(self) -> float:
        """Mean over this case's positions, in nats, original from optimised."""
        return self.kl / max(1, self.positions)


@dataclass(frozen=True, slots=True)
class RegressionReport:
    """The verdict over all cases. exact: exactness was promised. sampling_p: None if nothing was drawn."""

    cases: tuple[CaseResult, ...]
    thresholds: Thresholds
    exact: bool
    sampling_p: float | None = None

    @property
    def failures(self) -> list[tuple[str, str]]:
        """(case or "all cases", what is wrong) for each limit that was missed; empty if the optimisation passes."""
        limits, found = self.thresholds, []
        kl, why = (limits.exact_kl, " where exactness is promised") if self.exact else (limits.kl, "")
        for case in self.cases:
            if case.error:
                found.append((case.name, f"only the optimised model fails: {case.error}"))
                continue
            if self.exact and not case.text_is_exact:
                found.append((case.name, f"the greedy text differs after {case.same_text} of {case.new_tokens} tokens"))
            if limits.speedup is not None and case.times is not None:
                ratio = case.times.speedup(OPTIMISED, ORIGINAL)
                if ratio.median < limits.speedup:
                    found.append((case.name, f"speed-up {ratio}; expected at least {limits.speedup:g} times"))
            before, after = case.perplexities or (1.0, 1.0)
            if before < limits.unlikely and after > before * (1 + limits.perplexity_increase):
                found.append(
                    (case.name, f"perplexity {before:.4g} to {after:.4g}, {after / before - 1:+.2%}; at most "
                                f"{limits.perplexity_increase:+.2%} is allowed")
                )  # fmt: skip
            if case.mean_kl > kl:
                found.append((case.name, f"mean KL {case.mean_kl:.2g} nats; at most {kl:g} is allowed{why}"))
        if self.agreement < limits.agreement:
            found.append(
                (ALL, f"same first choice at {self.agreement:.1%}; at least {limits.agreement:.1%} is expected")
            )
        if self.sampling_p is not None and self.sampling_p < limits.p_value:
            found.append(
                (ALL, f"sampled text has another distribution: p {self.sampling_p:.1e}; at least {limits.p_value:g}")
            )
        return found

    @property
    def passed(self) -> bool:
        return not self.failures

    @property
    def perplexities(self) -> tuple[float, float]:
        """Original and optimised, over the scored tokens of all cases: each token counts once. NaN without any."""
        scored = sum(max(0, case.positions - 1) for case in self.cases)
        if not scored:
            return math.nan, math.nan
        return tuple(exponential(sum(case.losses[i] for case in self.cases) / scored) for i in range(2))

    @property
    def mean_kl(self) -> float:
        """Mean over all positions compared, in nats, original from optimised."""
        return sum(case.kl for case in self.cases) / max(1, sum(case.positions for case in self.cases))

    @property
    def agreement(self) -> float:
        """Share of all positions with the same first choice."""
        return sum(case.same_first for case in self.cases) / max(1, sum(case.positions for case in self.cases))

    def junit(self) -> str:
        """The report as JUnit XML: one test per case, and one for all cases together."""
        names = [case.name for case in self.cases] + [ALL]
        failed = {where for where, _ in self.failures}
        suite = ElementTree.Element(
            "testsuite", name="llm-latency regress", tests=str(len(names)), failures=str(len(failed)), errors="0"
        )
        for name in names:
            test = ElementTree.SubElement(suite, "testcase", classname="regression", name=_legal(name))
            wrong = [_legal(what) for where, what in self.failures if where == name]
            if wrong:
                ElementTree.SubElement(test, "failure", message=wrong[0]).text = "\n".join(wrong)
        ElementTree.indent(suite)
        return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True)


def _legal(text: str) -> str:
    """The text with every character that XML cannot hold spelt out."""
    return NOT_XML.sub(lambda match: match[0].encode("unicode_escape").decode(), text)
