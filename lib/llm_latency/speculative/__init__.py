"""Speculative decoding: the acceptance rule, drafts, the decoder, and the theory of what it can gain."""

from llm_latency.speculative.adaptive import AdaptiveGamma
from llm_latency.speculative.conditioned_draft import ConditionedDraft
from llm_latency.speculative.decoder import Request, SpeculativeDecoder
from llm_latency.speculative.model_draft import ModelDraft
from llm_latency.speculative.output import Cycle, SpeculativeOutput
from llm_latency.speculative.prompt_lookup import PromptLookupDraft
from llm_latency.speculative.proposal import Draft, Proposal
from llm_latency.speculative.rule import SamplingRule
from llm_latency.speculative.targets import CroppableStepper
from llm_latency.speculative.theory import (
    acceptance_probability,
    best_gamma,
    expected_speedup,
    expected_tokens_per_cycle,
)
from llm_latency.speculative.verify import residual, verify, verify_greedy

__all__ = [
    "AdaptiveGamma",
    "ConditionedDraft",
    "CroppableStepper",
    "Cycle",
    "Draft",
    "ModelDraft",
    "PromptLookupDraft",
    "Proposal",
    "Request",
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
