"""What an optimisation costs in quality: perplexity, drift from the exact model, and the gate that decides."""

from llm_latency.quality.drift import DriftReport, drift
from llm_latency.quality.perplexity import perplexity, token_losses
from llm_latency.quality.regression import regression_test
from llm_latency.quality.regression_report import CaseResult, RegressionReport, Thresholds
from llm_latency.quality.texts import reading_text, standard_cases

__all__ = [
    "CaseResult",
    "DriftReport",
    "RegressionReport",
    "Thresholds",
    "drift",
    "perplexity",
    "reading_text",
    "regression_test",
    "standard_cases",
    "token_losses",
]
