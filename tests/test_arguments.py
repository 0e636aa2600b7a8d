"""The shared checks of arguments: what passes, what is refused, and that the value is named."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from llm_latency import arguments


@pytest.mark.parametrize(
    ("value", "error"), [(True, TypeError), (2.0, TypeError), ("2", TypeError), (None, TypeError), (0, ValueError)]
)
def test_a_count_is_an_integer_of_at_least_one(value, error):
    """Fault: `True` counts as 1, and 2.0 fails far inside; the message must name the value."""
    with pytest.raises(error, match=f"rounds={value!r}; expected"):
        arguments.check_count("rounds", value)


def test_counts_keep_their_range_and_become_ints():
    """Fault: numpy's integers refused, or the upper bound off by one."""
    assert arguments.check_count("n", np.int64(3), most=3) == 3
    assert isinstance(arguments.check_count("n", np.int64(3)), int)
    assert arguments.check_count("n", 0, least=0) == 0
    with pytest.raises(ValueError, match="n=4; expected 1 to 3"):
        arguments.check_count("n", 4, most=3)


@pytest.mark.parametrize("value", [math.nan, math.inf, -0.1, 1.1])
def test_a_number_lies_in_its_range(value):
    """Fault: NaN passes every comparison that is written as `value < least`."""
    assert arguments.check_number("share", 1, 0, 1) == 1.0
    with pytest.raises(ValueError, match=f"share={value}; expected 0 to 1"):
        arguments.check_number("share", value, 0, 1)
    with pytest.raises(TypeError, match="share=True"):
        arguments.check_number("share", True)


@pytest.mark.parametrize(
    ("ids", "error", "message"),
    [
        ([[1, 2]], TypeError, "list"),
        (torch.tensor([[1.0]]), TypeError, "float32"),
        (torch.tensor([[1]], dtype=torch.int32), TypeError, "int32"),
        (torch.tensor([1, 2]), ValueError, r"shape \[2\]"),
        (torch.tensor([[1], [2]]), ValueError, "one request at a time"),
        (torch.zeros(1, 0, dtype=torch.int64), ValueError, "empty"),
        (torch.tensor([[1, 97]]), ValueError, "holds 97; expected ids from 0 to 96"),
        (torch.tensor([[-1, 97]]), ValueError, "holds -1"),
    ],
)
def test_token_ids_of_another_kind_are_named(ids, error, message):
    """Fault: an id outside the vocabulary fails within the model, as an assert of the device that names nothing."""
    with pytest.raises(error, match=message):
        arguments.check_token_ids(ids, 97)


def test_token_ids_come_as_one_row():
    """Fault: a flat tensor refused where it was promised, or a text of one token scored."""
    ids = torch.tensor([0, 96])
    assert arguments.check_token_ids(ids, 97, flat=True).tolist() == [[0, 96]]  # id 0 is an id (case 14)
    with pytest.raises(ValueError, match="ids holds 1 tokens; expected at least 2"):
        arguments.check_token_ids(ids[:1], 97, name="ids", flat=True, least=2)


@pytest.mark.parametrize(
    ("device", "error"),
    [("tpu9", ValueError), ("meta", ValueError), ("cuda:99", ValueError), ("", ValueError), (0, TypeError)],
)
def test_unknown_devices_are_named(device, error):
    """Fault: a capability guessed from a name (case 33), or an index taken for a device."""
    with pytest.raises(error, match=f"device={device!r}"):
        arguments.check_device(device)


def test_dtypes_have_one_name_each():
    """Fault: a dtype's name written in two ways, so that results of one cannot be compared with the other's."""
    for name, dtype in arguments.DTYPES.items():
        assert arguments.check_dtype(name) == dtype and arguments.dtype_name(dtype) == name
    with pytest.raises(ValueError, match="int9"):
        arguments.check_dtype("int9")
    with pytest.raises(ValueError, match=r"torch\.int8"):
        arguments.dtype_name(torch.int8)
