"""One check of token ids for everything that takes them."""

from __future__ import annotations

import operator
from collections.abc import Sized
from typing import Any

import torch


def check_token_id(token_id: Any, tokenizer: Any) -> int:
    """The id as a Python int.

    Raises:
        TypeError: not an integer (a bool is none either). ValueError: negative, or not below ``len(tokenizer)``.
    """
    if isinstance(token_id, bool):
        raise TypeError(f"a token id must be an integer, got {token_id!r}")
    if isinstance(token_id, torch.Tensor) and token_id.numel() != 1:
        raise TypeError(f"one token id at a time, got a tensor of shape {tuple(token_id.shape)}")
    try:
        number = operator.index(token_id)
    except TypeError:
        raise TypeError(f"a token id must be an integer, got {token_id!r}") from None
    if number < 0:
        raise ValueError(f"a token id cannot be negative, got {number}")
    if isinstance(tokenizer, Sized) and number >= len(tokenizer):
        raise ValueError(f"token id {number} is outside the vocabulary of {len(tokenizer)} tokens")
    return number
