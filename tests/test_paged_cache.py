"""The paged KV cache: who owns which block, what lies in it, and how much is wasted."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule
from properties import property_settings

from every_millisecond.laboratory.paged_waste import contiguous_use, paged_use
from llm_latency.kv_cache.block_manager import BlockManager, OutOfBlocks, Reservation
from llm_latency.kv_cache.paged import PagedKVCache


def store(manager: BlockManager, name, ids) -> int:
    """Opens a request and puts all its tokens in; returns how many were found in the prefix cache."""
    found = manager.open(name, ids)
    manager.append(name, ids[found:])
    manager.commit(name)
    manager.check()
    return found


class Hashing(BlockManager):
    """A manager whose hashes are what a test says: a function of (hash of the block before, ids)."""

    def __init__(self, *sizes, hashing, **options):
        super().__init__(*sizes, **options)
        self.hashing = hashing

    def _key(self, before, ids):
        return self.hashing((before.key if before else None, ids))


class Blocks(RuleBasedStateMachine):
    """Random requests against a model of the pool: each slot's content is written down as (token, its whole prefix)."""

    requests = Bundle("requests")

    @initialize(size=st.integers(1, 4), blocks=st.integers(4, 20), bad_hash=st.booleans(), caching=st.booleans())
    def begin(self, size, blocks, bad_hash, caching):
        hashing = (lambda content: hash(content) % 3) if bad_hash else hash
        self.manager = Hashing(blocks, size, prefix_caching=caching, hashing=hashing)
        self.pool: dict[int, tuple] = {}  # slot -> the text up to and with its token
        self.texts: dict[int, list[int]] = {}
        self.stored: dict[int, int] = {}
        self.names = 0

    def _write(self, name: int, reservation: Reservation, start: int) -> None:
        size = self.manager.block_size
        for source, target in reservation.copies:
            for offset in range(size):
                self.pool[target * size + offset] = self.pool.get(source * size + offset, ())
        owners = [set(self.manager.table(other)) for other in self.texts if other != name]
        text = self.texts[name]
        for i, slot in enumerate(self.manager.slots(name, start, len(text)), start):
            assert not any(slot // size in blocks for blocks in owners), "a block is written that another request reads"
            self.pool[slot] = tuple(text[: i + 1])
        self.manager.commit(name)
        self.stored[name] = len(text)

    @rule(target=requests, prompt=st.lists(st.integers(0, 1), min_size=1, max_size=9))
    def open(self, prompt):
        name, self.names = self.names, self.names + 1
        found = self.manager.open(name, prompt)
        assert found < len(prompt) and found % self.manager.block_size == 0
        self.texts[name] = prompt[:found]
        try:
            reservation = self.manager.append(name, prompt[found:])
        except OutOfBlocks:
            self.manager.free(name)  # preempted before it began
            del self.texts[name]
            return name
        self.texts[name] = list(prompt)
        self._write(name, reservation, found)
        return name

    @rule(name=requests, ids=st.lists(st.integers(0, 1), max_size=4))
    def append_to(self, name, ids):
        self.append(name, ids)

    def append(self, name, ids):
        if name not in self.texts:
            return
        start, free, table = len(self.texts[name]), self.manager.num_free, self.manager.table(name)
        try:
            reservation = self.manager.append(name, ids)
        except OutOfBlocks:
            assert (self.manager.num_free, self.manager.table(name)) == (free, table), (
                "a failed append changed something"
            )
            return
        self.texts[name] = self.texts[name] + ids
        self._write(name, reservation, start)

    @rule(target=requests, parent=requests, ids=st.lists(st.integers(0, 1), max_size=4))
    def fork(self, parent, ids):
        name, self.names = self.names, self.names + 1
        if parent in self.texts:
            self.manager.fork(parent, name)
            self.texts[name] = list(self.texts[parent])
            self.append(name, ids)
        return name

    @rule(name=consumes(requests))
    def free(self, name):
        if name in self.texts:
            self.manager.free(name)
            del self.texts[name]

    @rule()
    def preempt_newest(self):
        if self.texts:
            self.free_all([max(self.texts)])

    def free_all(self, names):
        for name in names:
            self.manager.free(name)
            del self.texts[name]

    @invariant()
    def nothing_lost_and_every_slot_right(self):
        if not hasattr(self, "manager"):
            return
        self.manager.check()
        for name, text in self.texts.items():
            for i, slot in enumerate(self.manager.slots(name, 0, len(text))):
                assert self.pool[slot] == tuple(text[: i + 1]), "a slot holds another text's token"

    def teardown(self):
        if hasattr(self, "manager"):
            self.free_all(list(self.texts))
            assert self.manager.num_free == self.manager.num_blocks, "blocks leaked"


TestBlocks = Blocks.TestCase
TestBlocks.settings = property_settings(120, stateful_step_count=40)
TestBlocks.__doc__ = (
    "Fault: a leaked block, a block with two writers, a prefix hit on another text (hash collisions too)."
)


def test_hash_collision_is_not_a_hit():
    """Fault: a prefix is believed because its hash is right; the answer continues somebody else's prompt."""
    manager = Hashing(8, 2, hashing=lambda content: 7)
    assert store(manager, "a", [1, 2, 3]) == 0
    assert store(manager, "b", [5, 6, 3]) == 0
    assert store(manager, "c", [5, 6, 4]) == 2


def test_same_block_behind_another_beginning_is_not_a_hit():
    """Fault: blocks are found by their own ids alone, although keys and values depend on all that stands before."""
    manager = BlockManager(16, 2)
    store(manager, "a", [1, 1, 2, 2, 9])
    assert store(manager, "b", [3, 3, 2, 2, 9]) == 0
    assert store(manager, "c", [1, 1, 2, 2, 8]) == 4


def test_block_whose_beginning_was_evicted_and_came_back():
    """Fault: a block is found behind a new block that merely has the hash of the old one before it."""
    manager = Hashing(4, 2, hashing=lambda content: hash(content[1]))  # blind to what stands before
    store(manager, "a", [1, 1, 2, 2, 9])
    manager.free("a")
    assert store(manager, "b", [3, 3, 2, 2, 9]) == 0


def test_prompt_cached_entirely_keeps_its_last_token():
    """Fault (case 27): every token is found in the cache, so nothing is computed and there are no logits."""
    manager = BlockManager(8, 4)
    prompt = list(range(8))
    assert store(manager, "a", prompt) == 0
    assert store(manager, "b", prompt) == 4
    assert store(manager, "c", prompt[:4]) == 0
    assert store(manager, "d", [*prompt, 8]) == 8


def test_freed_blocks_are_found_again_until_they_are_needed():
    """Fault: the prefix cache dies with its request, or its idle blocks are never given back to the pool."""
    manager = BlockManager(4, 2)
    store(manager, "a", [1, 1, 2, 2, 3])
    manager.free("a")
    assert manager.num_free == 4
    assert store(manager, "b", [1, 1, 2, 2, 4]) == 4
    manager.free("b")
    store(manager, "c", [9] * 8)
    manager.free("c")
    assert store(manager, "d", [1, 1, 2, 2, 4]) == 0


def test_uncommitted_blocks_are_not_shared():
    """Fault: a second request reads blocks whose keys and values are not computed yet."""
    manager = BlockManager(8, 2)
    manager.open("a", [1, 2, 3, 4, 5])
    manager.append("a", [1, 2, 3, 4])
    assert manager.open("b", [1, 2, 3, 4, 5]) == 0
    manager.commit("a")
    assert manager.open("c", [1, 2, 3, 4, 5]) == 4
    manager.append("a", [5])
    with pytest.raises(ValueError, match="not committed"):
        manager.fork("a", "d")


def test_copy_on_write_copies_once_and_only_what_is_shared():
    """Fault: a fork writes into its parent's block; or full blocks are copied although nobody writes there."""
    manager = BlockManager(8, 4)
    store(manager, "a", [1, 2, 3, 4, 5])
    manager.fork("a", "b")
    assert manager.num_free == 6
    assert manager.append("b", [7]).copies == [(1, 2)]
    assert manager.append("a", [6]).copies == []
    assert manager.table("a") == [0, 1] and manager.table("b") == [0, 2]


def test_wrong_use_is_named():
    """Fault: an unknown request, an empty prompt or a size of zero fails somewhere deep, or passes."""
    manager = BlockManager(2, 2)
    for call in (manager.free, manager.table, manager.commit):
        with pytest.raises(KeyError, match="nobody"):
            call("nobody")
    with pytest.raises(ValueError, match="empty prompt"):
        manager.open("a", [])
    manager.open("a", [1])
    with pytest.raises(ValueError, match="open already"):
        manager.open("a", [1])
    with pytest.raises(OutOfBlocks, match="needs 3 blocks, 2 are free"):
        manager.append("a", [1] * 5)
    with pytest.raises(ValueError, match="outside"):
        manager.slots("a", 0, 1)
    with pytest.raises(ValueError, match="at least 1"):
        BlockManager(0)


# --- storage ---


def test_gather_gives_back_what_was_written(tiny_llama):
    """Fault: keys and values swapped, layers mixed up, a block read in the wrong order, NaN from an earlier owner."""
    config = tiny_llama.config
    cache = PagedKVCache(config, num_blocks=5, block_size=3)
    cache.pool.fill_(float("nan"))
    cache.pool[:, :, cache.null_block] = 0
    generator = torch.Generator().manual_seed(0)
    texts = {"a": 7, "b": 2}
    written = {}
    for name, n in texts.items():
        cache.manager.open(name, list(range(n)))
        cache.prepare(cache.manager.append(name, list(range(n))))
    for layer in range(config.num_hidden_layers):
        for name, n in texts.items():
            keys, values = torch.randn(2, n, cache.kv_heads, cache.head_dim, generator=generator)
            cache.write(layer, torch.tensor(cache.manager.slots(name, 0, n)), keys, values)
            written[layer, name] = keys, values
    tables = cache.tables(list(texts))
    assert tables.shape == (2, 3)
    for layer in range(config.num_hidden_layers):
        keys, values = cache.gather(layer, tables)
        assert keys.shape == (2, cache.kv_heads, 9, cache.head_dim)
        for row, (name, n) in enumerate(texts.items()):
            expected_keys, expected_values = written[layer, name]
            assert torch.equal(keys[row, :, :n].transpose(0, 1), expected_keys)
            assert torch.equal(values[row, :, :n].transpose(0, 1), expected_values)
            assert not values[row, :, n:].any(), "a slot behind the text is not zero"


def test_copy_on_write_copies_the_content(tiny_llama):
    """Fault: the table points to a fresh block, but the shared tokens' keys and values stay behind."""
    cache = PagedKVCache(tiny_llama.config, num_blocks=4, block_size=4, dtype=torch.bfloat16)
    cache.manager.open("a", [1, 2])
    cache.prepare(cache.manager.append("a", [1, 2]))
    new = torch.ones(2, cache.kv_heads, cache.head_dim, dtype=torch.bfloat16)
    cache.write(1, torch.tensor(cache.manager.slots("a", 0, 2)), new, 2 * new)
    cache.manager.commit("a")
    cache.manager.fork("a", "b")
    cache.prepare(cache.manager.append("b", [3]))
    cache.write(1, torch.tensor(cache.manager.slots("b", 2, 3)), 5 * new[:1], 5 * new[:1])
    keys, values = cache.gather(1, cache.tables(["a", "b"]))
    assert keys[:, 0, :3, 0].tolist() == [[1, 1, 0], [1, 1, 5]]
    assert values[:, 0, :3, 0].tolist() == [[2, 2, 0], [2, 2, 5]]


def test_bytes_are_those_of_the_pool(tiny_llama):
    """Fault: half of the pool (the values), or the element size, is forgotten in the count."""
    cache = PagedKVCache(tiny_llama.config, num_blocks=3, block_size=16, dtype=torch.bfloat16)
    assert cache.nbytes == 4 * 3 * 2 * 16 * 2 * 8 * 2  # blocks, layers, k and v, tokens, heads, head_dim, bytes


# --- waste ---


def test_waste_is_counted_in_slots():
    """Fault: waste counted in requests or pages, or by the mean of means."""
    assert contiguous_use([10, 30], [100, 100]).waste == pytest.approx(0.8)
    use = paged_use([10, 30, 0, 16], page_size=16)
    assert (use.held, use.used, use.wasted) == (64, 56, 8)
    assert paged_use([]).waste == 0.0
    with pytest.raises(ValueError, match="does not fit"):
        contiguous_use([11], [10])
    with pytest.raises(ValueError, match="page_size"):
        paged_use([1], page_size=0)
