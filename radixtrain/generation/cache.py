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

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
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
    start: tokens of the path above this node.
    parent: the node above. None for the root, and for a node that left the tree.
    children: the nodes below, by their first token.
    locks: locks on this node and on all those below it.
    last_used: number of the last lookup or insertion that passed here, counted from 1.
    """

    tokens: IntArray
    rows: Any
    start: int
    parent: Node | None
    children: dict[int, Node] = field(default_factory=dict)
    locks: int = 0
    last_used: int = 0

    @property
    def path(self) -> list[Node]:
        """Return the nodes from the root to this one, without the root, which has no tokens."""
        nodes, node = [], self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def split(self, length: int) -> Node:
        """Make a new node for the first `length` tokens. This one keeps the others, and remains the end of its path.

        Locks on this node hold for the new one too.
        """
        assert self.parent is not None and 0 < length < len(self.tokens)
        upper = Node(self.tokens[:length], self.rows[:length], self.start, self.parent)
        upper.children[int(self.tokens[length])] = self
        upper.locks, upper.last_used = self.locks, self.last_used
        self.parent.children[int(self.tokens[0])] = upper
        self.tokens, self.rows = self.tokens[length:], self.rows[length:]
        self.start, self.parent = self.start + length, upper
        return upper


class Match(NamedTuple):
    """The longest stored prefix.

    node: the node in which it ends; the root if nothing was found.
    length: its tokens.
    """

    node: Node
    length: int


@dataclass
class CacheCounters:
    """What happened since the cache was made, in tokens.

    num_tokens, num_hits: looked up by `match_prefix`, and those of them that were found.
    num_computed: the others as their user computed them, those that several prompts share once.
    num_evicted: evicted.
    """

    num_tokens: int = 0
    num_hits: int = 0
    num_computed: int = 0
    num_evicted: int = 0


class RadixCache:
    """A radix tree over token ids. Every node owns what is stored for its tokens.

    max_tokens: tokens that stay after `evict_to_budget`; None: no limit. Locked ones stay in any case.
    counters: tokens looked up, found, computed and evicted so far.

    Pass it to `generate`, or store anything that has an entry for each token. Only `generate` may use it from several
    threads.
    Raises UserError unless max_tokens is None or a whole number >= 1.

    >>> cache, tokens = RadixCache(max_tokens=1000), [7, 8, 9]
    >>> node = cache.insert(tokens, rows_from=lambda start: tokens[start:])
    >>> cache.match_prefix([7, 8, 5]).length
    2
    >>> cache.evict(1), cache.num_tokens
    (1, 2)
    """

    def __init__(self, max_tokens: int | None = None):
        if max_tokens is not None and (type(max_tokens) is not int or max_tokens < 1):
            raise UserError(
                f"max_tokens must be a whole number of tokens >= 1, or None for no limit, got {max_tokens!r}"
            )
        self.max_tokens = max_tokens
        self.counters = CacheCounters()
        self.num_tokens = 0
        self.root = Node(np.zeros(0, dtype=np.int64), None, 0, None)
        self._clock = 0
        self._owner: Hashable = None

    @property
    def nodes(self) -> Iterator[Node]:
        """Yield the nodes without the root, a parent before its children."""
        waiting = [*self.root.children.values()]
        while waiting:
            node = waiting.pop()
            waiting += node.children.values()
            yield node

    def match_prefix(self, token_ids: ArrayLike) -> Match:
        """Find the longest stored prefix of `token_ids`, and mark it as used just now.

        token_ids: (n,), integers.

        A node in which the prefix ends is split there, so that `Match.node` ends where the prefix does. `lock` it
        before the next call that may evict.
        """
        ids = np.asarray(token_ids, dtype=np.int64)
        match = self._walk(ids)
        self.counters.num_tokens += len(ids)
        self.counters.num_hits += match.length
        return match

    def insert(self, token_ids: ArrayLike, rows_from: Callable[[int], Any]) -> Node:
        """Store what the tree does not have of a sequence, and return the node where the sequence ends.

        token_ids: (n,), integers.
        rows_from: from the number of tokens that the tree has already to what is stored for the others.
        """
        ids = np.asarray(token_ids, dtype=np.int64)
        node, length = self._walk(ids)
        if length == len(ids):
            return node
        rows = rows_from(length)
        assert len(rows) == len(ids) - length
        leaf = Node(ids[length:].copy(), rows, length, node, last_used=self._clock)
        node.children[int(ids[length])] = leaf
        self.num_tokens += len(leaf.tokens)
        return leaf

    def lock(self, node: Node) -> None:
        """Keep a node and the path to it from being evicted, until as many calls of `unlock`."""
        assert node.parent is not None or node is self.root, "the node was evicted before it was locked"
        for above in (self.root, *node.path):
            above.locks += 1

    def unlock(self, node: Node) -> None:
        """Remove one lock of `node`."""
        assert node.locks > sum(child.locks for child in node.children.values()), "unlocked more often than locked"
        for above in (self.root, *node.path):
            above.locks -= 1

    def evict(self, num_tokens: int) -> int:
        """Evict so many tokens, or all that is not locked if that is less; return how many.

        The least recently used leaf goes first; the last leaf loses only as much of its end as is needed.
        """
        freed = 0
        if num_tokens <= 0:
            return freed
        # Whatever uses or locks a node does so to those above it, so in this order each is a leaf once it is reached.
        for leaf in sorted(self.nodes, key=lambda node: (node.last_used, -node.start)):
            if freed >= num_tokens or leaf.locks:
                continue
            assert leaf.parent is not None and not leaf.children
            if (length := len(leaf.tokens) - (num_tokens - freed)) > 0:
                leaf.split(length)  # it keeps the end
            freed += len(leaf.tokens)
            del leaf.parent.children[int(leaf.tokens[0])]
            leaf.parent = None
        self.num_tokens -= freed
        self.counters.num_evicted += freed
        return freed

    def evict_to_budget(self) -> None:
        """Evict what `max_tokens` leaves no room for."""
        if self.max_tokens is not None:
            self.evict(self.num_tokens - self.max_tokens)

    def clear(self) -> None:
        """Empty the tree. Raises RuntimeError if a node is locked."""
        if self.root.locks:
            raise RuntimeError(f"the cache is in use ({self.root.locks} locks) and cannot be cleared")
        self.root, self.num_tokens = Node(np.zeros(0, dtype=np.int64), None, 0, None), 0

    def belong_to(self, owner: Hashable) -> None:
        """Empty the cache if it holds what another owner has stored, such as a model with other weights."""
        if self._owner is not None and self._owner != owner:
            self.clear()
        self._owner = owner

    def __repr__(self) -> str:
        return f"RadixCache(max_tokens={self.max_tokens}, num_tokens={self.num_tokens})"

    def _walk(self, ids: IntArray) -> Match:
        """Find the longest stored prefix, splitting the node in which it ends. Marks the path as used."""
        self._clock += 1
        node, depth = self.root, 0
        while depth < len(ids) and (child := node.children.get(int(ids[depth]))):
            shared = num_shared_tokens(child.tokens, ids[depth:])
            node = child if shared == len(child.tokens) else child.split(shared)
            node.last_used = self._clock
            depth += shared
        return Match(node, depth)


def num_shared_tokens(one: IntArray, other: IntArray) -> int:
    """Count the common first tokens of two arrays."""
    size = min(len(one), len(other))
    differs = np.flatnonzero(one[:size] != other[:size])
    return int(differs[0]) if len(differs) else size
