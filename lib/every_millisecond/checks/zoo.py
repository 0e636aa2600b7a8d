"""Bugs to find, prove and mend: judging a test that a learner wrote.

A test is a function of a program. It asserts what is true of every right program, and so fails on the broken one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from every_millisecond.checks.call import LIMIT_S, attempt
from every_millisecond.checks.describe import describe
from every_millisecond.checks.failure import CheckFailed


def check_test(test: Callable, *, broken: Mapping[str, Callable], right: Mapping[str, Callable]) -> None:
    """Run the learner's test on broken and on right programs.

    Args:
        test: takes one program; fails by `assert`, passes by returning nothing.
        broken: what is wrong -> program. The test must fail on each. right: how it is done -> program; it must pass.

    Raises:
        CheckFailed: the test passes on a broken program, fails on a right one, or crashes.
    """
    for way, program in right.items():
        error = _outcome(test, program)
        if isinstance(error, AssertionError):
            said = f": {error}" if str(error) else ""
            raise CheckFailed(
                f"{describe(test)} fails on a program that is right ({way}){said}. "
                "A test asserts only what is true of every right program"
            )
        if error is not None:
            raise CheckFailed(f"{describe(test)} crashed on a right program ({way}): {type(error).__name__}: {error}")
    for fault, program in broken.items():
        error = _outcome(test, program)
        if error is None:
            raise CheckFailed(
                f"{describe(test)} passes on a broken program, so it proves nothing. The fault that it misses: {fault}"
            )
        if not isinstance(error, AssertionError):
            raise CheckFailed(
                f"{describe(test)} crashed on the broken program ({type(error).__name__}: {error}); "
                "a test fails by `assert`"
            )


def _outcome(test: Callable, program: Callable) -> Exception | None:
    value, error = attempt(test, (program,), {}, LIMIT_S, may_change=False)
    if error is None and value is not None:
        raise CheckFailed(
            f"{describe(test)} returned {describe(value)}; a test speaks by `assert`, and returns nothing"
        )
    return error
