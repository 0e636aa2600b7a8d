"""Speculative decoding: the acceptance rule, drafts, the decoder, and the theory of what it can gain.

The draft that reads the target's hidden states stands in `conditioned_draft`.
"""

from llm_latency.sampling import SamplingRule
from llm_latency.speculative.decoder import Generation, SpeculativeDecoder
from llm_latency.speculative.drafts import Draft, ModelDraft, PromptLookupDraft, Proposal
from llm_latency.speculative.output import Cycle, SpeculativeOutput
from llm_latency.speculative.theory import (
    acceptance_probability,
    best_gamma,
    expected_speedup,
    expected_tokens_per_cycle,
)
from llm_latency.speculative.verify import residual, verify, verify_greedy

__all__ = [
    "Cycle",
    "Draft",
    "Generation",
    "ModelDraft",
    "PromptLookupDraft",
    "Proposal",
    "SamplingRule",
    "SpeculativeDecoder",
    "SpeculativeOutput",
    "acceptance_probability",
    "best_gamma",
    "expected_speedup",
    "expected_tokens_per_cycle",
    "residual",
    "verify",
    "verify_greedy",
]
