"""Calling what a learner wrote, so that whatever it does ends in one readable sentence."""

from __future__ import annotations

import linecache
import sysconfig
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import torch

from every_millisecond.checks.failure import CheckFailed, describe, describe_call
from every_millisecond.checks.time_limit import PATIENCE, OutOfTime, run_within

STUB = "not solved yet"  # what nbgrader_config.py lets an unsolved function raise
LIMIT_S = 5.0
_LIBRARIES = [str(Path(__file__).parents[2]), *(sysconfig.get_paths()[key] for key in ("stdlib", "purelib", "platlib"))]


def call(fn: Callable, *args: object, limit_s: float = LIMIT_S, may_change: bool = False, **kwargs: object) -> object:
    """`fn(*args, **kwargs)`, the learner's function, under guard.

    Args:
        limit_s: seconds of the processor's time after which it is taken to loop for ever.
        may_change: True if the exercise asks to write into an argument.

    Raises:
        CheckFailed: it is unsolved, raised (the message names the line), took too long, or changed an argument.
    """
    value, error = attempt(fn, args, kwargs, limit_s, may_change)
    if error is not None:
        raise CheckFailed(f"{describe_call(fn, args, kwargs)} raised {_told(error)}") from None
    return value


def call_raising(expected: type[Exception], fn: Callable, *args: object, why: str, **kwargs: object) -> Exception:
    """Call the learner's function where it must raise `expected`; return that error.

    Raises CheckFailed with `why` if it returns or raises something else.
    """
    value, error = attempt(fn, args, kwargs, LIMIT_S, may_change=False)
    if isinstance(error, expected):
        return error
    found = f"returned {describe(value)}" if error is None else f"raised {_told(error)}"
    raise CheckFailed(f"{describe_call(fn, args, kwargs)} {found}; expected {expected.__name__}: {why}") from None


def attempt(
    fn: Callable, args: tuple, kwargs: dict, limit_s: float, may_change: bool
) -> tuple[object, Exception | SystemExit | None]:
    """(value, None) or (None, the learner's exception; `exit()` is one, too)."""
    if not callable(fn):
        raise CheckFailed(f"expected a function, got {describe(fn)}")
    before = None if may_change else _copy((args, kwargs))
    try:
        value = run_within(limit_s, lambda: fn(*args, **kwargs), own=_is_the_learners)
    except OutOfTime:
        raise CheckFailed(
            f"{describe_call(fn, args, kwargs)} was stopped after {limit_s:g} s of work, or {PATIENCE * limit_s:g} s "
            "of waiting: does a loop never end?"
        ) from None
    except NotImplementedError as error:
        if str(error) == STUB:  # torch raises NotImplementedError, too, for an operator that a device lacks
            raise CheckFailed(f"{STUB}: {describe(fn)} still raises NotImplementedError") from None
        return None, error
    except (Exception, SystemExit) as error:
        return None, error
    if not may_change:
        _unchanged(fn, before, (args, kwargs))
    return value, None


def _is_the_learners(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    return not file.startswith("<frozen") and not any(file.startswith(folder) for folder in _LIBRARIES)


def _told(error: BaseException) -> str:
    """`ZeroDivisionError: division by zero, in your line 4: return total / n`."""
    first = next((line for line in str(error).splitlines() if line.strip()), "")  # torch's messages can be pages long
    text = f"{type(error).__name__}: {first.strip()}" if first else type(error).__name__
    if "dummy base class Event" in text:  # what torch says without CUDA
        text += " (torch.cuda.Event needs a GPU; the exercise brings its own: stream.record_event())"
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        if _is_the_learners(frame):
            source = linecache.getline(frame.f_code.co_filename, line).strip()
            return f"{text}, in your line {line}{': ' + source if source else ''}"
    return text


def _unchanged(fn: Callable, before: tuple, after: tuple) -> None:
    (old_args, old_kwargs), (args, kwargs) = before, after
    pairs = [(f"argument {i + 1}", *pair) for i, pair in enumerate(zip(old_args, args, strict=True))]
    pairs += [(f"argument {name}", old_kwargs[name], kwargs[name]) for name in kwargs]
    for name, old, new in pairs:
        if not _same(old, new):
            raise CheckFailed(
                f"{describe(fn)} changed its {name}, {describe(old)}. "
                "Leave what you are given as it is: work on a copy (sorted(x), x.clone()), not in place"
            )


def _copy(value: object) -> object:
    """Copies of tensors and containers; everything else (models, streams) as it is."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, list | tuple | set) and type(value) in (list, tuple, set):
        return type(value)(_copy(item) for item in value)
    if type(value) is dict:
        return {key: _copy(item) for key, item in value.items()}
    return value


def _same(old: object, new: object) -> bool:
    if isinstance(old, torch.Tensor):
        if not isinstance(new, torch.Tensor) or old.shape != new.shape or old.dtype != new.dtype:
            return False
        return torch.equal(*(x.detach().contiguous().reshape(-1).view(torch.uint8) for x in (old, new)))  # NaN included
    if type(old) in (list, tuple):
        return len(old) == len(new) and all(_same(a, b) for a, b in zip(old, new, strict=True))
    if type(old) is dict:
        return list(old) == list(new) and all(_same(old[key], new[key]) for key in old)
    if isinstance(old, int | float | str | set):
        return old == new or old != old  # NaN is not equal to itself
    return True  # models, streams and the like have a life of their own
