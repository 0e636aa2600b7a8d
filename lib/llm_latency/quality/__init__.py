"""What an optimisation costs in quality: perplexity, and drift from the exact model."""

from llm_latency.quality.drift import DriftReport as DriftReport
from llm_latency.quality.drift import drift as drift
from llm_latency.quality.perplexity import perplexity as perplexity
from llm_latency.quality.perplexity import windowed_perplexity as windowed_perplexity
from llm_latency.quality.reading import reading_text as reading_text
