"""What a check expects of a value, each with the message that a learner needs: what came, what should have come.

Messages begin with the thing and a colon, so that they read the same for one and for many: "the scales: shape [3]".
"""

from __future__ import annotations

import decimal
import math
import numbers
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from every_millisecond.checks.failure import CheckFailed, describe


def that(holds: bool, message: str) -> None:
    """Raise CheckFailed(message) unless it holds."""
    if not holds:
        raise CheckFailed(message)


def _is_kind(holds: bool, value: object, what: str, expected: str) -> None:
    that(value is not None, f"{what}: None. Is a `return` missing? (print does not return)")
    that(holds, f"{what}: {describe(value)} ({type(value).__name__}); expected {expected}")


def kind(value: object, expected: type | tuple[type, ...], what: str) -> object:
    """The value, if it is of that type."""
    names = " or ".join(t.__name__ for t in (expected if isinstance(expected, tuple) else (expected,)))
    _is_kind(isinstance(value, expected), value, what, names)
    return value


def sequence(value: object, what: str) -> list:
    """A list, a tuple, or a tensor or array of one dimension, as a list."""
    if isinstance(value, Tensor | np.ndarray) and value.ndim == 1:
        return value.tolist()
    _is_kind(isinstance(value, list | tuple), value, what, "list or tuple")
    return list(value)


def items(value: object, count: int, what: str, of: str) -> list:
    """A sequence of `count` items; `of` says which they are: "median, p10, p90"."""
    found = sequence(value, what)
    that(len(found) == count, f"{what}: {len(found)} items; expected {count}: {of}")
    return found


def number(value: object, what: str) -> float:
    """A finite number as a float; a tensor or array of one element counts."""
    if (isinstance(value, Tensor) and value.numel() == 1) or (isinstance(value, np.ndarray) and value.size == 1):
        value = value.item()
    is_number = isinstance(value, numbers.Real | decimal.Decimal) and not isinstance(value, bool)
    _is_kind(is_number, value, what, "a number")
    that(math.isfinite(float(value)), f"{what}: {float(value)}; expected a finite number")
    return float(value)


def whole(value: object, what: str) -> int:
    """A whole number as an int."""
    found = number(value, what)
    that(found == int(found), f"{what}: {found:g}; expected a whole number")
    return int(found)


def truth(value: object, what: str) -> bool:
    """Yes or no: a bool of Python, numpy or torch, or 1 or 0."""
    if (isinstance(value, Tensor) and value.numel() == 1) or (isinstance(value, np.ndarray) and value.size == 1):
        value = value.item()
    _is_kind(isinstance(value, bool | np.bool_) or value in (0, 1), value, what, "True or False")
    return bool(value)


def tensor(
    value: object,
    what: str,
    *,
    shape: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
    finite: bool = True,
) -> Tensor:
    """A tensor of that shape and dtype, without NaN or infinities unless `finite` is False."""
    _is_kind(isinstance(value, Tensor), value, what, "a tensor")
    if shape is not None:
        that(list(value.shape) == list(shape), f"{what}: shape {list(value.shape)}; expected {list(shape)}")
    if dtype is not None:
        that(value.dtype == dtype, f"{what}: dtype {value.dtype}; expected {dtype}")
    if finite and value.is_floating_point():
        for bad, name in ((value.isnan(), "NaN"), (value.isinf(), "infinity")):
            that(not bad.any(), f"{what}: {name} in {int(bad.sum())} of {value.numel()} values")
    return value


def near(
    value: object, want: float, what: str, *, mistakes: Mapping[str, float] | None = None, rel: float = 1e-5,
    absolute: float = 1e-9,
) -> None:  # fmt: skip
    """A number close to `want`. If it is close to a value in `mistakes` instead, the message is that mistake's name."""
    found = number(value, what)

    def close(a: float, b: float) -> bool:
        return math.isclose(a, b, rel_tol=rel, abs_tol=absolute)

    if close(found, want):
        return
    name = next((name for name, wrong in (mistakes or {}).items() if close(found, wrong)), "")
    raise CheckFailed(f"{what}: {_unlike(found, want)}. {name}".removesuffix(". "))


def _unlike(found: float, want: float) -> str:
    """Both numbers, with as many digits as it takes to see that they differ."""
    for digits in (6, 9, 12, 17):
        texts = f"{found:.{digits}g}", f"{want:.{digits}g}"
        if texts[0] != texts[1]:
            break
    return f"{texts[0]}; expected {texts[1]}"


def close(
    value: object, want: Tensor, what: str, *, mistakes: Mapping[str, Tensor] | None = None, rel: float = 1e-4,
    absolute: float = 1e-5, dtype: bool = True,
) -> None:  # fmt: skip
    """A tensor of want's shape (and dtype) that is close to it everywhere; `mistakes` as in `near`."""
    found = tensor(value, what, shape=want.shape, dtype=want.dtype if dtype else None, finite=False)

    def is_close(other: Tensor) -> bool:
        return other.shape == found.shape and torch.allclose(
            found.double(), other.double(), rtol=rel, atol=absolute, equal_nan=True
        )

    if is_close(want):
        return
    for name, wrong in (mistakes or {}).items():
        that(not is_close(wrong), f"{what}: wrong. {name}")
    tensor(found, what, finite=bool(want.isfinite().all()))  # a plain NaN has a message of its own
    distance = (found.double() - want.double()).abs().masked_fill(found == want, 0)  # inf - inf is no distance
    worst = int(distance.argmax()) if want.numel() else 0
    place = tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), want.shape))
    raise CheckFailed(
        f"{what}: wrong, most at {list(place)}: {found[place].item():.5g} where {want[place].item():.5g} was expected"
    )


def all_alike(found: list, want: list, mistakes: Mapping[str, list], told: Sequence[str]) -> None:
    """The answers to many cases, all right; or the name of the mistake that gives these wrong ones.

    told: what to say of each case, if no mistake explains three in four of the wrong answers.
    """
    wrong = [i for i, pair in enumerate(zip(found, want, strict=True)) if pair[0] != pair[1]]
    if not wrong:
        return
    explained = {name: sum(found[i] == answers[i] for i in wrong) for name, answers in mistakes.items()}
    alike = {name: sum(a == b for a, b in zip(found, mistakes[name], strict=True)) for name in mistakes}
    best = max(mistakes, key=alike.__getitem__)
    raise CheckFailed(best if 4 * explained[best] >= 3 * len(wrong) else told[wrong[0]])
