"""Nodes of the radix tree of a cache, and which leaf of it goes first when room is needed."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count as counted_up

import numpy as np

from radixtrain.tree.arrays import IntArray

__all__ = ["LeafQueue", "Node", "draw", "nodes_below", "num_shared_tokens", "path_to_root"]


@dataclass(eq=False, slots=True)
class Node:
    """A run of tokens that all sequences through here have in common.

    tokens: (n,), int64. n is 0 for the root only.
    slots: (n,), int64. where the rows of these tokens are.
    parent: the node above. None for the root, and for a node that left the tree.
    children: the nodes below, by their first token.
    locks: locks on this node and on all those below it.
    own_locks: those on this node itself.
    last_used: the lookup or insertion that was here last, counted from 1.
    queued: whether the `LeafQueue` has it.
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
        """A leaf of the tree without locks."""
        return self.parent is not None and not self.children and not self.locks

    def split(self, length: int) -> Node:
        """A new node for the first `length` tokens. This one keeps the others, and stays the end of its path.

        Who holds locks on this node holds them on the new one too.
        """
        assert self.parent is not None and 0 < length < len(self.tokens)
        upper = Node(self.tokens[:length], self.slots[:length], self.parent, locks=self.locks, last_used=self.last_used)
        self.parent.children[int(self.tokens[0])] = upper
        self.tokens, self.slots, self.parent = self.tokens[length:], self.slots[length:], upper
        upper.children[int(self.tokens[0])] = self
        return upper


class LeafQueue:
    """Leaves without locks, to be evicted in the order of their last use.

    A leaf stands here once, by the time at which it was added. Times only grow: `pop` moves one that was used since
    back to its new time, and drops one that is locked or has children by now, so that neither lookups nor locks touch
    the queue. Whoever makes a node evictable adds it.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Node]] = []
        self._serial = counted_up()  # nodes themselves have no order

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, node: Node) -> None:
        """Adds a node if it is evictable and not here yet."""
        if node.evictable and not node.queued:
            node.queued = True
            heapq.heappush(self._heap, (node.last_used, next(self._serial), node))

    def pop(self) -> Node | None:
        """Takes out the leaf whose last use is longest ago; None if all are locked."""
        while self._heap:
            added_at, _, leaf = heapq.heappop(self._heap)
            leaf.queued = False
            if leaf.evictable and leaf.last_used == added_at:
                return leaf
            self.add(leaf)
        return None


def path_to_root(node: Node | None) -> Iterator[Node]:
    while node is not None:
        yield node
        node = node.parent


def nodes_below(root: Node) -> Iterator[tuple[int, Node]]:
    """Depth and node, a parent before its children; those of the root have depth 1."""
    stack = [(1, child) for child in reversed(root.children.values())]
    while stack:
        depth, node = stack.pop()
        stack += [(depth + 1, child) for child in reversed(node.children.values())]
        yield depth, node


def num_shared_tokens(one: IntArray, other: IntArray) -> int:
    """How many tokens two arrays begin with in common."""
    size = min(len(one), len(other))
    differs = np.flatnonzero(one[:size] != other[:size])
    return int(differs[0]) if len(differs) else size


def draw(root: Node) -> Iterator[str]:
    """A line for each node, indented by its depth: tokens, how many, and the locks if there are any."""
    for depth, node in nodes_below(root):
        locks = f", {_counted(node.locks, 'lock')}" if node.locks else ""
        yield f"{'  ' * depth}{_shortened(node.tokens)} {_counted(len(node.tokens), 'token')}{locks}"


def _shortened(tokens: IntArray) -> str:
    """The first six tokens and the last two."""
    shown = [*tokens[:6].tolist(), *(["..."] if len(tokens) > 8 else []), *tokens[6:][-2:].tolist()]
    return f"[{', '.join(map(str, shown))}]"


def _counted(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
