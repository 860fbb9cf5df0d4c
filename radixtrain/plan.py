"""The prefix plan: which tokens of a packed ragged batch are the same computation, and where each one lives.

Two tokens are the same node when their whole history of (token, position) is the same. The plan numbers the distinct
nodes of that trie in depth-first pre-order, so that

- a segment (an edge of the radix tree, a run of nodes without a branch) owns a contiguous range of unique rows;
- all its descendants are the contiguous range right behind it;
- the tree mask is one integer per key: query q sees key k iff `k <= q < subtree_end(k)`.

No pointer tree is walked. The sequences are sorted lexicographically, neighbours are compared once, and everything is
read off the array of longest common prefixes (LCP), as a suffix array stands in for a suffix tree (Abouelhoda, Kurtz
and Ohlebusch 2004, "lcp-intervals"). In sorted order the new tokens of a sequence are a contiguous suffix of it.

    sequences      sorted, with LCP        unique rows (U = 6)           segments
    0: 7 8 9       1: 7 8 5    lcp 0       row    0 1 2 3 4 5            [0, 2)  7 8  subtree_end 5
    1: 7 8 5       0: 7 8 9    lcp 2       token  7 8 5 9 6 9            [2, 3)  5    subtree_end 3
    2: 7 8 9 6     2: 7 8 9 6  lcp 3                                     [3, 5)  9 6  subtree_end 5
    3: 9           3: 9        lcp 0                                     [5, 6)  9    subtree_end 6

NumPy only: this module runs in DataLoader workers and imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["PrefixPlan", "SortedSequences", "build_prefix_plan", "sort_sequences"]

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False, repr=False)
class PrefixPlan:
    """Index arrays between a packed ragged batch (T tokens) and its unique tokens (U rows). Immutable; all int64.

    gather_indices: (U,). unique row -> its first occurrence in the packed layout: `x_U = x_T[gather_indices]`.
    inverse_indices: (T,). packed token -> its unique row: `x_T = x_U[inverse_indices]`.
    counts: (U,). how many packed tokens stand for this row; 0 for a padding row.
    position_ids: (U,). position of each unique row, in tokens from the start of its sequence unless given otherwise.
    cu_seqlens: (B+1,). where each sequence starts in the packed layout, as given.
    segment_starts: (S+1,). first unique row of each segment, and U.
    segment_parents: (S,). the segment that this one continues, -1 at a root.
    subtree_ends: (S,). one past the last unique row of the segment's descendants.
    path_keys: (T',). unique rows of every sequence that brings new rows, in sorted order, back to back; with
        `path_cu_seqlens_q` (the new rows of each, which are consecutive) and `path_cu_seqlens_k` (E+1 each) this is one
        varlen attention call, causal from the bottom right, that needs no tree.
    num_padding: padding rows at the end of U; they form a segment of their own that nothing else sees.
    """

    gather_indices: IntArray
    inverse_indices: IntArray
    counts: IntArray
    position_ids: IntArray
    cu_seqlens: IntArray
    segment_starts: IntArray
    segment_parents: IntArray
    subtree_ends: IntArray
    path_keys: IntArray
    path_cu_seqlens_q: IntArray
    path_cu_seqlens_k: IntArray
    num_padding: int = 0

    def __post_init__(self) -> None:
        for value in vars(self).values():
            if isinstance(value, np.ndarray):
                value.setflags(write=False)

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.__post_init__()

    @property
    def num_sequences(self) -> int:
        """B."""
        return len(self.cu_seqlens) - 1

    @property
    def num_tokens(self) -> int:
        """T, the packed original tokens."""
        return len(self.inverse_indices)

    @property
    def num_rows(self) -> int:
        """Rows that the model computes: the unique tokens and the padding."""
        return len(self.gather_indices)

    @property
    def num_unique_tokens(self) -> int:
        """U, the nodes of the token trie, without padding."""
        return self.num_rows - self.num_padding

    @property
    def num_segments(self) -> int:
        """S, the padding's segment included."""
        return len(self.segment_parents)

    @property
    def compression_ratio(self) -> float:
        """r = T / U; 1.0 for an empty batch."""
        return self.num_tokens / self.num_unique_tokens if self.num_tokens else 1.0

    @cached_property
    def segment_levels(self) -> IntArray:
        """(S,). branches above each segment: 0 at a root."""
        levels = np.zeros(self.num_segments, dtype=np.int64)
        for segment, parent in enumerate(self.segment_parents.tolist()):
            if parent >= 0:
                levels[segment] = levels[parent] + 1
        levels.setflags(write=False)
        return levels

    @property
    def depth(self) -> int:
        """Levels of the radix tree; 1 where nothing branches, 0 for an empty batch."""
        return int(self.segment_levels.max()) + 1 if self.num_segments else 0

    @cached_property
    def row_subtree_ends(self) -> IntArray:
        """(U,). `subtree_ends` of each row's own segment: query q sees key k iff `k <= q < row_subtree_ends[k]`."""
        ends = np.repeat(self.subtree_ends, np.diff(self.segment_starts))
        ends.setflags(write=False)
        return ends

    def __repr__(self) -> str:
        padding = f" + {self.num_padding} padding" if self.num_padding else ""
        return (
            f"PrefixPlan(B={self.num_sequences}, T={self.num_tokens}, U={self.num_unique_tokens}{padding}, "
            f"r={self.compression_ratio:.2f}, depth={self.depth}, segments={self.num_segments})"
        )


@dataclass(frozen=True, eq=False)
class SortedSequences:
    """Sequences in lexicographic order with the longest common prefix of each with the one before it.

    order: (B',). index of the sequence that stands at each sorted place; empty sequences are left out.
    lengths: (B',). tokens of the sequence at each sorted place.
    lcp: (B',). tokens that it shares with the sorted place before it; 0 for the first.
    """

    order: IntArray
    lengths: IntArray
    lcp: IntArray


def build_prefix_plan(
    input_ids: npt.ArrayLike,
    cu_seqlens: npt.ArrayLike,
    position_ids: npt.ArrayLike | None = None,
    *,
    min_shared_tokens: int = 1,
    pad_to_multiple_of: int | None = None,
) -> PrefixPlan:
    """The prefix plan of a packed ragged batch.

    input_ids: (T,), integer. token ids of all sequences, back to back.
    cu_seqlens: (B+1,), integer. where each sequence starts, and T. Empty sequences are allowed.
    position_ids: (T,), integer. positions in tokens; default: restart at 0 in every sequence. Tokens at different
        positions are never shared.
    min_shared_tokens: a branch point that saves fewer tokens than this is not worth a branch: the run in front of it is
        computed once per branch instead. What a branch point saves is the length of the run times (branches - 1).
    pad_to_multiple_of: pad the unique rows to a multiple of this many; padding rows gather token 0 and are seen by
        none.

    Raises ValueError, naming the offending value and its place, for anything that is not such a batch.

    >>> plan = build_prefix_plan([1, 2, 3, 1, 2, 4], [0, 3, 6])
    >>> plan.gather_indices.tolist(), plan.inverse_indices.tolist()
    ([0, 1, 2, 5], [0, 1, 2, 0, 1, 3])

    Source: the fold and scatter indices of RadixMLP (section 3), with `gather_indices` for `fold_gather` and
    `inverse_indices` for `scatter_indices`.
    """
    ids, bounds, positions = _validated(input_ids, cu_seqlens, position_ids)
    if min_shared_tokens < 1:
        raise ValueError(f"min_shared_tokens must be at least 1, got {min_shared_tokens}")
    if pad_to_multiple_of is not None and pad_to_multiple_of < 1:
        raise ValueError(f"pad_to_multiple_of must be at least 1, got {pad_to_multiple_of}")

    by_order = sort_sequences(ids, bounds, positions)
    lcp = by_order.lcp if min_shared_tokens == 1 else _without_small_branches(by_order.lcp, min_shared_tokens)
    starts = bounds[by_order.order]
    packed_of_sorted = _ranges(starts, by_order.lengths)
    new_rows = np.concatenate([[0], np.cumsum(by_order.lengths - lcp)])
    sorted_inverse = _sorted_inverse(by_order.lengths, lcp, new_rows)

    inverse = np.empty(len(ids), dtype=np.int64)
    inverse[packed_of_sorted] = sorted_inverse
    num_unique = int(new_rows[-1])
    gather = np.empty(num_unique, dtype=np.int64)
    gather[inverse[::-1]] = np.arange(len(ids) - 1, -1, -1)  # the last assignment wins: the first occurrence

    rows_ahead = _row_parents(by_order.lengths, lcp, new_rows, sorted_inverse)
    segment_starts, segment_parents = _segments(rows_ahead)
    brings_rows = by_order.lengths > lcp
    keys_per_entry = by_order.lengths[brings_rows]
    plan = PrefixPlan(
        gather_indices=gather,
        inverse_indices=inverse,
        counts=np.bincount(inverse, minlength=num_unique).astype(np.int64),
        position_ids=positions[gather],
        cu_seqlens=bounds,
        segment_starts=segment_starts,
        segment_parents=segment_parents,
        subtree_ends=_subtree_ends(segment_starts, segment_parents),
        path_keys=sorted_inverse[np.repeat(brings_rows, by_order.lengths)],
        path_cu_seqlens_q=np.concatenate([new_rows[:-1][brings_rows], new_rows[-1:]]),
        path_cu_seqlens_k=np.concatenate([[0], np.cumsum(keys_per_entry)]),
    )
    padding = -num_unique % pad_to_multiple_of if pad_to_multiple_of else 0
    return _padded(plan, padding) if padding else plan


def sort_sequences(input_ids: IntArray, cu_seqlens: IntArray, position_ids: IntArray | None = None) -> SortedSequences:
    """Sequences sorted by their (token, position) pairs, with the LCP of neighbours.

    input_ids, position_ids: (T,), int64, not negative. Positions are left out of the key where every sequence counts
        from 0, since there the depth is the position.
    cu_seqlens: (B+1,), int64.

    Big-endian bytes compare as the numbers do, so that Python's sort runs on memcmp. The sort is stable.
    """
    lengths = np.diff(cu_seqlens)
    if position_ids is not None and np.array_equal(position_ids, _ranges(np.zeros_like(lengths), lengths)):
        position_ids = None
    columns = [input_ids] if position_ids is None else [input_ids, position_ids]
    largest = max((int(column.max()) for column in columns if len(column)), default=0)
    pairs = np.stack(columns, axis=1).astype(">u4" if largest < 2**32 else ">u8")
    step = pairs.itemsize * len(columns)
    data = pairs.tobytes()
    bounds = (cu_seqlens * step).tolist()
    keys = [data[start:end] for start, end in pairwise(bounds)]
    order = np.array(sorted(np.flatnonzero(lengths).tolist(), key=keys.__getitem__), dtype=np.int64)
    lengths = lengths[order]
    return SortedSequences(order, lengths, _neighbour_lcp(columns, _ranges(cu_seqlens[order], lengths), lengths))


def _neighbour_lcp(columns: list[IntArray], packed_of_sorted: IntArray, lengths: IntArray) -> IntArray:
    """LCP of each sequence with the one before it, all compared in one pass over the T tokens."""
    if not len(lengths):
        return np.zeros(0, dtype=np.int64)
    starts = np.cumsum(lengths) - lengths
    previous_lengths = np.concatenate([[0], lengths[:-1]])
    depth = _ranges(np.zeros_like(lengths), lengths)
    inside = depth < np.repeat(previous_lengths, lengths)
    here = np.flatnonzero(inside)
    there = here - np.repeat(previous_lengths, lengths)[here]
    same = np.zeros(len(depth), dtype=bool)
    same[here] = True
    for column in columns:
        in_order = column[packed_of_sorted]
        same[here] &= in_order[here] == in_order[there]
    first_difference = np.where(same, np.repeat(lengths, lengths), depth)
    return np.minimum.reduceat(first_difference, starts)


def _without_small_branches(lcp: IntArray, min_shared_tokens: int) -> IntArray:
    """The LCP array with every branch point removed that saves fewer than `min_shared_tokens`.

    A branch point is an lcp-interval: neighbouring sequences that share `depth` tokens and part there in
    `entries + 1` directions. Removing one lowers its entries to the depth of the branch point above, so that the run
    between the two is computed by each branch. Decided from the root downwards: a run that lost its branch point
    lengthens the runs below it.
    """
    depth, parent, entries = [0], [0], [0]
    node_of = np.zeros(len(lcp), dtype=np.int64)
    stack = [0]
    for place, value in enumerate(lcp.tolist()):
        closed = None
        while depth[stack[-1]] > value:
            closed = stack.pop()
        if depth[stack[-1]] < value:
            depth.append(value)
            parent.append(stack[-1])
            entries.append(0)
            stack.append(len(depth) - 1)
        if closed is not None:
            parent[closed] = stack[-1]
        node_of[place] = stack[-1]
        entries[stack[-1]] += 1
    kept = np.zeros(len(depth), dtype=np.int64)
    for node in sorted(range(1, len(depth)), key=depth.__getitem__):
        above = kept[parent[node]]
        saved = (depth[node] - above) * entries[node]
        kept[node] = depth[node] if saved >= min_shared_tokens else above
    return kept[node_of]


def _sorted_inverse(lengths: IntArray, lcp: IntArray, new_rows: IntArray) -> IntArray:
    """(T,). unique row of every token, sorted: the shared head is the neighbour's, the rest is new."""
    starts = np.cumsum(lengths) - lengths
    depth = _ranges(np.zeros_like(lengths), lengths)
    inverse = depth + np.repeat(new_rows[:-1] - lcp, lengths)
    previous = 0
    for start, shared in zip(starts.tolist(), lcp.tolist(), strict=True):
        if shared:
            inverse[start : start + shared] = inverse[previous : previous + shared]
        previous = start
    return inverse


def _row_parents(lengths: IntArray, lcp: IntArray, new_rows: IntArray, sorted_inverse: IntArray) -> IntArray:
    """(U,). the row before each unique row on its path, -1 at a root."""
    parents = np.arange(-1, new_rows[-1] - 1)
    brings_rows = lengths > lcp
    starts = (np.cumsum(lengths) - lengths)[brings_rows]
    shared = lcp[brings_rows]
    ahead = sorted_inverse[starts + np.maximum(shared, 1) - 1]
    parents[new_rows[:-1][brings_rows]] = np.where(shared > 0, ahead, -1)
    return parents


def _segments(row_parents: IntArray) -> tuple[IntArray, IntArray]:
    """`segment_starts` (S+1) and `segment_parents` (S): cut where a path jumps, and behind where it jumps from."""
    rows = np.arange(len(row_parents))
    jumps = rows[row_parents != rows - 1]
    starts_here = np.zeros(len(rows) + 1, dtype=bool)
    starts_here[jumps] = True
    starts_here[row_parents[jumps] + 1] = True
    starts_here[[0, -1]] = True
    starts = np.flatnonzero(starts_here)
    if not len(rows):
        return np.zeros(1, dtype=np.int64), np.zeros(0, dtype=np.int64)
    parents = row_parents[starts[:-1]]
    return starts, np.where(parents < 0, -1, np.searchsorted(starts, parents, side="right") - 1)


def _subtree_ends(segment_starts: IntArray, segment_parents: IntArray) -> IntArray:
    """(S,). pre-order puts descendants right behind: an end travels up from the last child."""
    ends = segment_starts[1:].tolist()
    for segment in range(len(ends) - 1, -1, -1):
        parent = segment_parents[segment]
        if parent >= 0 and ends[parent] < ends[segment]:
            ends[parent] = ends[segment]
    return np.array(ends, dtype=np.int64)


def _padded(plan: PrefixPlan, padding: int) -> PrefixPlan:
    """The plan with `padding` rows behind the last: a root segment and a path entry of their own."""
    rows = plan.num_rows + np.arange(padding)
    end = plan.num_rows + padding

    def append(array: IntArray, values: Any) -> IntArray:
        return np.concatenate([array, np.atleast_1d(values)]).astype(np.int64)

    return PrefixPlan(
        gather_indices=append(plan.gather_indices, np.zeros(padding)),
        inverse_indices=plan.inverse_indices,
        counts=append(plan.counts, np.zeros(padding)),
        position_ids=append(plan.position_ids, np.arange(padding)),
        cu_seqlens=plan.cu_seqlens,
        segment_starts=append(plan.segment_starts, end),
        segment_parents=append(plan.segment_parents, -1),
        subtree_ends=append(plan.subtree_ends, end),
        path_keys=append(plan.path_keys, rows),
        path_cu_seqlens_q=append(plan.path_cu_seqlens_q, end),
        path_cu_seqlens_k=append(plan.path_cu_seqlens_k, plan.path_cu_seqlens_k[-1] + padding),
        num_padding=padding,
    )


def _ranges(starts: IntArray, lengths: IntArray) -> IntArray:
    """(sum of lengths,). the ranges [start, start + length), back to back."""
    ends = np.cumsum(lengths)
    return np.arange(ends[-1] if len(ends) else 0) + np.repeat(starts - (ends - lengths), lengths)


def _validated(input_ids: Any, cu_seqlens: Any, position_ids: Any) -> tuple[IntArray, IntArray, IntArray]:
    ids = _integers("input_ids", input_ids)
    bounds = _integers("cu_seqlens", cu_seqlens)
    if not len(bounds) or bounds[0] != 0:
        raise ValueError(f"cu_seqlens must start at 0, got {bounds[:1].tolist() or 'no entry'}")
    falls = np.flatnonzero(np.diff(bounds) < 0)
    if len(falls):
        i = int(falls[0])
        raise ValueError(
            f"cu_seqlens must not fall: cu_seqlens[{i}] = {bounds[i]}, cu_seqlens[{i + 1}] = {bounds[i + 1]}"
        )
    if bounds[-1] != len(ids):
        raise ValueError(f"cu_seqlens must end at the number of tokens, {len(ids)}, got {bounds[-1]}")
    if position_ids is None:
        return ids, bounds, _ranges(np.zeros(len(bounds) - 1, dtype=np.int64), np.diff(bounds))
    positions = _integers("position_ids", position_ids)
    if len(positions) != len(ids):
        raise ValueError(f"position_ids must have one entry per token, {len(ids)}, got {len(positions)}")
    return ids, bounds, positions


def _integers(name: str, values: Any) -> IntArray:
    array = np.asarray(values)
    if array.ndim != 1:
        raise ValueError(f"{name} must have one dimension, got shape {array.shape}")
    if not len(array):
        return np.zeros(0, dtype=np.int64)
    if array.dtype.kind not in "iu":
        raise ValueError(f"{name} must be integers, got {array.dtype} (first value {array[0]!r})")
    if array.min() < 0:
        place = int(np.flatnonzero(array < 0)[0])
        raise ValueError(f"{name} must not be negative: {name}[{place}] = {array[place]}")
    if array.max() > np.iinfo(np.int64).max:
        raise ValueError(f"{name} must fit into int64, got {array.max()}")
    return array.astype(np.int64)  # a copy: the plan keeps it and makes it read-only
