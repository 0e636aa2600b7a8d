"""What a regression test found: case by case, the verdict, and the forms in which people and machines read it."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from xml.etree import ElementTree

from rich.markup import escape
from rich.table import Table

from llm_latency.timing import Comparison

ORIGINAL, OPTIMISED = "original", "optimised"


@dataclass(frozen=True, slots=True)
class Thresholds:
    """The most that an optimisation may cost, over all cases together.

    perplexity_increase: relative, 0.05 is 5%. kl: mean over positions, in nats; exact_kl: the same where exactness is
    promised, which leaves room for rounding alone. agreement: least share of positions at which both put the same token
    first. speedup: least median speed-up of a case, or None: time is shown and decides
    nothing. p_value: least p of the sampling test.
    """

    perplexity_increase: float = 0.05
    kl: float = 0.1
    exact_kl: float = 1e-4
    agreement: float = 0.9
    speedup: float | None = None
    p_value: float = 1e-4

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is None and field.name == "speedup":
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
                raise ValueError(f"{field.name}={value!r}; expected a number of at least 0")
        if self.agreement > 1:
            raise ValueError(f"agreement={self.agreement}; expected a share, at most 1")


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
        return tuple(_exp(loss / (self.positions - 1)) for loss in self.losses)


def _exp(mean: float) -> float:
    try:
        return math.exp(mean)
    except OverflowError:
        return math.inf


@dataclass(frozen=True, slots=True)
class RegressionReport:
    """The verdict. failures: (case or "all cases", what is wrong), empty if the optimisation passes."""

    cases: tuple[CaseResult, ...]
    thresholds: Thresholds
    exact: bool
    sampling_p: float | None
    failures: tuple[tuple[str, str], ...]

    @property
    def passed(self) -> bool:
        return not self.failures

    @property
    def exit_code(self) -> int:
        """0 if passed, else 1."""
        return int(not self.passed)

    @property
    def perplexities(self) -> tuple[float, float]:
        """Original and optimised, over the scored tokens of all cases: each token counts once. NaN without any."""
        scored = sum(max(0, case.positions - 1) for case in self.cases)
        if not scored:
            return math.nan, math.nan
        return tuple(_exp(sum(case.losses[i] for case in self.cases) / scored) for i in range(2))

    @property
    def mean_kl(self) -> float:
        """Mean over all positions compared, in nats, original from optimised."""
        return sum(case.kl for case in self.cases) / max(1, sum(case.positions for case in self.cases))

    @property
    def agreement(self) -> float:
        """Share of all positions with the same first choice."""
        return sum(case.same_first for case in self.cases) / max(1, sum(case.positions for case in self.cases))

    def table(self) -> Table:
        """The cases as a rich table, the verdict as its caption."""
        before, after = self.perplexities
        caption = (
            f"{'PASSED' if self.passed else 'FAILED'}: perplexity {before:.3f} to {after:.3f}, "
            f"mean KL {self.mean_kl:.1e} nats, same first choice {self.agreement:.1%}"
        )
        if self.sampling_p is not None:
            caption += f", sampling p {self.sampling_p:.2g}"
        shown = Table(title="Regression test", caption=caption, title_justify="left", caption_justify="left")
        for header in (
            "case",
            "tokens",
            "perplexity",
            "mean KL",
            "same first",
            "same text",
            "ms",
            "speed-up",
            "verdict",
        ):
            shown.add_column(header, justify="left" if header == "case" else "right")
        for case in self.cases:
            shown.add_row(*self._cells(case))
        return shown

    def _cells(self, case: CaseResult) -> list[str]:
        wrong = [what for where, what in self.failures if where == case.name]
        verdict = escape("; ".join(wrong)) if wrong else "passed"
        if case.error:
            return [case.name, str(case.tokens), "", "", "", "", "", "", verdict]
        both = case.perplexities
        time, ratio = "-", "-"
        if case.times is not None:
            ms = case.times.median_ms
            time = f"{ms[ORIGINAL]:.0f} to {ms[OPTIMISED]:.0f}"
            ratio = str(case.times.speedup(OPTIMISED, ORIGINAL))
        return [
            case.name,
            str(case.tokens),
            "-" if both is None else f"{both[0]:.2f} to {both[1]:.2f}",
            f"{case.kl / case.positions:.1e}",
            f"{case.same_first} of {case.positions}",
            f"{case.same_text} of {case.new_tokens}" + (", a near tie" if case.near_tie else ""),
            time,
            ratio,
            verdict,
        ]

    def junit(self) -> str:
        """The report as JUnit XML: one test per case, and one for all cases together."""
        names = [case.name for case in self.cases] + ["all cases"]
        failed = {where for where, _ in self.failures}
        suite = ElementTree.Element(
            "testsuite", name="llm-latency regress", tests=str(len(names)), failures=str(len(failed)), errors="0"
        )
        for name in names:
            test = ElementTree.SubElement(suite, "testcase", classname="regression", name=name)
            wrong = [what for where, what in self.failures if where == name]
            if wrong:
                ElementTree.SubElement(test, "failure", message=wrong[0]).text = "\n".join(wrong)
        ElementTree.indent(suite)
        return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True)
