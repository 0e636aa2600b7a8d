"""Argument checks that the timing functions share."""

from __future__ import annotations

import math
import numbers


def check_count(name: str, value: object, least: int) -> None:
    """TypeError unless `value` is an integer (a bool is none), ValueError unless it is at least `least`."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name} is {value!r}; expected an integer")
    if value < least:
        raise ValueError(f"{name} is {value}; expected {least} or more")


def check_milliseconds(name: str, value: object) -> None:
    """TypeError unless `value` is a number, ValueError unless it is finite and not negative."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} is {value!r}; expected a number of milliseconds")
    if not math.isfinite(value) or value < 0:
        raise ValueError(f"{name} is {value} ms; expected a finite time, 0 or more")


def check_callable(name: str, value: object) -> None:
    """TypeError unless `value` can be called."""
    if not callable(value):
        raise TypeError(f"{name} is {value!r}; expected a function without arguments")
