"""A radix tree over token ids: what is stored for a prefix is found again by any sequence that begins with it.

    cache = RadixCache(max_tokens=100_000)
    match = cache.match_prefix(prompt)                   # match.length tokens are stored: compute only the others
    cache.lock(match.node)                               # none of them is evicted from here on
    ...
    end = cache.insert(prompt, rows_from)                # rows_from(start): what to store for prompt[start:]
    cache.unlock(match.node)
    cache.evict_to_budget()

Every node owns a run of tokens and what is stored for them. What a prompt's tokens need depends on all tokens before
them, so it belongs to one prefix and to no other. Only leaves are evicted: no prefix loses its beginning.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count as counted_up
from threading import RLock
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from radixtrain.errors import UserError
from radixtrain.tree.arrays import IntArray


@dataclass(eq=False, slots=True)
class Node:
    """A run of tokens that all sequences through this node share.

    tokens: (n,), int64. n is 0 for the root only.
    rows: what is stored for these tokens, one entry each; `rows[start:end]` is what is stored for some of them.
    parent: the node above. None for the root, and for a node that left the tree.
    children: the nodes below, by their first token.
    locks: locks on this node and on all those below it.
    own_locks: locks on this node itself.
    last_used: number of the last lookup or insertion that passed here, counted from 1.
    queued: whether it is in the `LeafQueue`.
    """

    tokens: IntArray
    rows: Any
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

    @property
    def path(self) -> list[Node]:
        """Return the nodes from the root to this one, without the root, which has no tokens."""
        return list(path_to_root(self))[-2::-1]

    def split(self, length: int) -> Node:
        """Make a new node for the first `length` tokens. This one keeps the others, and remains the end of its path.

        Locks on this node hold for the new one too.
        """
        assert self.parent is not None and 0 < length < len(self.tokens)
        upper = Node(self.tokens[:length], self.rows[:length], self.parent, locks=self.locks, last_used=self.last_used)
        self.parent.children[int(self.tokens[0])] = upper
        self.tokens, self.rows, self.parent = self.tokens[length:], self.rows[length:], upper
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
    """The longest stored prefix.

    node: the node in which it ends; the root if nothing was found.
    length: its tokens.
    """

    node: Node
    length: int


@dataclass
class CacheCounters:
    """What happened since the cache was made. A lookup is a call of `match_prefix` that counts.

    num_tokens, num_hits: tokens looked up, and those of them that were found.
    num_computed: the others as their user computed them, those that several prompts share once.
    num_evictions, num_evicted_tokens: leaves that were evicted, whole or in part, and their tokens.
    """

    num_lookups: int = 0
    num_tokens: int = 0
    num_hits: int = 0
    num_computed: int = 0
    num_evictions: int = 0
    num_evicted_tokens: int = 0

    @property
    def hit_rate(self) -> float:
        """Return the tokens found per token looked up; 0 before the first lookup."""
        return self.num_hits / self.num_tokens if self.num_tokens else 0.0


class RadixCache:
    """A radix tree over token ids. Every node owns what is stored for its tokens.

    max_tokens: tokens that stay after `evict_to_budget`; None: no limit. Locked ones stay in any case.
    counters: lookups, hits and evictions so far.

    Several threads may call it; `exclusive()` keeps the others out for longer than a call. Pass it to `generate`, or
    store anything that has an entry for each token.
    Raises UserError unless max_tokens is None or a whole number >= 1.

    >>> cache, tokens = RadixCache(max_tokens=1000), [7, 8, 9]
    >>> node = cache.insert(tokens, rows_from=lambda start: tokens[start:])
    >>> cache.match_prefix([7, 8, 5]).length
    2
    >>> cache.evict(1), cache.num_tokens
    (1, 2)
    """

    def __init__(self, max_tokens: int | None = None):
        whole = isinstance(max_tokens, int) and not isinstance(max_tokens, bool)
        if max_tokens is not None and (not whole or max_tokens < 1):
            raise UserError(
                f"max_tokens must be a whole number of tokens >= 1, or None for no limit, got {max_tokens!r}"
            )
        self.max_tokens = max_tokens
        self.counters = CacheCounters()
        self._clock = 0
        self._owner: Hashable = None
        self._rlock = RLock()
        self._reset_tree()

    def _reset_tree(self) -> None:
        """Start with an empty tree."""
        self.root = Node(np.zeros(0, dtype=np.int64), None, None)
        self._num_tokens = self._num_nodes = 0
        self._leaves = LeafQueue()

    @property
    def num_tokens(self) -> int:
        """Count the tokens in the tree."""
        return self._num_tokens

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
        """Find the longest stored prefix of `token_ids`, and mark it as used just now.

        token_ids: (n,), integers.
        count: whether the counters count it as a lookup.

        A node in which the prefix ends is split there, so that `Match.node` ends where the prefix does. `lock` it
        before the next call that may evict.
        """
        ids = np.asarray(token_ids, dtype=np.int64)
        with self._rlock:
            match = self._walk(ids)
            if count:
                self.counters.num_lookups += 1
                self.counters.num_tokens += len(ids)
                self.counters.num_hits += match.length
            return match

    def insert(self, token_ids: ArrayLike, rows_from: Callable[[int], Any]) -> Node:
        """Store what the tree does not have of a sequence, and return the node where the sequence ends.

        token_ids: (n,), integers.
        rows_from: from the number of tokens that the tree has already to what is stored for the others.
        """
        ids = np.asarray(token_ids, dtype=np.int64)
        with self._rlock:
            node, length = self._walk(ids)
            if length == len(ids):
                return node
            rows = rows_from(length)
            assert len(rows) == len(ids) - length
            leaf = Node(ids[length:].copy(), rows, node, last_used=self._clock)
            node.children[int(ids[length])] = leaf
            self._num_tokens += len(leaf.tokens)
            self._num_nodes += 1
            self._leaves.add(leaf)
            return leaf

    def lock(self, node: Node) -> None:
        """Keep a node and the path to it from being evicted, until as many calls of `unlock`."""
        with self._rlock:
            assert node.parent is not None or node is self.root, f"{node} was evicted before it was locked"
            node.own_locks += 1
            for above in path_to_root(node):
                above.locks += 1

    def unlock(self, node: Node) -> None:
        """Remove one lock of `node`."""
        with self._rlock:
            assert node.own_locks, f"{node} was unlocked more often than it was locked"
            node.own_locks -= 1
            for above in path_to_root(node):
                above.locks -= 1
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

    def evict_to_budget(self) -> None:
        """Evict what `max_tokens` leaves no room for."""
        if self.max_tokens is not None:
            self.evict(self.num_tokens - self.max_tokens)

    def clear(self) -> None:
        """Empty the tree. Raises RuntimeError if a node is locked."""
        with self._rlock:
            if self.root.locks:
                raise RuntimeError(f"the cache is in use ({self.root.locks} locks) and cannot be cleared")
            for _, node in list(nodes_below(self.root)):
                node.parent, node.children, node.queued = None, {}, False
            self._reset_tree()

    def belong_to(self, owner: Hashable) -> None:
        """Empty the cache if it holds what another owner has stored, such as a model with other weights."""
        with self._rlock:
            if self._owner is not None and self._owner != owner:
                self.clear()
            self._owner = owner

    def __repr__(self) -> str:
        return f"RadixCache(max_tokens={self.max_tokens}, num_tokens={self.num_tokens}, num_nodes={self.num_nodes})"

    def __str__(self) -> str:
        """Draw the tree, a node per line: tokens, their number, and the locks if there are any."""
        with self._rlock:
            limit = "no limit" if self.max_tokens is None else f"at most {self.max_tokens}"
            return "\n".join([f"RadixCache: {self.num_tokens} tokens ({limit})", *draw(self.root)])

    def _walk(self, ids: IntArray) -> Match:
        """Find the longest stored prefix, splitting the node in which it ends. Marks the path as used."""
        self._clock += 1
        node, depth = self.root, 0
        while depth < len(ids) and (child := node.children.get(int(ids[depth]))):
            shared = num_shared_tokens(child.tokens, ids[depth:])
            if shared < len(child.tokens):
                child = child.split(shared)
                self._num_nodes += 1
            node = child
            node.last_used = self._clock
            depth += shared
        return Match(node, depth)

    def _cut(self, leaf: Node, length: int) -> None:
        """Evict all but the first `length` tokens of a leaf."""
        num_gone = len(leaf.tokens) - length
        self._num_tokens -= num_gone
        self.counters.num_evictions += 1
        self.counters.num_evicted_tokens += num_gone
        if length:
            leaf.tokens, leaf.rows = leaf.tokens[:length], leaf.rows[:length]
            self._leaves.add(leaf)
            return
        parent, leaf.parent = leaf.parent, None
        assert parent is not None
        del parent.children[int(leaf.tokens[0])]
        self._num_nodes -= 1
        self._leaves.add(parent)


def path_to_root(node: Node | None) -> Iterator[Node]:
    """Walk from a node to the root."""
    while node is not None:
        yield node
        node = node.parent


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
