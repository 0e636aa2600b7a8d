"""Decoding token by token: what a decoder is, the loop around it, and transformers models as decoders."""

from llm_latency.generation.loop import GenerationOutput, Stepper, check_request, generate
from llm_latency.generation.steppers import (
    CompiledStepper,
    RecomputeStepper,
    StaticStepper,
    TransformersStepper,
    as_stepper,
)

__all__ = [
    "CompiledStepper",
    "GenerationOutput",
    "RecomputeStepper",
    "StaticStepper",
    "Stepper",
    "TransformersStepper",
    "as_stepper",
    "check_request",
    "generate",
]
