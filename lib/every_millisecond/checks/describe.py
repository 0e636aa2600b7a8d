"""Values in a few words, for messages: `tensor [3, 7] float32`, `list of 5`, `None`."""

from __future__ import annotations

import torch

_LONGEST = 60


def describe(value: object) -> str:
    """A short name for a value; never more than about 60 characters."""
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
