"""The cache against an oracle of plain prefixes, over random operations.

The oracle is a dict from every stored prefix, a tuple of tokens, to when it was used. It predicts what each operation
finds and evicts, one token at a time. What is stored for a token is its own prefix, so that a wrong row is seen. After
every operation the whole tree is compared: 4,000 operations, and 20,000 in `make test-full`.
"""

from collections import Counter
from collections.abc import Callable
from itertools import takewhile
from typing import Any

import numpy as np
import pytest

from radixtrain.generation.cache import CacheCounters, Match, Node, RadixCache
from tests.claims.mistakes import SEEN, plant
from tests.support import TRIES

OPERATIONS = 400 * TRIES
VOCABULARY, LONGEST, BUDGET = 3, 8, 40
Prefix = tuple[int, ...]


def prefixes(ids: Prefix) -> list[Prefix]:
    return [ids[:length] for length in range(1, len(ids) + 1)]


class Walk:
    """Random operations on a cache and its oracle, compared after each."""

    def __init__(self, seed: int, budget: int | None = BUDGET) -> None:
        self.rng, self.cache = np.random.default_rng(seed), RadixCache(budget)
        self.used: dict[Prefix, int] = {}  # when each stored prefix was looked up or inserted last
        self.locks: Counter[Prefix] = Counter()
        self.locked: list[tuple[Node, Prefix]] = []
        self.now = self.num_looked_up = self.num_found = self.num_evicted = 0

    def run(self, num_operations: int) -> None:
        kinds = [self.match, self.insert, self.lock, self.unlock, self.evict, self.fit, self.clear]
        shares = np.array([0.2, 0.35, 0.12, 0.14, 0.08, 0.1, 0.01])
        for kind in self.rng.choice(len(kinds), size=num_operations, p=shares):
            kinds[kind]()
            self.compare()

    def ids(self) -> Prefix:
        return tuple(self.rng.integers(VOCABULARY, size=self.rng.integers(LONGEST + 1)).tolist())

    def use(self, used: list[Prefix]) -> None:
        self.now += 1
        self.used.update(dict.fromkeys(used, self.now))

    def match(self) -> Match:
        ids = self.ids()
        match, stored = self.cache.match_prefix(ids), [*takewhile(self.used.__contains__, prefixes(ids))]
        self.use(stored)
        self.num_looked_up += len(ids)
        self.num_found += len(stored)
        assert match.length == len(stored) and path_of(match.node) == ids[: len(stored)]
        return match

    def insert(self) -> None:
        ids = self.ids()
        self.use(prefixes(ids))
        assert path_of(self.cache.insert(ids, lambda start: prefixes(ids)[start:])) == ids

    def lock(self) -> None:
        node = self.match().node
        self.cache.lock(node)
        self.locks.update(prefixes(path_of(node)))
        self.locked.append((node, path_of(node)))

    def unlock(self) -> None:
        if self.locked:
            node, prefix = self.locked.pop(self.rng.integers(len(self.locked)))
            assert path_of(node) == prefix
            self.cache.unlock(node)
            self.locks.subtract(prefixes(prefix))

    def evict(self) -> None:
        count = int(self.rng.integers(2 * LONGEST))
        assert self.cache.evict(count) == self.evicted_of(count)

    def fit(self) -> None:
        self.cache.evict_to_budget()
        if self.cache.max_tokens is not None:
            self.evicted_of(len(self.used) - self.cache.max_tokens)

    def evicted_of(self, count: int) -> int:
        """The oldest prefix goes that is not locked and that no other continues; then the next one."""
        freed, inner = 0, Counter(prefix[:-1] for prefix in self.used)
        while freed < count:
            ends = [prefix for prefix in self.used if not inner[prefix] and not self.locks[prefix]]
            if not ends:
                break
            gone = min(ends, key=self.used.__getitem__)
            inner[gone[:-1]] -= 1
            del self.used[gone]
            freed += 1
        self.num_evicted += freed
        return freed

    def clear(self) -> None:
        if self.locked:
            with pytest.raises(RuntimeError, match="in use"):
                self.cache.clear()
        while self.locked:
            self.unlock()
        self.cache.clear()
        self.used.clear()

    def compare(self) -> None:
        cache, stored = self.cache, dict[Prefix, int]()
        for node in cache.nodes:
            assert node.parent is not None and node.parent.children[int(node.tokens[0])] is node
            path = path_of(node)
            assert node.start == len(path) - len(node.tokens)
            assert node.rows == prefixes(path)[-len(node.tokens) :], "a wrong row"
            stored |= dict.fromkeys(node.rows, node.locks)
        assert stored.keys() == self.used.keys() and cache.num_tokens == len(stored)
        assert all(self.locks[prefix] == locks for prefix, locks in stored.items())
        assert cache.counters == CacheCounters(self.num_looked_up, self.num_found, 0, self.num_evicted)


def path_of(node: Node) -> Prefix:
    return tuple(token for above in node.path for token in above.tokens.tolist())


@pytest.mark.parametrize(("budget", "share"), [(BUDGET, 0.6), (2 * BUDGET, 0.3), (None, 0.1)])
def test_random_operations(budget: int | None, share: float, print_after: Callable[[str, str], None]) -> None:
    walk, number = Walk(seed=0, budget=budget), int(share * OPERATIONS)
    walk.run(number)
    assert walk.num_evicted > 0.01 * number
    print_after(
        "generation: the cache against an oracle of plain prefixes",
        f"budget {budget}: {number} operations, {walk.num_found} of {walk.num_looked_up} tokens found, "
        f"{walk.num_evicted} evicted",
    )


def split_that_swaps_the_rows(real: Any, node: Node, length: int) -> Node:
    node.rows = [*node.rows[length:], *node.rows[:length]]
    return real(node, length)  # type: ignore[no-any-return]


def walk_that_forgets_the_time(real: Any, cache: RadixCache, ids: Any) -> Match:
    match: Match = real(cache, ids)
    match.node.last_used -= 1
    return match


def evict_as_if_zero(name: str) -> Callable[..., int]:
    """Evict by nodes of which something is 0 meanwhile."""

    def evict(real: Any, cache: RadixCache, num_tokens: int) -> int:
        before = {node: getattr(node, name) for node in cache.nodes}
        for node in before:
            setattr(node, name, 0)
        freed: int = real(cache, num_tokens)
        for node, value in before.items():
            setattr(node, name, value)
        return freed

    return evict


MUTATIONS: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "a split swaps its halves": (Node, "split", split_that_swaps_the_rows),
    "inner nodes are evicted": (RadixCache, "evict", evict_as_if_zero("start")),
    "locked leaves are evicted": (RadixCache, "evict", evict_as_if_zero("locks")),
    "any leaf is evicted": (RadixCache, "evict", evict_as_if_zero("last_used")),
    "a lookup is not a use": (RadixCache, "_walk", walk_that_forgets_the_time),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_mutation_is_caught(mutation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, *MUTATIONS[mutation])
    with pytest.raises((*SEEN, KeyError)):
        Walk(seed=0).run(2000)
