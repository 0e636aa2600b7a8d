"""Who owns which block: the bookkeeping of a paged KV cache, without a single tensor.

PagedAttention (Kwon et al. 2023, arXiv 2309.06180) borrows an operating system's idea, pages: a request's keys and
values lie in blocks of fixed size, anywhere in one pool, and a block table per request says where. So nothing need be
contiguous, nothing is reserved for an answer that may never come, and requests can share blocks that hold the same
text. The tensors are in `paged.py`, which carries out what is decided here.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from llm_latency.arguments import check_count


class OutOfBlocks(RuntimeError):
    """The pool has too few free blocks; nothing was changed."""


@dataclass(slots=True, eq=False)
class CachedBlock:
    """A full block that later requests may share.

    Its keys and values depend on all tokens before it, too, so it is identified by its ids and the block before it.
    """

    key: int  # hash of the ids and of the key of the block before
    ids: tuple[int, ...]  # block_size token ids
    before: CachedBlock | None  # None: it begins a text
    block: int  # its number in the pool


@dataclass(slots=True)
class Reservation:
    """What the pool must do before new tokens are written: copy blocks (source, target), and clear fresh ones, whose
    unwritten slots are read, if masked."""

    copies: list[tuple[int, int]] = field(default_factory=list)
    fresh: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Sequence:
    token_ids: list[int]
    table: list[int]  # the block table: item i is the block of token i * block_size and those after it
    stored: int  # tokens whose keys and values are in the pool
    offered: int = 0  # full blocks, from the first on, that are in the prefix cache
    last: CachedBlock | None = None  # the last of those
    found: int = 0  # tokens found in the prefix cache and not yet added to prefix_hits


class BlockManager:
    """Free list, reference counts, copy on write and prefix cache of `num_blocks` blocks of `block_size` tokens.

    A request is opened with its prompt, appended to in chunks, committed after each forward pass, and freed.
    A block in one request's table may be written; one in several is copied first (copy on write). A full block whose
    keys and values have been computed goes into the prefix cache, where later requests find it by a hash of its ids and
    of the block before it; the ids are then compared, since a hash can collide. Even when no request uses it any more,
    it can be found until its memory is needed.

    Raises:
        ValueError: sizes below 1, a request opened twice, an empty prompt. KeyError: an unknown request.
        OutOfBlocks: from `append`.
    """

    def __init__(self, num_blocks: int, block_size: int = 16, *, prefix_caching: bool = True):
        self.num_blocks = check_count("num_blocks", num_blocks)
        self.block_size = check_count("block_size", block_size)
        self.prefix_caching = prefix_caching
        self.prefix_hits = 0  # tokens that were found instead of computed
        self._free: deque[int] = deque(range(num_blocks))
        self._idle: OrderedDict[int, None] = OrderedDict()  # cached blocks in no table, the longest idle first
        self._readers = [0] * num_blocks  # reference counts: tables that hold the block
        self._cached: dict[int, CachedBlock] = {}  # by hash
        self._entry_of: dict[int, CachedBlock] = {}  # by block
        self._sequences: dict[Hashable, _Sequence] = {}

    # --- queries ---

    @property
    def num_free(self) -> int:
        """Blocks that an append may take, idle cached ones included."""
        return len(self._free) + len(self._idle)

    def blocks_for(self, tokens: int) -> int:
        """How many blocks that many tokens take."""
        return -(-tokens // self.block_size)

    def table(self, request: Hashable) -> list[int]:
        """The request's blocks, in the order of its tokens."""
        return list(self._sequence(request).table)

    def slots(self, request: Hashable, start: int, stop: int) -> list[int]:
        """Slots in the pool (block * block_size + offset) of the tokens from start to stop, stop not included."""
        sequence, size = self._sequence(request), self.block_size
        if not 0 <= start <= stop <= len(sequence.token_ids):
            raise ValueError(f"tokens {start} to {stop} are outside a request of {len(sequence.token_ids)} tokens")
        return [sequence.table[i // size] * size + i % size for i in range(start, stop)]

    # --- open, append, commit, free ---

    def open(self, request: Hashable, prompt: Sequence[int]) -> int:
        """Begin a request and share the cached blocks that its prompt begins with.

        Returns:
            How many of the prompt's tokens need not be computed: a multiple of block_size and always less than the
            prompt, since the last token must run through the model to give logits.
        """
        if request in self._sequences:
            raise ValueError(f"request {request!r} is open already")
        if not prompt:
            raise ValueError(f"request {request!r} has an empty prompt")
        sequence = _Sequence([], [], 0)
        for start in range(0, len(prompt) - self.block_size, self.block_size):
            entry = self._find(sequence.last, tuple(prompt[start : start + self.block_size]))
            if entry is None:
                break
            self._readers[entry.block] += 1
            self._idle.pop(entry.block, None)  # in use again
            sequence.table.append(entry.block)
            sequence.token_ids.extend(entry.ids)
            sequence.last = entry
        sequence.offered, sequence.stored = len(sequence.table), len(sequence.token_ids)
        sequence.found = sequence.stored
        self._sequences[request] = sequence
        return sequence.stored

    def append(self, request: Hashable, token_ids: Sequence[int]) -> Reservation:
        """Give each of the request's next tokens a slot. Raises OutOfBlocks, and changes nothing, if not all fit."""
        sequence = self._sequence(request)
        old, new = len(sequence.token_ids), len(sequence.token_ids) + len(token_ids)
        partial = bool(token_ids) and old % self.block_size != 0  # the first of them goes into the last block
        shared = partial and self._readers[sequence.table[-1]] > 1  # which must be copied first
        missing = self.blocks_for(new) - len(sequence.table)
        if missing + shared > self.num_free:
            raise OutOfBlocks(f"request {request!r} needs {missing + shared} blocks, {self.num_free} are free")
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
        """Record that the keys and values of all appended tokens are now in the pool; put full blocks into the prefix
        cache."""
        sequence, size = self._sequence(request), self.block_size
        sequence.stored = len(sequence.token_ids)
        self.prefix_hits += sequence.found  # not in `open`: a request may be opened and freed again for want of blocks
        sequence.found = 0
        while self.prefix_caching and (sequence.offered + 1) * size <= sequence.stored:
            start = sequence.offered * size
            ids, block = tuple(sequence.token_ids[start : start + size]), sequence.table[sequence.offered]
            entry = self._find(sequence.last, ids)
            if entry is None:
                entry = CachedBlock(self._key(sequence.last, ids), ids, sequence.last, block)
                self._forget(entry.key)  # other ids with the same hash, or these ids after a block that is gone
                self._cached[entry.key] = self._entry_of[block] = entry
            sequence.last = entry
            sequence.offered += 1

    def fork(self, parent: Hashable, child: Hashable) -> None:
        """Begin a request with all of another's tokens, sharing every block; the first to write to one copies it."""
        sequence = self._sequence(parent)
        if child in self._sequences:
            raise ValueError(f"request {child!r} is open already")
        if sequence.stored != len(sequence.token_ids):
            raise ValueError(f"request {parent!r} has tokens that are not committed yet; fork it after commit")
        for block in sequence.table:
            self._readers[block] += 1
        self._sequences[child] = _Sequence(
            list(sequence.token_ids),
            list(sequence.table),
            sequence.stored,
            sequence.offered,
            sequence.last,
        )

    def free(self, request: Hashable) -> None:
        """End a request. Its last blocks are reused first, since the beginning of a text is what others share."""
        sequence = self._sequence(request)
        del self._sequences[request]
        for block in reversed(sequence.table):
            self._readers[block] -= 1
            if self._readers[block] == 0:
                if block in self._entry_of:
                    self._idle[block] = None
                else:
                    self._free.append(block)

    def check(self) -> None:
        """Raise AssertionError if a block is lost, counted wrongly, or could be written by two requests."""
        readers = [0] * self.num_blocks
        for name, sequence in self._sequences.items():
            assert len(sequence.table) == self.blocks_for(len(sequence.token_ids)), (
                f"{name!r}: blocks and tokens differ"
            )
            assert len(set(sequence.table)) == len(sequence.table), f"{name!r} holds a block twice"
            for block in sequence.table:
                readers[block] += 1
        assert readers == self._readers, "reference counts are wrong"
        unread = {block for block, count in enumerate(readers) if count == 0}
        resting = [*self._free, *self._idle]
        assert len(resting) == len(set(resting)) and set(resting) == unread, "a block is lost or free twice"
        assert all(block in self._entry_of for block in self._idle), "an idle block that nobody can find"
        assert not any(block in self._entry_of for block in self._free), "a free block that is still cached"
        assert {entry.block for entry in self._cached.values()} == set(self._entry_of), "prefix cache out of step"

    # --- inside ---

    def _sequence(self, request: Hashable) -> _Sequence:
        if request not in self._sequences:
            raise KeyError(f"no open request {request!r}")
        return self._sequences[request]

    def _key(self, before: CachedBlock | None, ids: tuple[int, ...]) -> int:
        """The hash of these ids after that block, and through its key of all the text before them."""
        return hash((before.key if before else None, ids))

    def _find(self, before: CachedBlock | None, ids: tuple[int, ...]) -> CachedBlock | None:
        """The cached block with exactly these ids after exactly that block, or None."""
        entry = self._cached.get(self._key(before, ids)) if self.prefix_caching else None
        return entry if entry is not None and entry.ids == ids and entry.before is before else None

    def _forget(self, key: int) -> None:
        """Take the block with this hash, if there is one, out of the prefix cache; requests that use it keep it."""
        entry = self._cached.pop(key, None)
        if entry is None:
            return
        del self._entry_of[entry.block]
        if entry.block in self._idle:
            del self._idle[entry.block]
            self._free.append(entry.block)

    def _take(self) -> int:
        """A block for one reader: a free one, or the longest idle one, which is then no longer cached."""
        if not self._free:
            self._forget(self._entry_of[next(iter(self._idle))].key)
        block = self._free.popleft()
        self._readers[block] = 1
        return block
