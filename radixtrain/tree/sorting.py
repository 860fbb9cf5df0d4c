"""Sequences in lexicographic order, and how many tokens each shares with the one before it (LCP).

Sequences that begin alike are neighbours in that order, so these two arrays describe the whole trie. The prefix plan is
read from them (`radixtrain/tree/plan.py`), and so is the cut into micro-batches (`radixtrain/collators/batching.py`).

NumPy only, as for the plan.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from radixtrain.tree.arrays import IntArray, check_not_negative, concatenate_ranges, lengths_of


@dataclass(frozen=True, eq=False)
class SortedSequences:
    """Sequences in lexicographic order, without empty ones, B' in number. All int64.

    order: (B',). which sequence comes at each sorted place, by its index in the batch.
    lengths: (B',). its tokens.
    lcp: (B',). tokens that it shares with the sequence at the place before; 0 for the first.
    """

    order: IntArray
    lengths: IntArray
    lcp: IntArray

    @property
    def num_unique_tokens(self) -> int:
        """Count the tokens, with each common beginning counted once."""
        return int((self.lengths - self.lcp).sum())

    def some(self, places: IntArray) -> SortedSequences:
        """Select sequences by ascending place. Two of them share the shortest prefix of the neighbours between them."""
        if not len(places):
            return SortedSequences(places, places, places)
        before = np.append(0, places[:-1] + 1)
        lcp = np.minimum.reduceat(self.lcp[: places[-1] + 1], before)
        return SortedSequences(self.order[places], self.lengths[places], lcp)


def sort_sequences(input_ids: IntArray, cu_seqlens: IntArray, position_ids: IntArray | None = None) -> SortedSequences:
    """Sort sequences by their (token, position) pairs, with the LCP of neighbours.

    input_ids, position_ids: (T,), int64. Positions that count from 0 in every sequence are left out of the key: there
        the depth is the position.
    cu_seqlens: (B+1,), int64.

    Raises ValueError that names the first negative token or position.

    Big-endian bytes compare as the numbers do, so that Python's sort runs on memcmp. The sort is stable.
    """
    lengths = lengths_of(cu_seqlens)
    present = lengths.nonzero()[0]
    if position_ids is not None and np.array_equal(position_ids, concatenate_ranges(0 * present, lengths[present])):
        position_ids = None
    pairs = input_ids[:, None] if position_ids is None else np.stack([input_ids, position_ids], axis=1)
    words = _big_endian(pairs)
    step = words.strides[0]
    packed, bounds = words.tobytes(), (cu_seqlens * step).tolist()
    keys = [packed[start:end] for start, end in pairwise(bounds)]
    order = sorted(present.tolist(), key=keys.__getitem__)
    in_order = [b"", *(keys[index] for index in order)]
    lcp = [_common_prefix(one, other, step) for one, other in pairwise(in_order)]
    by_order = np.array(order, dtype=np.int64)
    return SortedSequences(by_order, lengths[by_order], np.array(lcp, dtype=np.int64) // step)


def _big_endian(pairs: IntArray) -> npt.NDArray[np.unsignedinteger[Any]]:
    """Encode tokens and positions, (T, 1 or 2), in 4 bytes, or in 8 if one is too large; refuse negative ones."""
    if pairs.view(np.uint64).max(initial=0) < 2**32:
        return pairs.astype(">u4")
    for name, values in zip(("input_ids", "position_ids"), pairs.T, strict=False):
        check_not_negative(name, values)
    return pairs.astype(">u8")


def _common_prefix(one: bytes, other: bytes, step: int) -> int:
    """Count the common first bytes of two keys, in whole pairs of `step` bytes. one: sorts no later than other."""
    if one[:step] != other[:step]:
        return 0
    if other.startswith(one):
        return len(one)
    size = min(len(one), len(other)) // 4
    differs = np.frombuffer(one, np.uint32, size) != np.frombuffer(other, np.uint32, size)
    return int(differs.argmax()) * 4 // step * step


def _lcp_intervals(lcp: list[int]) -> tuple[list[int], list[int], list[int]]:
    """Find the branch points of sorted sequences: depths, parents, and where each sequence leaves the one before it.

    lcp: what each shares with the one before it. Point 0, its own parent, has depth 0 and holds all of them.
    """
    depth, parent, point_of, open_points = [0], [0], [], [0]
    for value in lcp:
        closed = None
        while depth[open_points[-1]] > value:
            closed = open_points.pop()
        if depth[open_points[-1]] < value:
            depth.append(value)
            parent.append(open_points[-1])
            open_points.append(len(depth) - 1)
        if closed is not None:
            parent[closed] = open_points[-1]
        point_of.append(open_points[-1])
    return depth, parent, point_of


def without_small_branches(lcp: IntArray, min_shared_tokens: int) -> IntArray:
    """Remove every branch point from the LCP array that saves fewer than `min_shared_tokens`.

    Removing one lowers its sequences' entries to the depth of the branch point above, so that each branch computes the
    run between the two. Decided from the root downwards: a run that lost its branch point makes the runs below it
    longer.
    """
    return without_branches(lcp, lambda places, depth, above: (depth - above) * len(places) < min_shared_tokens)


def without_branches(lcp: IntArray, is_small: Callable[[list[int], int, int], bool]) -> IntArray:
    """Remove branch points from the LCP array, see `without_small_branches`.

    is_small: the places that share a point with the one before them, its depth, and that of the remaining one above it
        -> whether it is removed.
    """
    depth, parent, point_of = _lcp_intervals(lcp.tolist())
    entries: list[list[int]] = [[] for _ in depth]
    for place, point in enumerate(point_of):
        entries[point].append(place)
    remaining = [0] * len(depth)
    for point in sorted(range(1, len(depth)), key=depth.__getitem__):
        above = remaining[parent[point]]
        remaining[point] = above if is_small(entries[point], depth[point], above) else depth[point]
    return np.array([remaining[point] for point in point_of], dtype=np.int64)


def heaviest_first(by_order: SortedSequences) -> SortedSequences:
    """Move the branch with the most tokens to the front at every branch point, so that it continues the run above it.

    Any depth-first order describes the trie, so the order and the LCP array stay what they are for its readers. The
    others keep their order, and a sequence that ends at the branch point adds no rows wherever it comes.
    """
    lengths, lcp = by_order.lengths.tolist(), by_order.lcp.tolist()
    if not any(lcp):
        return by_order
    firsts = dict.fromkeys(range(len(lcp)), 0)  # the LCP of each sequence with the one before it in the new order
    open_points: list[tuple[int, list[_Branch]]] = [(0, [])]
    for place, depth in enumerate([*lcp[1:], -1]):
        branch = _Branch([place], lengths[place])
        while open_points and open_points[-1][0] > depth:
            point, branches = open_points.pop()
            branch = _joined(point, [*branches, branch], firsts)
        if open_points and open_points[-1][0] == depth:
            open_points[-1][1].append(branch)
        elif depth >= 0:
            open_points.append((depth, [branch]))
    order = np.array(branch.places, dtype=np.int64)
    return SortedSequences(by_order.order[order], by_order.lengths[order], np.array([firsts[x] for x in branch.places]))


class _Branch(NamedTuple):
    """Sequences that are alike up to a branch point. num_tokens: the rows of all, with those above it once."""

    places: list[int]
    num_tokens: int


def _joined(point: int, branches: list[_Branch], firsts: dict[int, int]) -> _Branch:
    """Put the branches of a point, at this depth, in order, and note that each but the first shares it."""
    if point:
        heaviest = max(range(len(branches)), key=lambda index: branches[index].num_tokens)
        branches.insert(0, branches.pop(heaviest))
    for branch in branches:
        firsts[branch.places[0]] = point
    places = [place for branch in branches for place in branch.places]
    return _Branch(places, point + sum(branch.num_tokens - point for branch in branches))
