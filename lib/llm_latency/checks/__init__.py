"""The exercises' checks: one file per chapter, one function per exercise, run on what the learner wrote.

A check calls the learner's object on fresh random odd sizes, compares it with an oracle of its own, and when it differs
says which mistake that looks like. How to add one: docs/exercise-style.md.
"""

from llm_latency.checks.call import call, call_raising
from llm_latency.checks.exercise import STUB, exercise, registered
from llm_latency.checks.failure import CheckFailed

__all__ = ["STUB", "CheckFailed", "call", "call_raising", "exercise", "registered"]
