"""The checks of arguments that all public functions share. Each names the value and says what was expected.

They are made once, at the public door; behind it shapes and values are trusted.
"""

from __future__ import annotations

import math
import numbers
import operator
from typing import Any

import torch
from torch import Tensor

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def check_count(name: str, value: Any, least: int = 1, most: int | None = None) -> int:
    """The value as an int. TypeError unless it is an integer (a bool is none), ValueError outside `least` to `most`."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name}={value!r}; expected an int")
    if value < least or (most is not None and value > most):
        raise ValueError(f"{name}={value}; expected {f'at least {least}' if most is None else f'{least} to {most}'}")
    return int(value)


def check_number(name: str, value: Any, least: float = -math.inf, most: float = math.inf) -> float:
    """The value as a float. TypeError unless it is a number, ValueError for NaN, infinity, or outside the range."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name}={value!r}; expected a number")
    if not (least <= value <= most and math.isfinite(value)):  # no comparison with NaN is true
        if math.isfinite(most):
            expected = f"{least:g} to {most:g}"
        else:
            expected = "a finite number" + (f" of at least {least:g}" if math.isfinite(least) else "")
        raise ValueError(f"{name}={value}; expected {expected}")
    return float(value)


def check_callable(name: str, value: Any) -> None:
    """TypeError unless `value` can be called."""
    if not callable(value):
        raise TypeError(f"{name} is {value!r}; expected a function without arguments")


def check_flag(name: str, value: Any) -> bool:
    """TypeError unless value is True or False: `causal=mask` is a mistake that truthiness would hide."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}={value!r}; expected True or False")
    return value


# -- token ids ----------------------------------------------------------------------------------------------------


def check_token_ids(
    ids: Any, vocab_size: int, *, name: str = "input_ids", of: str = "request", flat: bool = False, least: int = 1
) -> Tensor:
    """The ids of one sequence as int64 [1, n].

    Args:
        ids: int64 [1, n]; with `flat`, [n] too. vocab_size: each id is from 0 to vocab_size - 1.
        of: what a sequence is called in messages. least: the fewest tokens that make sense.

    Raises:
        TypeError: no tensor, or not of int64. ValueError: another shape, too few tokens, an id out of range.
    """
    if not isinstance(ids, Tensor) or ids.dtype != torch.int64:
        kind = ids.dtype if isinstance(ids, Tensor) else type(ids).__name__
        raise TypeError(f"{name} is {kind}; expected an int64 tensor of shape [1, n]")
    if flat and ids.dim() == 1:
        ids = ids.unsqueeze(0)
    if ids.dim() != 2 or ids.shape[0] != 1:
        raise ValueError(f"{name} has shape {list(ids.shape)}; expected [1, n], one {of} at a time")
    if ids.shape[1] == 0:
        raise ValueError(f"{name} has shape [1, 0], an empty {of}; expected at least one token")
    if ids.shape[1] < least:
        raise ValueError(f"{name} holds {ids.shape[1]} tokens; expected at least {least}")
    check_id_range(ids, vocab_size, name=name)
    return ids


def check_id_range(ids: Tensor, vocab_size: int, *, name: str = "input_ids") -> None:
    """ValueError unless all ids, of a tensor that is not empty, are from 0 to vocab_size - 1."""
    low, high = (int(bound) for bound in ids.aminmax())
    if low < 0 or high >= vocab_size:
        raise ValueError(f"{name} holds {low if low < 0 else high}; expected ids from 0 to {vocab_size - 1}")


def check_step_ids(token_ids: Tensor) -> None:
    """ValueError or TypeError unless they are integers [1, k], k at least 1.

    Their range is the embedding's to check: asking here would wait for the device at every step.
    """
    if token_ids.ndim != 2 or token_ids.shape[0] != 1 or token_ids.shape[1] == 0:
        raise ValueError(f"expected token ids of shape [1, k], k at least 1; got {list(token_ids.shape)}")
    if token_ids.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"token ids are {token_ids.dtype}; expected int64 or int32")


def check_token_id(token_id: Any, vocab_size: int | None = None) -> int:
    """One token id as an int. TypeError for no integer, ValueError outside the vocabulary (None: of unknown size)."""
    if isinstance(token_id, Tensor) and token_id.numel() != 1:
        raise TypeError(f"one token id at a time, got a tensor of shape {tuple(token_id.shape)}")
    try:
        number = operator.index(token_id)
    except TypeError:
        number = None
    if number is None or isinstance(token_id, bool):
        raise TypeError(f"a token id must be an integer, got {token_id!r}")
    if number < 0:
        raise ValueError(f"a token id cannot be negative, got {number}")
    if vocab_size is not None and number >= vocab_size:
        raise ValueError(f"token id {number} is outside the vocabulary of {vocab_size} tokens")
    return number


# -- devices and dtypes -------------------------------------------------------------------------------------------


def check_device(device: str | torch.device | None = None) -> torch.device:
    """A usable device; None means CUDA where torch can use it, else the CPU.

    Raises TypeError for anything but a name, a torch.device or None, and ValueError for a device that torch does not
    know, that is neither a CPU nor CUDA, or that this machine lacks.
    """
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    expected = "expected 'cpu', 'cuda' or 'cuda:N'"
    if not isinstance(device, str | torch.device):
        raise TypeError(f"device={device!r} is a {type(device).__name__}; {expected}, a torch.device or None")
    try:
        checked = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device={device!r} is not a device; {expected}") from error
    if checked.type not in ("cpu", "cuda"):
        raise ValueError(f"device={device!r} is not supported; {expected}")
    if checked.type == "cuda":
        if not torch.cuda.is_available():
            raise ValueError(f"device={device!r} asked for, but torch sees no CUDA device here; expected 'cpu'")
        if checked.index is not None and checked.index >= torch.cuda.device_count():
            raise ValueError(f"device={device!r} is not there: torch sees {torch.cuda.device_count()} CUDA device(s)")
    return checked


def check_dtype(name: str) -> torch.dtype:
    """The dtype of a name in `DTYPES`. Raises ValueError for another."""
    if name not in DTYPES:
        raise ValueError(f"dtype={name!r}; expected one of {', '.join(DTYPES)}")
    return DTYPES[name]


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype in `DTYPES`. Raises ValueError for another."""
    for name, known in DTYPES.items():
        if known == dtype:
            return name
    raise ValueError(f"dtype={dtype!r}; expected one of {', '.join(DTYPES)}")
