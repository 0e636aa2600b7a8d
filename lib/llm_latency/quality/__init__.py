"""What an optimisation costs in quality: perplexity, drift from the exact model, and the gate that decides."""

from llm_latency.quality.drift import DriftReport as DriftReport
from llm_latency.quality.drift import drift as drift
from llm_latency.quality.perplexity import perplexity as perplexity
from llm_latency.quality.perplexity import windowed_perplexity as windowed_perplexity
from llm_latency.quality.reading import reading_text as reading_text
from llm_latency.quality.regression import regression_test as regression_test
from llm_latency.quality.regression_cases import standard_cases as standard_cases
from llm_latency.quality.regression_report import RegressionReport as RegressionReport
from llm_latency.quality.regression_report import Thresholds as Thresholds
