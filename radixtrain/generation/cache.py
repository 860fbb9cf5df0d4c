"""A radix tree over token ids that records which key/value rows of a prefix are computed already.

    cache = RadixCache(max_tokens=100_000)
    node, slots = cache.match_prefix(prompt)             # rows that exist: compute none of them again
    cache.lock(node)                                     # none of them is evicted from here on
    new = cache.reserve(len(prompt) - len(slots))        # where to write the others; evicts what was not used recently
    ...                                                  # compute them; if that fails: cache.cancel(new)
    end = cache.insert(prompt, np.append(slots, new))
    cache.unlock(node)

Every node owns a run of tokens and the slots (`radixtrain/generation/store.py`) that hold their rows. A row depends on
all tokens before it, so that a slot belongs to one prefix and to no other. Only leaves are evicted: no prefix loses its
beginning. The tree is NumPy; the rows are in `RadixCache.store`.
"""

from __future__ import annotations

import heapq
import sys
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count as counted_up
from threading import RLock
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from torch import nn

from radixtrain.errors import UserError
from radixtrain.generation.fingerprint import fingerprint
from radixtrain.generation.store import KeyValueStore, SlotPool
from radixtrain.tree.arrays import IntArray
from radixtrain.tree.cached_layout import path_to_root

FREE, RESERVED, CACHED = 0, 1, 2  # what this cache uses a slot for


class CacheFull(UserError):
    """Locked and reserved tokens leave too little room in the budget."""


@dataclass(eq=False, slots=True)
class Node:
    """A run of tokens that all sequences through this node share.

    tokens: (n,), int64. n is 0 for the root only.
    slots: (n,), int64. where the rows of these tokens are.
    parent: the node above. None for the root, and for a node that left the tree.
    children: the nodes below, by their first token.
    locks: locks on this node and on all those below it.
    own_locks: locks on this node itself.
    last_used: number of the last lookup or insertion that passed here, counted from 1.
    queued: whether it is in the `LeafQueue`.
    """

    tokens: IntArray
    slots: IntArray
    parent: Node | None
    children: dict[int, Node] = field(default_factory=dict)
    locks: int = 0
    own_locks: int = 0
    last_used: int = 0
    queued: bool = False

    def __repr__(self) -> str:
        return f"Node({_shortened(self.tokens)}, {_counted(len(self.tokens), 'token')}, {_counted(self.locks, 'lock')})"

    @property
    def evictable(self) -> bool:
        """Return whether this is a leaf of the tree without locks."""
        return self.parent is not None and not self.children and not self.locks

    def split(self, length: int) -> Node:
        """Make a new node for the first `length` tokens. This one keeps the others, and remains the end of its path.

        Locks on this node hold for the new one too.
        """
        assert self.parent is not None and 0 < length < len(self.tokens)
        upper = Node(self.tokens[:length], self.slots[:length], self.parent, locks=self.locks, last_used=self.last_used)
        self.parent.children[int(self.tokens[0])] = upper
        self.tokens, self.slots, self.parent = self.tokens[length:], self.slots[length:], upper
        upper.children[int(self.tokens[0])] = self
        return upper


class LeafQueue:
    """Leaves without locks, to be evicted in the order of their last use.

    A leaf is queued once, under the time at which it was added. Times only grow: `pop` requeues a leaf that was used
    since, and drops one that is locked or has children by now, so that neither lookups nor locks touch the queue. Code
    that makes a node evictable adds it.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Node]] = []
        self._serial = counted_up()  # nodes themselves have no order

    def add(self, node: Node) -> None:
        """Add a node if it is evictable and not queued yet."""
        if node.evictable and not node.queued:
            node.queued = True
            heapq.heappush(self._heap, (node.last_used, next(self._serial), node))

    def pop(self) -> Node | None:
        """Remove the least recently used leaf and return it; None if all are locked."""
        while self._heap:
            added_at, _, leaf = heapq.heappop(self._heap)
            leaf.queued = False
            if leaf.evictable and leaf.last_used == added_at:
                return leaf
            self.add(leaf)
        return None


class Match(NamedTuple):
    """The longest cached prefix. slots: (m,), int64, of its tokens; node: where it ends, the root if m is 0."""

    node: Node
    slots: IntArray


@dataclass
class CacheCounters:
    """What happened since the cache was made. A lookup is a call of `match_prefix` that counts.

    num_tokens, num_hits: tokens looked up, and those of them that were found.
    num_evictions, num_evicted_tokens: leaves that were evicted, whole or in part, and their tokens.
    """

    num_lookups: int = 0
    num_tokens: int = 0
    num_hits: int = 0
    num_evictions: int = 0
    num_evicted_tokens: int = 0

    @property
    def hit_rate(self) -> float:
        """Return the tokens found per token looked up; 0 before the first lookup."""
        return self.num_hits / self.num_tokens if self.num_tokens else 0.0


class RadixCache:
    """A radix tree over token ids. Every node owns the slots of its tokens.

    max_tokens: budget of tokens in the tree and reserved slots together; None: no limit.
    pool: the slots of the store. Slots taken directly are outside the tree and the budget: `shrink` after a release.
    store: the rows themselves.
    counters: lookups, hits and evictions so far.

    Several threads may call it; `exclusive()` keeps the others out for longer than a call. Raises UserError unless
    max_tokens is None or a whole number >= 1.
    """

    def __init__(self, max_tokens: int | None = None):
        whole = isinstance(max_tokens, int) and not isinstance(max_tokens, bool)
        if max_tokens is not None and (not whole or max_tokens < 1):
            raise UserError(
                f"max_tokens must be a whole number of tokens >= 1, or None for no limit, got {max_tokens!r}"
            )
        self.max_tokens = max_tokens
        self._budget = sys.maxsize if max_tokens is None else max_tokens
        self.pool = SlotPool()
        self.store = KeyValueStore(self.pool)
        self.counters = CacheCounters()
        self._use = np.zeros(0, dtype=np.int8)  # of each slot: FREE, RESERVED or CACHED
        self._num_reserved = self._clock = 0
        self._fingerprint: Hashable = None
        self._rlock = RLock()
        self._reset_tree()

    def _reset_tree(self) -> None:
        """Start with an empty tree."""
        none = np.zeros(0, dtype=np.int64)
        self.root = Node(none, none, None)
        self._num_cached = self._num_locked = self._num_nodes = 0
        self._leaves = LeafQueue()

    @property
    def num_tokens(self) -> int:
        """Count the tokens in the tree and the reserved slots, which the budget limits."""
        return self._num_cached + self._num_reserved

    @property
    def num_reserved(self) -> int:
        """Count the slots that are reserved and neither inserted nor cancelled yet."""
        return self._num_reserved

    @property
    def num_available(self) -> int:
        """Count the tokens that `reserve` can have if it evicts what is not locked."""
        return self._budget - self._num_reserved - self._num_locked

    @property
    def num_free(self) -> int:
        """Count the tokens that `reserve` can have without evictions."""
        return self._budget - self.num_tokens

    @property
    def num_nodes(self) -> int:
        """Count the nodes of the tree, without the root."""
        return self._num_nodes

    @contextmanager
    def exclusive(self) -> Iterator[RadixCache]:
        """Keep other threads out until the end of the block: `with cache.exclusive():`."""
        with self._rlock:
            yield self

    def match_prefix(self, token_ids: ArrayLike, count: bool = True) -> Match:
        """Find the longest cached prefix of `token_ids`, and mark it as used just now.

        token_ids: (n,), integers.
        count: whether the counters count it as a lookup.

        A node in which the prefix ends is split there, so that `Match.node` ends where the prefix does. The slots hold
        these rows until the node is evicted: `lock` it before the next call that may evict.
        """
        ids = np.asarray(token_ids, dtype=np.int64)
        with self._rlock:
            match = self._walk(ids)
            if count:
                self.counters.num_lookups += 1
                self.counters.num_tokens += len(ids)
                self.counters.num_hits += len(match.slots)
            return match

    def reserve(self, count: int, contiguous: bool = False) -> IntArray:
        """Reserve slots, (count,), int64, ascending, for rows about to be computed: then `insert` or `cancel` them.

        contiguous: one run of slots, as a lane needs.

        Evicts as much as the budget requires. Raises CacheFull, and evicts nothing, if that is not possible.
        """
        with self._rlock:
            if count > self.num_available:
                raise CacheFull(
                    f"a cache of max_tokens={self.max_tokens} has room for {self.num_available} more tokens while the "
                    f"others are in use, and {count} are needed: raise max_tokens"
                )
            self.evict(count - self.num_free)
            slots = self.pool.allocate(count, contiguous, ahead=min(self.num_tokens, self.num_free - count))
            self._fit_to_pool()
            self._use[slots] = RESERVED
            self._num_reserved += count
            return slots

    def cancel(self, slots: IntArray) -> None:
        """Give reserved slots back."""
        with self._rlock:
            assert self._are_reserved(slots)
            self._num_reserved -= len(slots)
            self._release(slots)

    def insert(self, token_ids: ArrayLike, slots: ArrayLike) -> Node:
        """Make the rows of `token_ids` part of the tree, and return the node where they end.

        token_ids, slots: (n,), integers. Where the row of each token is.

        Tokens that the tree has already keep their slots. Given slots that differ are released if still reserved:
        another sequence with the same rows may just have been inserted. Slots of new tokens must all be reserved.
        """
        ids, slots = np.asarray(token_ids, dtype=np.int64), np.asarray(slots, dtype=np.int64)
        with self._rlock:
            node, held = self._walk(ids)
            depth = len(held)
            new, unused = slots[depth:], slots[:depth][slots[:depth] != held]
            unused = unused[self._use[unused] == RESERVED]
            assert len(ids) == len(slots) and self._are_reserved(np.append(unused, new))
            self._num_reserved -= len(unused) + len(new)
            self._release(unused)
            return self._add_leaf(node, ids[depth:].copy(), new.copy()) if len(new) else node

    def lock(self, node: Node) -> None:
        """Keep a node and the path to it from being evicted, until as many calls of `unlock`."""
        with self._rlock:
            assert node.parent is not None or node is self.root, f"{node} was evicted before it was locked"
            node.own_locks += 1
            for above in path_to_root(node):
                above.locks += 1
                if above.locks == 1:
                    self._num_locked += len(above.tokens)

    def unlock(self, node: Node) -> None:
        """Remove one lock of `node`."""
        with self._rlock:
            assert node.own_locks, f"{node} was unlocked more often than it was locked"
            node.own_locks -= 1
            for above in path_to_root(node):
                above.locks -= 1
                if not above.locks:
                    self._num_locked -= len(above.tokens)
            self._leaves.add(node)

    def evict(self, count: int) -> int:
        """Evict `count` tokens, or all that is not locked if that is less; return how many.

        The least recently used leaf goes first; the last leaf loses only as much of its end as is needed.
        """
        freed = 0
        with self._rlock:
            while freed < count and (leaf := self._leaves.pop()):
                length = min(len(leaf.tokens), count - freed)
                self._cut(leaf, len(leaf.tokens) - length)
                freed += length
        return freed

    def clear(self) -> None:
        """Empty the tree and the store. Raises RuntimeError if a node is locked or a slot reserved."""
        with self._rlock:
            if self.root.locks or self._num_reserved:
                raise RuntimeError(
                    f"the cache is in use ({self.root.locks} locks, {self._num_reserved} reserved slots) and cannot be "
                    "cleared"
                )
            nodes = [node for _, node in nodes_below(self.root)]
            for node in nodes:
                node.parent, node.children, node.queued = None, {}, False
            self._release(np.concatenate([self.root.slots, *(node.slots for node in nodes)]))
            self._reset_tree()
            self._trim(0)

    def shrink(self) -> None:
        """Give back the memory beyond the budget, or without a budget beyond twice what the tree holds.

        Called at the end of a call that took slots from the pool. Locked and reserved slots do not move.
        """
        with self._rlock:
            bound = 2 * self.num_tokens if self.max_tokens is None else self.max_tokens
            if self.pool.capacity > bound:
                self._move_below(bound)
                self._trim(bound)

    def of_model(self, model: nn.Module) -> None:
        """Empty the cache if it holds rows of another model, or of its earlier weights."""
        with self._rlock:
            holds, found = self._fingerprint, fingerprint(model)
            if holds is not None and holds != found:
                self.clear()
            self._fingerprint = found

    def __repr__(self) -> str:
        return f"RadixCache(max_tokens={self.max_tokens}, num_tokens={self.num_tokens}, num_nodes={self.num_nodes})"

    def __str__(self) -> str:
        """Draw the tree, a node per line: tokens, their number, and the locks if there are any."""
        with self._rlock:
            limit = "no limit" if self.max_tokens is None else f"at most {self.max_tokens}"
            head = f"RadixCache: {self.num_tokens} tokens ({limit}), {self.num_reserved} of them reserved"
            return "\n".join([head, *draw(self.root)])

    def _walk(self, ids: IntArray) -> Match:
        """Find the longest cached prefix, splitting the node in which it ends. Marks the path as used."""
        self._clock += 1
        node, depth, parts = self.root, 0, [self.root.slots]
        while depth < len(ids) and (child := node.children.get(int(ids[depth]))):
            shared = num_shared_tokens(child.tokens, ids[depth:])
            if shared < len(child.tokens):
                child = child.split(shared)
                self._num_nodes += 1
            node = child
            node.last_used = self._clock
            parts.append(node.slots)
            depth += shared
        return Match(node, np.concatenate(parts))

    def _add_leaf(self, parent: Node, tokens: IntArray, slots: IntArray) -> Node:
        leaf = Node(tokens, slots, parent, last_used=self._clock)
        parent.children[int(tokens[0])] = leaf
        self._use[slots] = CACHED
        self._num_cached += len(tokens)
        self._num_nodes += 1
        self._leaves.add(leaf)
        return leaf

    def _cut(self, leaf: Node, length: int) -> None:
        """Evict all but the first `length` tokens of a leaf."""
        gone = leaf.slots[length:]
        self._num_cached -= len(gone)
        self.counters.num_evictions += 1
        self.counters.num_evicted_tokens += len(gone)
        self._release(gone)
        if length:
            leaf.tokens, leaf.slots = leaf.tokens[:length], leaf.slots[:length]
            self._leaves.add(leaf)
            return
        parent, leaf.parent = leaf.parent, None
        assert parent is not None
        del parent.children[int(leaf.tokens[0])]
        self._num_nodes -= 1
        self._leaves.add(parent)

    def _move_below(self, bound: int) -> None:
        """Move rows of the tree to free slots below `bound`, unless other code may know where they are."""
        nodes = [node for _, node in nodes_below(self.root) if not node.locks and (node.slots >= bound).any()]
        slots = np.concatenate([self.root.slots, *(node.slots for node in nodes)])
        beyond = slots[slots >= bound]
        free = self.pool.allocate_lowest(len(beyond), bound)
        beyond = beyond[: len(free)]
        try:
            self.store.copy(beyond, free)
        except BaseException:
            self.pool.release(free)
            raise
        moved = np.arange(self.pool.capacity)
        moved[beyond] = free
        for node in nodes:
            node.slots = moved[node.slots]
        self._fit_to_pool()
        self._use[free] = CACHED
        self._release(beyond)

    def _trim(self, capacity: int) -> None:
        self.pool.trim(capacity)
        self._fit_to_pool()
        self.store.shrink()

    def _fit_to_pool(self) -> None:
        """Give `_use` an entry for every slot that the pool has by now."""
        new = max(0, self.pool.capacity - len(self._use))
        self._use = np.append(self._use[: self.pool.capacity], np.zeros(new, dtype=np.int8))

    def _are_reserved(self, slots: IntArray) -> bool:
        """Return whether all of the slots are reserved and distinct."""
        return bool((self._use[slots] == RESERVED).all()) and len(np.unique(slots)) == len(slots)

    def _release(self, slots: IntArray) -> None:
        self.pool.release(slots)
        self._use[slots] = FREE


def nodes_below(root: Node) -> Iterator[tuple[int, Node]]:
    """Yield depth and node, a parent before its children; those of the root have depth 1."""
    stack = [(1, child) for child in reversed(root.children.values())]
    while stack:
        depth, node = stack.pop()
        stack += [(depth + 1, child) for child in reversed(node.children.values())]
        yield depth, node


def num_shared_tokens(one: IntArray, other: IntArray) -> int:
    """Count the common first tokens of two arrays."""
    size = min(len(one), len(other))
    differs = np.flatnonzero(one[:size] != other[:size])
    return int(differs[0]) if len(differs) else size


def draw(root: Node) -> Iterator[str]:
    """Yield a line for each node, indented by its depth: tokens, their number, and the locks if there are any."""
    for depth, node in nodes_below(root):
        locks = f", {_counted(node.locks, 'lock')}" if node.locks else ""
        yield f"{'  ' * depth}{_shortened(node.tokens)} {_counted(len(node.tokens), 'token')}{locks}"


def _shortened(tokens: IntArray) -> str:
    """Show the first six tokens and the last two."""
    shown = [*tokens[:6].tolist(), *(["..."] if len(tokens) > 8 else []), *tokens[6:][-2:].tolist()]
    return f"[{', '.join(map(str, shown))}]"


def _counted(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
