"""How many slots of a KV cache hold nothing: one long reservation per request against pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SlotUse:
    """Slots taken from memory and slots that hold a token."""

    held: int
    used: int

    @property
    def wasted(self) -> int:
        return self.held - self.used

    @property
    def waste(self) -> float:
        """Share of the held slots that hold nothing, 0 to 1."""
        return self.wasted / self.held if self.held else 0.0


def contiguous_use(lengths: Sequence[int], reserved: Sequence[int]) -> SlotUse:
    """Each request holds one stretch, as long as it may ever become.

    Raises:
        ValueError: different numbers of lengths and reservations, or a request longer than its reservation.
    """
    if len(lengths) != len(reserved):
        raise ValueError(f"{len(lengths)} lengths but {len(reserved)} reservations")
    for length, limit in zip(lengths, reserved, strict=True):
        if not 0 <= length <= limit:
            raise ValueError(f"a request of {length} tokens does not fit its reservation of {limit}")
    return SlotUse(sum(reserved), sum(lengths))


def paged_use(lengths: Sequence[int], page_size: int = 16) -> SlotUse:
    """Each request holds as many pages as its tokens need: less than one page is wasted per request.

    Raises:
        ValueError: a negative length, a page size below 1.
    """
    if page_size < 1 or min(lengths, default=0) < 0:
        raise ValueError(f"page_size must be at least 1 and lengths 0 or more, got {page_size} and {list(lengths)}")
    return SlotUse(sum(-(-length // page_size) * page_size for length in lengths), sum(lengths))
