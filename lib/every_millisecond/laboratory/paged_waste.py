"""How many slots of a KV cache hold nothing: one long reservation per request against pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from every_millisecond.laboratory.workload import mixed_asks


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


def count_waste(
    count: int = 1000, *, longest_answer: int = 256, page_size: int = 16, seed: int = 0
) -> dict[str, SlotUse]:
    """Slots at the end of each of many requests: prompts of 64 to 512 tokens, answers of 4 to 128.

    A contiguous cache must reserve `longest_answer` behind each prompt, since nobody knows where an answer ends.
    The end is its best moment: before it, even more of the reservation is empty.
    """
    asks = mixed_asks(count, vocab_size=2, seed=seed, prompt_tokens=(64, 512), new_tokens=(4, 128))
    lengths = [len(ask.prompt) + ask.max_new_tokens for ask in asks]
    reserved = [len(ask.prompt) + longest_answer for ask in asks]
    return {"contiguous": contiguous_use(lengths, reserved), "paged": paged_use(lengths, page_size)}
