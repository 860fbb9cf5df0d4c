"""Nodes: how one is split, how a tree is walked and drawn, and in which order the queue gives leaves up."""

import numpy as np
import pytest

from radixtrain.generation.nodes import LeafQueue, Node, draw, nodes_below, num_shared_tokens, path_to_root


def chain(*parts: list[int]) -> list[Node]:
    """The root and, below each other, a node for each list of tokens. Slots are 10 times the token."""
    nodes = [Node(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64), None)]
    for part in parts:
        nodes.append(child(nodes[-1], part))
    return nodes


def child(parent: Node, tokens: list[int], last_used: int = 0) -> Node:
    node = Node(np.array(tokens), 10 * np.array(tokens), parent, last_used=last_used)
    parent.children[tokens[0]] = node
    return node


def test_split() -> None:
    root, node, below = chain([1, 2, 3], [4])
    node.locks, node.own_locks, node.last_used = 3, 2, 7
    upper = node.split(1)
    assert list(path_to_root(below)) == [below, node, upper, root]
    assert root.children == {1: upper} and upper.children == {2: node} and node.children == {4: below}
    assert (upper.tokens.tolist(), upper.slots.tolist()) == ([1], [10])
    assert (node.tokens.tolist(), node.slots.tolist()) == ([2, 3], [20, 30])
    assert (upper.locks, upper.own_locks, upper.last_used) == (3, 0, 7)
    assert (node.locks, node.own_locks, node.last_used) == (3, 2, 7)


@pytest.mark.parametrize(
    ("one", "other", "shared"),
    [([1, 2, 3], [1, 2, 4], 2), ([1, 2], [1, 2, 3], 2), ([1], [2], 0), ([], [1], 0), ([1, 2, 3], [1, 5, 3], 1)],
)
def test_num_shared_tokens(one: list[int], other: list[int], shared: int) -> None:
    assert (
        num_shared_tokens(np.array(one), np.array(other)) == shared == num_shared_tokens(np.array(other), np.array(one))
    )


def test_evictable_is_a_leaf_of_a_tree_without_locks() -> None:
    root, upper, leaf = chain([1], [2])
    assert [node.evictable for node in (root, upper, leaf)] == [False, False, True]
    leaf.locks = 1
    assert not leaf.evictable
    assert not chain()[0].evictable


def test_parents_come_before_their_children() -> None:
    root, first, deep = chain([1, 2], [3])
    second, third = child(first, [4]), child(root, [5])
    assert list(nodes_below(root)) == [(1, first), (2, deep), (2, second), (1, third)]
    first.locks = 1
    third.locks = 2
    assert list(draw(root)) == [
        "  [1, 2] 2 tokens, 1 lock",
        "    [3] 1 token",
        "    [4] 1 token",
        "  [5] 1 token, 2 locks",
    ]


@pytest.mark.parametrize(
    ("length", "drawn"),
    [(8, "  [0, 1, 2, 3, 4, 5, 6, 7] 8 tokens"), (9, "  [0, 1, 2, 3, 4, 5, ..., 7, 8] 9 tokens")],
)
def test_long_runs_are_shortened(length: int, drawn: str) -> None:
    assert list(draw(chain(list(range(length)))[0])) == [drawn]


def test_leaves_leave_the_queue_in_the_order_of_their_last_use() -> None:
    root, queue = chain()[0], LeafQueue()
    leaves = [child(root, [token], last_used) for token, last_used in enumerate([3, 1, 2, 2])]
    for leaf in [*leaves, *leaves]:
        queue.add(leaf)
    assert len(queue) == 4
    leaves[1].last_used = 9  # used since
    assert [queue.pop() for _ in range(5)] == [leaves[2], leaves[3], leaves[0], leaves[1], None]
    assert not any(leaf.queued for leaf in leaves)


def test_what_cannot_be_evicted_is_dropped_and_can_be_added_again() -> None:
    root, queue = chain()[0], LeafQueue()
    locked, inner, gone = (child(root, [token], token) for token in (1, 2, 3))
    for leaf in (locked, inner, gone):
        queue.add(leaf)
    locked.locks, gone.parent = 1, None
    child(inner, [4])
    assert queue.pop() is None and len(queue) == 0
    queue.add(locked)
    assert len(queue) == 0
    locked.locks = 0
    queue.add(locked)
    assert queue.pop() is locked
