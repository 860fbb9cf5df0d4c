"""Sequences in lexicographic order, and how many tokens each shares with the one before it (LCP).

Sequences that begin alike are neighbours in that order, so these two arrays describe the whole trie. The prefix plan is
read from them (`radixtrain/tree/plan.py`), and so is the cut into micro-batches (`radixtrain/collators/batching.py`).

NumPy only, as for the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from radixtrain.tree.arrays import IntArray, check_not_negative, concatenate_ranges, cumulative, lengths_of


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


class BranchPoint(NamedTuple):
    """The sorted places [starts[0], end), whose sequences are alike up to a depth, in tokens, and no further.

    starts: the first place of each branch, of which there are at least two.
    """

    depth: int
    starts: list[int]
    end: int


def branch_points(lcp: IntArray) -> Iterator[BranchPoint]:
    """Yield the branch points of sorted sequences, inner ones before those around them.

    lcp: what each shares with the one before it.
    """
    open_points: list[tuple[int, list[int]]] = [(0, [])]
    for place, depth in enumerate([*lcp[1:].tolist(), 0], 1):
        start = place - 1  # of the branch that ends here
        while open_points[-1][0] > depth:
            point, starts = open_points.pop()
            yield BranchPoint(point, starts, place)
            start = starts[0]
        if open_points[-1][0] < depth:
            open_points.append((depth, [start]))
        open_points[-1][1].append(place)


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
    remaining, above = lcp.copy(), np.zeros_like(lcp)
    for depth, starts, end in reversed([*branch_points(lcp)]):
        outer = int(above[starts[0]])
        to = outer if is_small(starts[1:], depth, outer) else depth
        remaining[starts[1:]] = above[starts[0] : end] = to
    return remaining


def heaviest_first(by_order: SortedSequences) -> SortedSequences:
    """Move the branch with the most tokens to the front at every branch point, so that it continues the run above it.

    Any depth-first order describes the trie, so the order and the LCP array stay what they are for its readers. The
    others keep their order, and a sequence that ends at the branch point adds no rows wherever it comes.
    """
    shared, rows = by_order.lcp.tolist(), cumulative(by_order.lengths - by_order.lcp).tolist()  # up to each place
    lcp, moved = [*shared], [*range(len(shared))]
    for _, starts, end in branch_points(by_order.lcp):
        branches = [*pairwise([*starts, end])]
        start, end = max(branches, key=lambda places: rows[places[1]] - rows[places[0]] + shared[places[0]])
        first = starts[0]
        lcp[first], lcp[start] = lcp[start], lcp[first]  # the first of all shares less, with what comes before it
        for places in (lcp, moved):
            places[first:end] = places[start:end] + places[first:start]
    return SortedSequences(by_order.order[moved], by_order.lengths[moved], np.array(lcp, dtype=np.int64))
