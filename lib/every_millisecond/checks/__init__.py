"""The exercises' checks: one file per chapter, one function per exercise, run on what the learner wrote.

A check calls the learner's object on fresh random odd sizes, compares it with an oracle of its own, and when it differs
says which mistake that looks like. How to add one: docs/exercise-style.md.
"""

from every_millisecond.checks.call import STUB, call, call_raising
from every_millisecond.checks.exercise import exercise, registered
from every_millisecond.checks.failure import CheckFailed

__all__ = ["STUB", "CheckFailed", "call", "call_raising", "exercise", "registered"]
