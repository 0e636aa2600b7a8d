"""Who owns which page: the bookkeeping of a paged KV cache, without a single tensor.

PagedAttention (Kwon et al. 2023, arXiv 2309.06180) borrows an operating system's idea: a request's keys and values lie
in pages of fixed size, anywhere in one pool, and a table per request says where. So nothing must be contiguous, nothing
is reserved for an answer that may never come, and requests can share pages that hold the same text.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field


class OutOfPages(RuntimeError):
    """The pool has too few free pages; nothing was changed."""


@dataclass(slots=True, eq=False)
class CachedPage:
    """A full page that later requests may share: its ids, and the page before it (None: it begins a text)."""

    key: int
    ids: tuple[int, ...]
    before: CachedPage | None
    page: int


@dataclass(slots=True)
class Reservation:
    """What the storage must do before new tokens are written: copy pages (source, target), clear fresh ones."""

    copies: list[tuple[int, int]] = field(default_factory=list)
    fresh: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Sequence:
    token_ids: list[int]
    table: list[int]
    stored: int  # tokens whose keys and values are in the pool
    offered: int = 0  # full pages offered to the prefix cache, or taken from it
    last: CachedPage | None = None  # the cached page that ends those


class BlockManager:
    """Free list, reference counts, copy on write and prefix cache of `num_pages` pages of `page_size` tokens.

    A request is opened with its prompt, appended to in chunks, committed after each forward pass, and freed.
    A page with one reader may be written; a page with several is copied first (copy on write). Full pages whose content
    is in the pool are offered to the prefix cache, found again by a hash of their ids and of the page before them, and
    compared id by id: a hash is a hint, never a proof. A page without readers stays findable until its place is needed.

    Args:
        hash_page: hash of (hash of the page before, ids); tests plant a bad one.

    Raises:
        ValueError: sizes below 1, a request opened twice, an empty prompt. KeyError: an unknown request.
        OutOfPages: from `append`.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int = 16,
        *,
        prefix_caching: bool = True,
        hash_page: Callable[[Hashable], int] = hash,
    ):
        if num_pages < 1 or page_size < 1:
            raise ValueError(f"num_pages and page_size must be at least 1, got {num_pages} and {page_size}")
        self.num_pages = num_pages
        self.page_size = page_size
        self.prefix_caching = prefix_caching
        self.prefix_hits = 0  # tokens that were found instead of computed
        self._hash_page = hash_page
        self._free: deque[int] = deque(range(num_pages))
        self._idle: OrderedDict[int, None] = OrderedDict()  # cached pages that nobody reads, the oldest first
        self._readers = [0] * num_pages
        self._cached: dict[int, CachedPage] = {}  # by hash
        self._entry_of: dict[int, CachedPage] = {}  # by page
        self._sequences: dict[Hashable, _Sequence] = {}

    # --- what others ask ---

    @property
    def num_free(self) -> int:
        """Pages that an append may take, idle cached ones included."""
        return len(self._free) + len(self._idle)

    def pages_for(self, tokens: int) -> int:
        """Pages that hold so many tokens."""
        return -(-tokens // self.page_size)

    def length(self, request: Hashable) -> int:
        """Tokens of the request that have a slot."""
        return len(self._sequence(request).token_ids)

    def table(self, request: Hashable) -> list[int]:
        """The request's pages, in the order of its tokens."""
        return list(self._sequence(request).table)

    def slots(self, request: Hashable, start: int, stop: int) -> list[int]:
        """Places in the pool (page * page_size + offset) of the tokens from start to stop, stop not included."""
        sequence, size = self._sequence(request), self.page_size
        if not 0 <= start <= stop <= len(sequence.token_ids):
            raise ValueError(f"tokens {start} to {stop} are outside a request of {len(sequence.token_ids)} tokens")
        return [sequence.table[i // size] * size + i % size for i in range(start, stop)]

    def slots_held_and_used(self) -> tuple[int, int]:
        """Slots in pages that somebody reads, and how many of them hold a token."""
        fill: dict[int, int] = {}
        for sequence in self._sequences.values():
            for i, page in enumerate(sequence.table):
                here = min(len(sequence.token_ids) - i * self.page_size, self.page_size)
                fill[page] = max(fill.get(page, 0), here)
        return len(fill) * self.page_size, sum(fill.values())

    # --- a request's life ---

    def open(self, request: Hashable, prompt: Sequence[int]) -> int:
        """Begins a request and takes the cached pages that begin its prompt.

        Returns:
            How many of the prompt's tokens need not be computed: a multiple of page_size and always below the prompt's
            length, since the last token must run through the model to give logits.
        """
        if request in self._sequences:
            raise ValueError(f"request {request!r} is open already")
        if not prompt:
            raise ValueError(f"request {request!r} has an empty prompt")
        sequence = _Sequence([], [], 0)
        for start in range(0, len(prompt) - self.page_size, self.page_size):
            entry = self._find(sequence.last, tuple(prompt[start : start + self.page_size]))
            if entry is None:
                break
            self._readers[entry.page] += 1
            self._idle.pop(entry.page, None)
            sequence.table.append(entry.page)
            sequence.token_ids.extend(entry.ids)
            sequence.last = entry
        sequence.offered, sequence.stored = len(sequence.table), len(sequence.token_ids)
        self.prefix_hits += sequence.stored
        self._sequences[request] = sequence
        return sequence.stored

    def append(self, request: Hashable, token_ids: Sequence[int]) -> Reservation:
        """Gives the request's next tokens a slot each; all of them, or OutOfPages and nothing changes."""
        sequence = self._sequence(request)
        old, new = len(sequence.token_ids), len(sequence.token_ids) + len(token_ids)
        partial = bool(token_ids) and old % self.page_size != 0
        shared = partial and self._readers[sequence.table[-1]] > 1
        missing = self.pages_for(new) - len(sequence.table)
        if missing + shared > self.num_free:
            raise OutOfPages(f"request {request!r} needs {missing + shared} pages, {self.num_free} are free")
        reservation = Reservation()
        if shared:
            source, target = sequence.table[-1], self._take()
            self._readers[source] -= 1
            sequence.table[-1] = target
            reservation.copies.append((source, target))
        reservation.fresh = [self._take() for _ in range(missing)]
        sequence.table.extend(reservation.fresh)
        sequence.token_ids.extend(token_ids)
        return reservation

    def commit(self, request: Hashable) -> None:
        """Tells that the keys and values of all appended tokens are in the pool now; offers full pages to others."""
        sequence, size = self._sequence(request), self.page_size
        sequence.stored = len(sequence.token_ids)
        while self.prefix_caching and (sequence.offered + 1) * size <= sequence.stored:
            start = sequence.offered * size
            ids, page = tuple(sequence.token_ids[start : start + size]), sequence.table[sequence.offered]
            entry = self._find(sequence.last, ids)
            if entry is None:
                entry = CachedPage(self._key(sequence.last, ids), ids, sequence.last, page)
                self._forget(entry.key)  # another text with this hash, or this text behind a page that is gone
                self._cached[entry.key] = self._entry_of[page] = entry
            sequence.last = entry
            sequence.offered += 1

    def fork(self, parent: Hashable, child: Hashable) -> None:
        """Begins a request with all of another's tokens, sharing every page; whoever writes first copies."""
        sequence = self._sequence(parent)
        if child in self._sequences:
            raise ValueError(f"request {child!r} is open already")
        if sequence.stored != len(sequence.token_ids):
            raise ValueError(f"request {parent!r} has tokens that are not committed yet; fork it after commit")
        for page in sequence.table:
            self._readers[page] += 1
        self._sequences[child] = _Sequence(
            list(sequence.token_ids),
            list(sequence.table),
            sequence.stored,
            sequence.offered,
            sequence.last,
        )

    def free(self, request: Hashable) -> None:
        """Ends a request. Its last pages become the first to be reused, so that beginnings are kept longest."""
        sequence = self._sequence(request)
        del self._sequences[request]
        for page in reversed(sequence.table):
            self._readers[page] -= 1
            if self._readers[page] == 0:
                if page in self._entry_of:
                    self._idle[page] = None
                else:
                    self._free.append(page)

    def check(self) -> None:
        """Raises AssertionError if a page is lost, counted wrongly, or could be written by two requests."""
        readers = [0] * self.num_pages
        for name, sequence in self._sequences.items():
            assert len(sequence.table) == self.pages_for(len(sequence.token_ids)), f"{name!r}: pages and tokens differ"
            assert len(set(sequence.table)) == len(sequence.table), f"{name!r} holds a page twice"
            for page in sequence.table:
                readers[page] += 1
        assert readers == self._readers, "reference counts are wrong"
        unread = {page for page, count in enumerate(readers) if count == 0}
        resting = [*self._free, *self._idle]
        assert len(resting) == len(set(resting)) and set(resting) == unread, "a page is lost or free twice"
        assert all(page in self._entry_of for page in self._idle), "an idle page that nobody can find"
        assert not any(page in self._entry_of for page in self._free), "a free page that is still cached"
        assert {entry.page for entry in self._cached.values()} == set(self._entry_of), "prefix cache out of step"

    # --- within ---

    def _sequence(self, request: Hashable) -> _Sequence:
        if request not in self._sequences:
            raise KeyError(f"no open request {request!r}")
        return self._sequences[request]

    def _key(self, before: CachedPage | None, ids: tuple[int, ...]) -> int:
        return self._hash_page((before.key if before else None, ids))

    def _find(self, before: CachedPage | None, ids: tuple[int, ...]) -> CachedPage | None:
        """The cached page with exactly these ids behind exactly that page."""
        entry = self._cached.get(self._key(before, ids)) if self.prefix_caching else None
        return entry if entry is not None and entry.ids == ids and entry.before is before else None

    def _forget(self, key: int) -> None:
        """Takes a page out of the prefix cache, if there is one of this hash; its readers keep it."""
        entry = self._cached.pop(key, None)
        if entry is None:
            return
        del self._entry_of[entry.page]
        if entry.page in self._idle:
            del self._idle[entry.page]
            self._free.append(entry.page)

    def _take(self) -> int:
        if not self._free:
            self._forget(self._entry_of[next(iter(self._idle))].key)
        page = self._free.popleft()
        self._readers[page] = 1
        return page
