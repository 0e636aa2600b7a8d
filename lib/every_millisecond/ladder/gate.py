"""`llm-latency regress`: the regression gate between the ladder's baseline and a rung, or between two model folders."""

from __future__ import annotations

from pathlib import Path

from rich.markup import escape
from rich.table import Table

from every_millisecond.ladder.rungs import BASELINE, rung
from llm_latency import files, models
from llm_latency.quality import CaseResult, RegressionReport, Thresholds, regression_test, standard_cases
from llm_latency.quality.regression_report import OPTIMISED, ORIGINAL

HEADERS = ("case", "tokens", "perplexity", "mean KL", "same first", "same text", "ms", "speed-up", "verdict")


def gate(
    rung_name: str,
    *,
    profile: str | None = None,
    optimized_model: str | None = None,
    thresholds: Thresholds | None = None,
    exact: bool | None = None,
    new_tokens: int = 16,
    rounds: int = 3,
    samples: int = 0,
    junit: Path | None = None,
) -> RegressionReport:
    """Run `regression_test` on the standard cases: the baseline (FP32) of a profile or folder against a rung of it.

    optimized_model: a folder that the rung is built from instead, for weights that somebody else has made smaller.
    exact: None asks the rung whether it promises the baseline's text. junit: where to write the report for a CI.

    Raises ValueError for an unknown rung, one that this machine cannot run, or models that cannot be compared.
    """
    entry = rung(rung_name)
    reason = entry.unavailable()
    if reason:
        raise ValueError(f"rung {rung_name!r} is not available here: {reason}")
    if exact is None:
        exact = entry.exact and optimized_model is None
    original = rung(BASELINE).build(profile)
    optimised = entry.build(optimized_model or profile)
    cases = standard_cases(
        models.load_tokenizer(profile), min(original.max_positions, optimised.max_positions), new_tokens=new_tokens
    )
    report = regression_test(
        original, optimised, cases,
        thresholds=thresholds, exact=exact, new_tokens=new_tokens, rounds=rounds, samples=samples,
    )  # fmt: skip
    if junit is not None:
        files.write_atomically(junit, report.junit())
    return report


def table(report: RegressionReport) -> Table:
    """The cases as a rich table, the verdict as its caption."""
    caption = (
        f"{'PASSED' if report.passed else 'FAILED'}: over all cases mean KL {report.mean_kl:.1e} nats, "
        f"same first choice {report.agreement:.1%}"
    )
    if report.sampling_p is not None:
        caption += f", sampling p {report.sampling_p:.2g}"
    shown = Table(title="Regression test", caption=caption, title_justify="left", caption_justify="left")
    for header in HEADERS:
        shown.add_column(header, justify="left" if header == "case" else "right")
    for case in report.cases:
        wrong = [what for where, what in report.failures if where == case.name]
        cells = [""] * 6 if case.error else _cells(case)
        shown.add_row(escape(case.name), str(case.tokens), *cells, escape("; ".join(wrong)) or "passed")
    return shown


def _cells(case: CaseResult) -> list[str]:
    both = case.perplexities
    time, ratio = "-", "-"
    if case.times is not None:
        ms = case.times.median_ms
        time = f"{ms[ORIGINAL]:.0f} to {ms[OPTIMISED]:.0f}"
        ratio = str(case.times.speedup(OPTIMISED, ORIGINAL))
    return [
        "-" if both is None else f"{both[0]:.2f} to {both[1]:.2f}",
        f"{case.kl / case.positions:.1e}",
        f"{case.same_first} of {case.positions}",
        f"{case.same_text} of {case.new_tokens}" + (", a near tie" if case.near_tie else ""),
        time,
        ratio,
    ]
