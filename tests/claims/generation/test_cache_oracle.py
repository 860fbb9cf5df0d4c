"""The cache against an oracle of plain prefixes, over random operations.

The oracle is a dict from every cached prefix, a tuple of tokens, to the slot that holds its row. It predicts what each
operation finds, refuses and evicts, one token at a time. Each slot remembers for which prefix it was written, so that a
wrong row is seen. After every operation the whole tree is compared: 4,000 operations, and 20,000 in `make test-full`.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from tiers import TRIES

from radixtrain.generation.cache import CACHED, FREE, RESERVED, CacheFull, Match, Node, RadixCache
from radixtrain.tree.arrays import IntArray

OPERATIONS = 400 * TRIES
VOCABULARY, LONGEST, BUDGET = 3, 8, 40
Prefix = tuple[int, ...]


class Oracle:
    """What a cache of `budget` tokens holds, prefix by prefix."""

    def __init__(self, budget: int | None) -> None:
        self.budget = budget
        self.slot_of: dict[Prefix, int] = {}
        self.used: dict[Prefix, int] = {}  # when it was looked up or inserted last
        self.locks: Counter[Prefix] = Counter()
        self.reserved: set[int] = set()
        self.now = 0
        self.evicted = 0

    def find(self, ids: Prefix) -> list[int]:
        """The slots of the longest cached prefix."""
        self.now += 1
        slots = []
        for prefix in prefixes(ids):
            if prefix not in self.slot_of:
                break
            self.used[prefix] = self.now
            slots.append(self.slot_of[prefix])
        return slots

    def available(self) -> int:
        assert self.budget is not None
        return self.budget - len(self.reserved) - sum(self.locks[prefix] > 0 for prefix in self.slot_of)

    def make_room(self, count: int) -> None:
        if self.budget is not None:
            self.evict(len(self.slot_of) + len(self.reserved) + count - self.budget)

    def evict(self, count: int) -> int:
        """The oldest prefix goes that is not locked and that no other continues; then the next one."""
        freed = 0
        inner = Counter(prefix[:-1] for prefix in self.slot_of)
        while freed < count:
            ends = [prefix for prefix in self.slot_of if not inner[prefix] and not self.locks[prefix]]
            if not ends:
                break
            gone = min(ends, key=self.used.__getitem__)
            inner[gone[:-1]] -= 1
            del self.slot_of[gone]
            freed += 1
        self.evicted += freed
        return freed

    def insert(self, ids: Prefix, slots: list[int]) -> None:
        held = self.find(ids)
        for depth, (prefix, slot) in enumerate(zip(prefixes(ids), slots, strict=True)):
            if depth >= len(held):
                assert slot in self.reserved
                self.slot_of[prefix], self.used[prefix] = slot, self.now
            self.reserved.discard(slot)


def prefixes(ids: Prefix) -> Iterator[Prefix]:
    return (ids[:length] for length in range(1, len(ids) + 1))


class Walk:
    """Random operations on a cache and its oracle, compared after each."""

    def __init__(self, seed: int, budget: int | None = BUDGET) -> None:
        self.rng = np.random.default_rng(seed)
        self.cache, self.oracle = RadixCache(budget), Oracle(budget)
        self.written: dict[int, Prefix] = {}  # slot -> the prefix whose row was written there last
        self.cache.store.copy = self.copy  # type: ignore[method-assign]
        self.locked: list[tuple[Node, Prefix]] = []
        self.running: list[tuple[Node, list[Prefix], list[list[int]], Prefix]] = []
        self.looked_up = [0, 0, 0]
        self.done: Counter[str] = Counter()

    def run(self, num_operations: int) -> None:
        kinds = [self.match, self.start, self.finish, self.fail, self.lock, self.unlock, self.evict, self.clear]
        kinds += [self.shrink]
        shares = np.array([0.15, 0.3, 0.2, 0.04, 0.1, 0.12, 0.07, 0.01, 0.01])
        for kind in self.rng.choice(len(kinds), size=num_operations, p=shares):
            kinds[kind]()
            self.done[kinds[kind].__name__] += 1
            self.compare()

    def ids(self) -> Prefix:
        return tuple(self.rng.integers(VOCABULARY, size=self.rng.integers(LONGEST + 1)).tolist())

    def one_of(self, things: list[Any]) -> Any:
        return things.pop(self.rng.integers(len(things))) if things else None

    def look_up(self, ids: Prefix) -> tuple[Node, list[int], Prefix]:
        node, slots = self.cache.match_prefix(ids)
        self.looked_up = [a + b for a, b in zip(self.looked_up, (1, len(ids), len(slots)), strict=True)]
        assert slots.dtype == np.int64 and slots.tolist() == self.oracle.find(ids)
        assert path_of(node) == ids[: len(slots)]
        return node, slots.tolist(), ids[: len(slots)]

    def match(self) -> None:
        _, slots, found = self.look_up(self.ids())
        assert [self.written[slot] for slot in slots] == list(prefixes(found)), "a wrong row"

    def start(self) -> None:
        """One or two sequences that go on from one matched prefix; they share what rows they can."""
        ids = self.ids()
        node, slots, found = self.look_up(ids)
        self.hold(node, found)
        batch = [ids]
        if self.rng.random() < 0.5:
            depth = self.rng.integers(len(found), len(ids) + 1)
            batch.append(ids[:depth] + self.ids())
        new = list(dict.fromkeys(prefix for each in batch for prefix in prefixes(each) if len(prefix) > len(found)))
        reserved = self.reserve(len(new))
        if reserved is None:
            return self.let_go(node, found)
        rows = dict(zip(prefixes(found), slots, strict=True)) | dict(zip(new, reserved, strict=True))
        self.written |= dict(zip(reserved, new, strict=True))
        self.running.append((node, batch, [[rows[prefix] for prefix in prefixes(each)] for each in batch], found))

    def reserve(self, count: int) -> list[int] | None:
        oracle, contiguous = self.oracle, bool(self.rng.random() < 0.3)
        fits = oracle.budget is None or count <= oracle.available()
        try:
            slots = self.cache.reserve(count, contiguous)
        except CacheFull as error:
            self.done["full"] += 1
            numbers = f"room for {oracle.available()} more tokens", f"{count} are needed"
            assert not fits and all(number in str(error) for number in numbers)
            return None
        assert fits and len(slots) == count and (np.diff(slots) > 0).all() and not oracle.reserved & set(slots.tolist())
        assert not contiguous or (np.diff(slots) == 1).all()
        oracle.make_room(count)
        oracle.reserved |= set(slots.tolist())
        return slots.tolist()  # type: ignore[no-any-return]

    def finish(self) -> None:
        if run := self.one_of(self.running):
            node, batch, slots, found = run
            for ids, own in zip(batch, slots, strict=True):
                self.oracle.insert(ids, own)
                end = self.cache.insert(ids, own)
                assert path_of(end) == ids
            self.let_go(node, found)

    def fail(self) -> None:
        if run := self.one_of(self.running):
            node, _, slots, found = run
            unused = {slot for own in slots for slot in own[len(found) :]}
            self.cache.cancel(self.rng.permutation(np.array(sorted(unused), dtype=np.int64)))
            self.oracle.reserved -= unused
            self.let_go(node, found)

    def lock(self) -> None:
        node, _, found = self.look_up(self.ids())
        self.hold(node, found)
        self.locked.append((node, found))

    def unlock(self) -> None:
        if held := self.one_of(self.locked):
            self.let_go(*held)

    def evict(self) -> None:
        count = int(self.rng.integers(2 * LONGEST))
        expected = self.oracle.evict(count)
        assert self.cache.evict(count) == expected

    def clear(self) -> None:
        if self.running or self.locked:
            with pytest.raises(RuntimeError, match="in use"):
                self.cache.clear()
            if self.rng.random() < 0.5:
                return
        while self.running:
            self.finish()
        while self.locked:
            self.unlock()
        self.cache.clear()
        self.oracle.slot_of.clear()

    def shrink(self) -> None:
        """After lanes, beside which sequences started: only rows that nobody holds move, and all they can."""
        pool, budget = self.cache.pool, self.oracle.budget
        lanes = pool.allocate(int(self.rng.integers(3 * BUDGET)), contiguous=True)
        for operation in (self.start, self.start, self.finish):
            operation()
        pool.release(lanes)
        self.cache.shrink()
        held = self.oracle.reserved.copy()
        for prefix, slot in tree_of(self.cache).slots.items():
            if self.oracle.locks[prefix]:
                held.add(slot)
            else:
                self.oracle.slot_of[prefix] = slot
        bound = 2 * self.cache.num_tokens if budget is None else budget
        assert pool.capacity <= max(bound, max(held, default=-1) + 1)

    def copy(self, from_slots: IntArray, to_slots: IntArray) -> None:
        for source, target in zip(from_slots.tolist(), to_slots.tolist(), strict=True):
            self.written[target] = self.written[source]

    def hold(self, node: Node, prefix: Prefix) -> None:
        self.cache.lock(node)
        self.oracle.locks.update(prefixes(prefix))

    def let_go(self, node: Node, prefix: Prefix) -> None:
        assert path_of(node) == prefix
        self.cache.unlock(node)
        self.oracle.locks.subtract(prefixes(prefix))

    def compare(self) -> None:
        cache, oracle = self.cache, self.oracle
        tree = tree_of(cache)
        assert tree.slots == oracle.slot_of
        assert all(tree.locks[prefix] == oracle.locks[prefix] for prefix in tree.locks)
        for prefix, slot in tree.slots.items():
            assert self.written[slot] == prefix, f"slot {slot} of {prefix} holds the row of {self.written[slot]}"
        check_slots(cache, oracle.reserved, set(tree.slots.values()))
        assert cache.num_nodes == tree.num_nodes
        assert len(cache._leaves._heap) <= tree.num_nodes
        counters = cache.counters
        assert [counters.num_lookups, counters.num_tokens, counters.num_hits] == self.looked_up
        assert counters.num_evicted_tokens == oracle.evicted >= counters.num_evictions


@dataclass
class Tree:
    """What the nodes of a cache hold: slot and locks by prefix."""

    slots: dict[Prefix, int] = field(default_factory=dict)
    locks: dict[Prefix, int] = field(default_factory=dict)
    num_nodes: int = 0


def tree_of(cache: RadixCache) -> Tree:
    """Read from the nodes themselves; AssertionError if they contradict each other."""
    tree, stack = Tree(), [(cache.root, ())]
    while stack:
        parent, above = stack.pop()
        assert parent.locks == parent.own_locks + sum(child.locks for child in parent.children.values())
        for first, node in parent.children.items():
            tokens = node.tokens.tolist()
            assert (
                node.parent is parent and tokens[0] == first and node.last_used <= max(parent.last_used, cache._clock)
            )
            assert node.children or node.locks or node.queued, "a leaf that will never be evicted"
            path = (*above, *tokens)
            for length, slot in enumerate(node.slots.tolist(), len(above) + 1):
                tree.slots[path[:length]], tree.locks[path[:length]] = slot, node.locks
            assert len(node.slots) == len(tokens)
            tree.num_nodes += 1
            stack.append((node, path))
    return tree


def check_slots(cache: RadixCache, reserved: set[int], cached: set[int]) -> None:
    """Each slot is free, reserved or cached, in the pool's eyes and the cache's, and the budget is kept."""
    pool = cache.pool
    use = np.full(pool.capacity, FREE)
    use[list(reserved)], use[list(cached)] = RESERVED, CACHED
    assert not reserved & cached and np.array_equal(cache._use, use)
    free = np.zeros(pool.capacity, dtype=bool)
    for start, end in zip(pool._starts.tolist(), pool._ends.tolist(), strict=True):
        assert not free[max(start - 1, 0) : end].any(), "two runs that are one"
        free[start:end] = True
    assert np.array_equal(free, use == FREE) and free.sum() == pool.num_free
    assert cache.num_reserved == len(reserved) and cache.num_tokens == len(reserved) + len(cached)
    assert cache.max_tokens is None or cache.num_tokens <= cache.max_tokens


def path_of(node: Node | None) -> Prefix:
    path: list[int] = []
    while node is not None:
        path[:0] = node.tokens.tolist()
        node = node.parent
    return tuple(path)


@pytest.mark.parametrize("budget", [BUDGET, 2 * BUDGET, None])
def test_random_operations(budget: int | None, print_after: Callable[[str, str], None]) -> None:
    share = {BUDGET: 0.6, 2 * BUDGET: 0.3, None: 0.1}[budget]
    walk = Walk(seed=0, budget=budget)
    walk.run(int(share * OPERATIONS))
    done = walk.done
    assert min(done[name] for name in ("start", "finish", "fail", "evict")) > 0.03 * share * OPERATIONS
    assert budget is None or (done["full"] and walk.cache.counters.num_evictions > 0.05 * share * OPERATIONS)
    what = "no budget" if budget is None else f"budget {budget}"
    counters = walk.cache.counters
    print_after(
        "generation: the cache against an oracle of plain prefixes",
        f"{what}: {sum(done.values()) - done['full']} operations, {counters.hit_rate:.0%} of {counters.num_tokens} "
        f"tokens found, {counters.num_evictions} evictions, {done['full']} refused because the cache was full",
    )


SPLIT, WALK, RELEASE = Node.split, RadixCache._walk, RadixCache._release


def split_that_swaps_the_slots(node: Node, length: int) -> Node:
    node.slots = np.append(node.slots[length:], node.slots[:length])
    return SPLIT(node, length)


def walk_that_forgets_the_time(cache: RadixCache, ids: Any) -> Match:
    match = WALK(cache, ids)
    match.node.last_used -= 1
    return match


def release_of_one_slot_too_few(cache: RadixCache, slots: Any) -> None:
    RELEASE(cache, slots[1:])


MUTATIONS: dict[str, tuple[Any, str, Any]] = {
    "a split swaps its halves": (Node, "split", split_that_swaps_the_slots),
    "inner nodes are evicted": (Node, "evictable", property(lambda node: node.parent is not None and not node.locks)),
    "locked leaves are evicted": (Node, "evictable", property(lambda node: node.parent and not node.children)),
    "a lookup is not a use": (RadixCache, "_walk", walk_that_forgets_the_time),
    "a row that is held moves": (Node, "locks", property(lambda node: 0, lambda node, value: None)),
    "a slot leaks": (RadixCache, "_release", release_of_one_slot_too_few),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_mutation_is_caught(mutation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*MUTATIONS[mutation])
    with pytest.raises((AssertionError, KeyError, RuntimeError, ValueError)):
        Walk(seed=0).run(2000)
