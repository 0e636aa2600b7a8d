"""What a check expects of a value, each with the message that a learner needs: what came, what should have come."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from every_millisecond.checks.describe import describe
from every_millisecond.checks.failure import CheckFailed

_NOTHING = "{what} is None: is a `return` missing? (print does not return)"


def that(holds: bool, message: str) -> None:
    """Raise CheckFailed(message) unless it holds."""
    if not holds:
        raise CheckFailed(message)


def kind(value: object, expected: type | tuple[type, ...], what: str) -> object:
    """The value, if it is of that type."""
    that(value is not None, _NOTHING.format(what=what))
    names = " or ".join(t.__name__ for t in (expected if isinstance(expected, tuple) else (expected,)))
    that(isinstance(value, expected), f"{what} is {describe(value)} ({type(value).__name__}); expected {names}")
    return value


def items(value: object, count: int, what: str, of: str) -> Sequence:
    """A tuple or list of `count` items; `of` says which they are: "median, p10, p90"."""
    kind(value, (tuple, list), what)
    that(len(value) == count, f"{what} has {len(value)} items; expected {count}: {of}")
    return value


def number(value: object, what: str) -> float:
    """A finite number as a float; a tensor of one element counts."""
    that(value is not None, _NOTHING.format(what=what))
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    # numpy's scalars have no common base with float, but all can say what they are as a float
    is_number = not isinstance(value, bool | str | Tensor) and hasattr(value, "__float__")
    that(is_number, f"{what} is {describe(value)} ({type(value).__name__}); expected a number")
    that(math.isfinite(float(value)), f"{what} is {float(value)}; expected a finite number")
    return float(value)


def whole(value: object, what: str) -> int:
    """A whole number as an int."""
    found = number(value, what)
    that(found == int(found), f"{what} is {found:g}; expected a whole number")
    return int(found)


def tensor(
    value: object,
    what: str,
    *,
    shape: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    finite: bool = True,
) -> Tensor:
    """A tensor of that shape, dtype and device type, without NaN or infinities unless `finite` is False."""
    that(value is not None, _NOTHING.format(what=what))
    that(isinstance(value, Tensor), f"{what} is {describe(value)} ({type(value).__name__}); expected a tensor")
    if shape is not None:
        that(list(value.shape) == list(shape), f"{what} has shape {list(value.shape)}; expected {list(shape)}")
    if dtype is not None:
        that(value.dtype == dtype, f"{what} has dtype {value.dtype}; expected {dtype}")
    if device is not None:
        wanted = torch.device(device).type
        that(value.device.type == wanted, f"{what} lies on {value.device}; expected {wanted}")
    if finite and value.is_floating_point():
        bad = value.isnan()
        that(not bad.any(), f"{what} holds NaN, {int(bad.sum())} of {value.numel()} values; expected numbers only")
        bad = value.isinf()
        that(not bad.any(), f"{what} holds infinities, {int(bad.sum())} of {value.numel()} values")
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
    for name, wrong in (mistakes or {}).items():
        if close(found, wrong):
            raise CheckFailed(f"{what} is {found:.6g}; expected {want:.6g}. {name}")
    raise CheckFailed(f"{what} is {found:.6g}; expected {want:.6g}")


def close(
    value: object, want: Tensor, what: str, *, mistakes: Mapping[str, Tensor] | None = None, rel: float = 1e-4,
    absolute: float = 1e-5, dtype: bool = True,
) -> None:  # fmt: skip
    """A tensor of want's shape (and dtype) that is close to it everywhere; `mistakes` as in `near`."""
    found = tensor(value, what, shape=want.shape, dtype=want.dtype if dtype else None, finite=False)

    def is_close(other: Tensor) -> bool:
        if other.shape != found.shape:
            return False
        return torch.allclose(found.double(), other.double(), rtol=rel, atol=absolute, equal_nan=True)

    if is_close(want):
        return
    for name, wrong in (mistakes or {}).items():
        if is_close(wrong):
            raise CheckFailed(f"{what} is wrong. {name}")
    tensor(found, what, finite=bool(want.isfinite().all()))  # a plain NaN has a message of its own
    distance = (found.double() - want.double()).abs().masked_fill(found == want, 0)  # inf - inf is no distance
    worst = int(distance.argmax()) if want.numel() else 0
    place = [int(i) for i in torch.unravel_index(torch.tensor(worst), want.shape)]
    raise CheckFailed(
        f"{what} is wrong, most at {place}: {found[tuple(place)].item():.5g} where "
        f"{want[tuple(place)].item():.5g} was expected"
    )
