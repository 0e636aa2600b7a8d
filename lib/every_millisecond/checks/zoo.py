"""Bugs to find, prove and mend: judging a test that a learner wrote.

A test is a function of a program. It asserts what is true of every right program, and so fails on the broken one.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Mapping
from types import FunctionType

from every_millisecond.checks.call import LIMIT_S, attempt
from every_millisecond.checks.draw import Draw
from every_millisecond.checks.failure import CheckFailed, describe


def check_test(test: Callable, draw: Draw, *, broken: Mapping[str, Callable], right: Mapping[str, Callable]) -> None:
    """Run the learner's test on broken and on right programs.

    Args:
        test: takes one program; fails by `assert`, passes by returning nothing.
        broken: what is wrong -> program. The test must fail on each. right: how it is done -> program; it must pass.
            The test sees all of them in a drawn order and then in the reverse one, under one name, so that nothing but
            what they do tells, and a verdict that changes with the calls before it fails.

    Raises:
        CheckFailed: the test passes on a broken program, fails on a right one, or crashes.
    """
    programs = {**right, **broken}
    order = draw.shuffled(programs)
    rounds = [{way: _outcome(test, _anonymous(programs[way])) for way in ways} for ways in (order, reversed(order))]
    for way, found in itertools.product(right, rounds):
        error = found[way]
        if isinstance(error, AssertionError):
            said = f": {error}" if str(error) else ""
            raise CheckFailed(
                f"{describe(test)} fails on a program that is right ({way}){said}. "
                "A test asserts only what is true of every right program"
            )
        if error is not None:
            raise CheckFailed(f"{describe(test)} crashed on a right program ({way}): {type(error).__name__}: {error}")
    for fault, found in itertools.product(broken, rounds):
        error = found[fault]
        if error is None:
            raise CheckFailed(
                f"{describe(test)} passes on a broken program, so it proves nothing. The fault that it misses: {fault}"
            )
        if not isinstance(error, AssertionError):
            raise CheckFailed(
                f"{describe(test)} crashed on the broken program ({type(error).__name__}: {error}); "
                "a test fails by `assert`"
            )


def _outcome(test: Callable, program: Callable) -> BaseException | None:
    value, error = attempt(test, (program,), {}, LIMIT_S, may_change=False)
    if error is None and value is not None:
        raise CheckFailed(
            f"{describe(test)} returned {describe(value)}; a test speaks by `assert`, and returns nothing"
        )
    return error


def _anonymous(program: FunctionType) -> FunctionType:
    """The same function without its name, its docstring and the place of its source."""
    names = {"co_name": "program"} | ({"co_qualname": "program"} if sys.version_info >= (3, 11) else {})
    code = program.__code__.replace(co_filename="<program>", co_firstlineno=1, **names)
    twin = FunctionType(code, program.__globals__, "program", program.__defaults__, program.__closure__)
    twin.__kwdefaults__, twin.__doc__, twin.__module__ = program.__kwdefaults__, None, "__main__"
    return twin
