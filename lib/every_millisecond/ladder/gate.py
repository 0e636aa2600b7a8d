"""`llm-latency regress`: the regression gate between the ladder's baseline and a rung, or between two model folders."""

from __future__ import annotations

from pathlib import Path

from every_millisecond.ladder.rungs import BASELINE, rung
from llm_latency import files, models
from llm_latency.quality import RegressionReport, Thresholds, regression_test, standard_cases


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
