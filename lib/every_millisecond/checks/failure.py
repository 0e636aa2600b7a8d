"""What a failed check raises, one readable message, and the short names of values that messages use."""

from __future__ import annotations

import torch

_LONGEST = 60


class CheckFailed(AssertionError):
    """A learner's answer is not right yet; the message says what was found, what was expected, what to look at.

    IPython shows only the message. nbgrader sees an error and gives no points.
    """

    seed: int | None = None  # set by `exercise`: the same check with this seed draws the same numbers

    def _render_traceback_(self) -> list[str]:
        return [f"✗ {self}"]


def how_often(count: int) -> str:
    """`once`, `3 times`."""
    return "once" if count == 1 else f"{count} times"


def describe(value: object) -> str:
    """A value in at most about 60 characters: `tensor [3, 7] float32`, `list of 5`, `None`."""
    if isinstance(value, torch.Tensor):
        where = "" if value.device.type == "cpu" else f" on {value.device}"
        return f"tensor {list(value.shape)} {str(value.dtype).removeprefix('torch.')}{where}"
    if value is None or value is ...:
        return repr(value)
    if callable(value):
        return getattr(value, "__qualname__", type(value).__name__).rpartition("<locals>.")[2]
    text = repr(value)
    if len(text) <= _LONGEST and " object at 0x" not in text:
        return text
    if isinstance(value, list | tuple | set | dict):
        return f"{type(value).__name__} of {len(value)}"
    return type(value).__name__


def describe_call(fn: object, args: tuple, kwargs: dict) -> str:
    """`name(3, tensor [2, 5] float32, causal=True)`."""
    inside = [describe(arg) for arg in args] + [f"{name}={describe(arg)}" for name, arg in kwargs.items()]
    return f"{describe(fn)}({', '.join(inside)})"
