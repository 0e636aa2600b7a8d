"""Text of many answers in one call."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from llm_latency.text.ids import check_token_id


def decode_batch(
    tokenizer: Any,
    rows: torch.Tensor | Sequence[Sequence[int] | torch.Tensor],
    *,
    stop_ids: Iterable[int] = (),
    skip_special_tokens: bool = False,
) -> list[str]:
    """Texts of several id sequences; each is what ``tokenizer.decode`` gives for its row.

    One call into the tokenizer's compiled code, which works on the rows in parallel, instead of one call per row.

    Args:
        rows: ids [batch, n], or rows of different lengths.
        stop_ids: a row ends before its first id out of these, so padding behind an answer does not show.

    Raises:
        ValueError: an id outside the vocabulary, a tensor that is not [batch, n]. TypeError: an id that is not an
            integer.
    """
    if isinstance(rows, torch.Tensor) and rows.dim() != 2:
        raise ValueError(f"ids must be [batch, n], got shape {tuple(rows.shape)}")
    stops = frozenset(stop_ids)
    clean = [_until_stop(_as_list(row), stops) for row in rows]
    for row in clean:
        for bound in (min(row, default=0), max(row, default=0)):
            check_token_id(bound, tokenizer)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or getattr(tokenizer, "clean_up_tokenization_spaces", False):
        return [tokenizer.decode(row, skip_special_tokens=skip_special_tokens) for row in clean]
    return backend.decode_batch(clean, skip_special_tokens=skip_special_tokens)


def _as_list(row: Sequence[int] | torch.Tensor) -> list[int]:
    return row.tolist() if isinstance(row, torch.Tensor) else list(row)


def _until_stop(row: list[int], stops: frozenset[int]) -> list[int]:
    end = next((i for i, token_id in enumerate(row) if token_id in stops), len(row))
    return row[:end]
