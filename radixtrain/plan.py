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

from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["PrefixPlan", "SortedSequences", "build_prefix_plan", "concatenate_ranges", "sort_sequences"]

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False, repr=False)
class PrefixPlan:
    """Index arrays between a packed ragged batch (T tokens) and its unique tokens (U rows). Immutable; all int64.

    gather_indices: (U,). unique row -> its first occurrence in the packed layout: `x_U = x_T[gather_indices]`.
    inverse_indices: (T,). packed token -> its unique row: `x_T = x_U[inverse_indices]`.
    position_ids: (U,). position of each unique row, in tokens from the start of its sequence unless given otherwise.
    cu_seqlens: (B+1,). where each sequence starts in the packed layout, as given.
    path_sequences: (E,). the sequences that bring new rows, in sorted order. The path of each is its rows, the last of
        which are new.
    path_cu_seqlens_q: (E+1,). where the new rows of each path start, and U.
    num_padding: padding rows at the end of U. They are a segment of their own that nothing else sees, and one more path
        behind those of the sequences.

    Attention needs more, which is worked out when it is first read:

    path_cu_seqlens_k: (E+1,). where each path starts in `path_keys`.
    path_keys: (T',). the rows of all paths, back to back: one varlen attention call, causal from the bottom right, that
        needs no tree.
    segment_starts: (S+1,). first unique row of each segment, and U.
    segment_parents: (S,). the segment that this one continues, -1 at a root.
    subtree_ends: (S,). one past the last unique row of the segment's descendants.
    """

    gather_indices: IntArray
    inverse_indices: IntArray
    position_ids: IntArray
    cu_seqlens: IntArray
    path_sequences: IntArray
    path_cu_seqlens_q: IntArray
    num_padding: int = 0

    def __post_init__(self) -> None:
        for value in vars(self).values():
            if isinstance(value, np.ndarray):
                value.setflags(write=False)

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        """Pickled without what is derived, and read-only again afterwards."""
        return type(self), tuple(getattr(self, field.name) for field in fields(self))

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
    def counts(self) -> IntArray:
        """(U,). how many packed tokens stand for each row; 0 for a padding row."""
        return _read_only(np.bincount(self.inverse_indices, minlength=self.num_rows))

    @cached_property
    def path_cu_seqlens_k(self) -> IntArray:
        lengths = _lengths(self.cu_seqlens)[self.path_sequences]
        return _read_only(_cumulative(np.append(lengths, self.num_padding) if self.num_padding else lengths))

    @cached_property
    def path_keys(self) -> IntArray:
        bounds = (self.cu_seqlens[self.path_sequences + end].tolist() for end in (0, 1))
        paths = [self.inverse_indices[start:end] for start, end in zip(*bounds, strict=True)]
        return _read_only(np.concatenate([*paths, np.arange(self.num_unique_tokens, self.num_rows)]))

    @property
    def segment_starts(self) -> IntArray:
        return self._segments[0]

    @property
    def segment_parents(self) -> IntArray:
        return self._segments[1]

    @cached_property
    def _segments(self) -> tuple[IntArray, IntArray]:
        """`segment_starts` and `segment_parents`: cut where a path jumps, and behind where it jumps from."""
        first_new, row_ahead = self.path_cu_seqlens_q[:-1], self._rows_ahead_of_paths()
        jumps = row_ahead != first_new - 1
        jumps[:1] = True
        here, ahead = first_new[jumps], row_ahead[jumps]
        is_start = np.zeros(self.num_rows + 1, dtype=bool)
        is_start[here] = is_start[ahead + 1] = is_start[self.num_rows] = True
        starts = is_start.nonzero()[0]
        ahead_of_segment = starts[:-1] - 1
        ahead_of_segment[starts.searchsorted(here)] = ahead
        return _read_only(starts), _read_only(starts.searchsorted(ahead_of_segment, side="right") - 1)

    def _rows_ahead_of_paths(self) -> IntArray:
        """(E,). the row in front of the first new one of each path, -1 at a root."""
        shared = _lengths(self.path_cu_seqlens_k) - _lengths(self.path_cu_seqlens_q)
        row_ahead = np.full(len(shared), -1)
        paths = shared.nonzero()[0]
        row_ahead[paths] = self.inverse_indices[self.cu_seqlens[self.path_sequences[paths]] + shared[paths] - 1]
        return row_ahead

    @cached_property
    def subtree_ends(self) -> IntArray:
        """Pre-order puts descendants right behind: an end travels up from the last child."""
        ends, parents = self.segment_starts[1:].tolist(), self.segment_parents.tolist()
        for segment in range(len(ends) - 1, -1, -1):
            parent = parents[segment]
            if parent >= 0 and ends[parent] < ends[segment]:
                ends[parent] = ends[segment]
        return _read_only(np.array(ends, dtype=np.int64))

    @cached_property
    def segment_levels(self) -> IntArray:
        """(S,). branches above each segment: 0 at a root."""
        levels: list[int] = []
        for parent in self.segment_parents.tolist():
            levels.append(levels[parent] + 1 if parent >= 0 else 0)
        return _read_only(np.array(levels, dtype=np.int64))

    @property
    def depth(self) -> int:
        """Levels of the radix tree; 1 where nothing branches, 0 for an empty batch."""
        return int(self.segment_levels.max()) + 1 if self.num_segments else 0

    @cached_property
    def row_subtree_ends(self) -> IntArray:
        """(U,). `subtree_ends` of each row's own segment: query q sees key k iff `k <= q < row_subtree_ends[k]`."""
        return _read_only(self.subtree_ends.repeat(_lengths(self.segment_starts)))

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
    order, lengths, starts = by_order.order, by_order.lengths, bounds[by_order.order]
    lcp = by_order.lcp if min_shared_tokens == 1 else _without_small_branches(by_order.lcp, min_shared_tokens)
    num_new = lengths - lcp
    depth_minus_row = lengths - np.add.accumulate(num_new)  # of the rows that each sequence brings, its last ones
    row_minus_token = np.zeros(len(bounds) - 1, dtype=np.int64)
    row_minus_token[order] = -starts - depth_minus_row

    count = np.arange(len(ids))
    inverse = _shifted(count, row_minus_token, _lengths(bounds))
    _copy_shared_heads(inverse, starts, lcp)
    depths = _shifted(count, depth_minus_row, num_new)
    gather = _shifted(depths, starts, num_new)
    _move_to_first_occurrences(gather, inverse, order, starts, lcp)
    brings = num_new.nonzero()[0]
    plan = PrefixPlan(
        gather_indices=gather,
        inverse_indices=inverse,
        position_ids=depths if positions is None else positions[gather],
        cu_seqlens=bounds,
        path_sequences=order[brings],
        path_cu_seqlens_q=_cumulative(num_new[brings]),
    )
    padding = -len(gather) % pad_to_multiple_of if pad_to_multiple_of else 0
    return _padded(plan, padding) if padding else plan


def sort_sequences(input_ids: IntArray, cu_seqlens: IntArray, position_ids: IntArray | None = None) -> SortedSequences:
    """Sequences sorted by their (token, position) pairs, with the LCP of neighbours.

    input_ids, position_ids: (T,), int64. Positions are left out of the key where every sequence counts from 0, since
        there the depth is the position.
    cu_seqlens: (B+1,), int64.

    Raises ValueError, naming it, for a token or position that is negative.

    Big-endian bytes compare as the numbers do, so that Python's sort runs on memcmp. The sort is stable.
    """
    lengths = _lengths(cu_seqlens)
    present = lengths.nonzero()[0]
    if position_ids is not None and np.array_equal(position_ids, concatenate_ranges(0 * present, lengths[present])):
        position_ids = None
    pairs = input_ids[:, None] if position_ids is None else np.stack([input_ids, position_ids], axis=1)
    words = _big_endian(pairs)
    step = words.strides[0]
    packed, bounds = words.tobytes(), (cu_seqlens * step).tolist()
    keys = [packed[start:end] for start, end in pairwise(bounds)]
    order = sorted(present.tolist(), key=keys.__getitem__)
    lcp = _neighbour_lcp([keys[index] for index in order], step)
    by_order = np.array(order, dtype=np.int64)
    return SortedSequences(by_order, lengths[by_order], lcp)


def _big_endian(pairs: IntArray) -> npt.NDArray[np.unsignedinteger[Any]]:
    """(T, 1 or 2). tokens and positions in the fewest bytes; as unsigned numbers, negative ones are the largest."""
    if pairs.view(np.uint64).max(initial=0) < 2**32:
        return pairs.astype(">u4")
    for name, values in zip(("input_ids", "position_ids"), pairs.T, strict=False):
        _check_not_negative(name, values)
    return pairs.astype(">u8")


def _neighbour_lcp(keys: list[bytes], step: int) -> IntArray:
    """LCP of each key with the one before it, none of which sorts behind it, in pairs of `step` bytes.

    Neighbours mostly part where the last two did: `head` is tried first, 0.2 us in place of 1.2.
    """
    lcp, shared, before, head, ahead = [], 0, b"", b"", b""
    for here in keys:
        after = here[shared : shared + step]
        if (after and after == ahead) or not here.startswith(head):
            shared = _common_prefix(before, here, step)
            head, after = here[:shared], here[shared : shared + step]
        lcp.append(shared)
        before, ahead = here, after
    return np.array(lcp, dtype=np.int64) // step


def _common_prefix(before: bytes, here: bytes, step: int) -> int:
    """Bytes that two keys begin with, in whole pairs of `step` bytes."""
    if before[:step] != here[:step]:
        return 0
    if here.startswith(before):
        return len(before)
    size = min(len(before), len(here)) // 4
    differs = np.frombuffer(before, np.uint32, size) != np.frombuffer(here, np.uint32, size)
    return int(differs.argmax()) * 4 // step * step


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


def _shifted(values: IntArray, shifts: IntArray, lengths: IntArray) -> IntArray:
    """(sum of lengths,). the first of the values, in runs of these lengths, each plus the shift of its run."""
    shifted = shifts.repeat(lengths)
    shifted += values[: len(shifted)]
    return shifted


def _copy_shared_heads(inverse: IntArray, starts: IntArray, lcp: IntArray) -> None:
    """The rows of what a sequence shares with the one before it in sorted order, in place."""
    before, num_before, head = 0, 0, inverse[:0]
    for start, shared in zip(starts.tolist(), lcp.tolist(), strict=True):
        if shared != num_before:  # else the one before took the same head from its own neighbour
            head = inverse[before : before + shared]
        if shared:
            inverse[start : start + shared] = head
        before, num_before = start, shared


def _move_to_first_occurrences(
    gather: IntArray, inverse: IntArray, order: IntArray, starts: IntArray, lcp: IntArray
) -> None:
    """From the token that brings a row in sorted order to the first one in the batch, in place.

    They differ where a sequence stands behind its neighbour in sorted order and in front of it in the batch.
    """
    places = ((order[1:] < order[:-1]) & (lcp[1:] > 0)).nonzero()[0] + 1
    if not len(places):
        return
    places = places[order[places].argsort()]  # the earliest first: it leaves the others little to move
    first, end = starts[places], starts[places] + lcp[places]
    for start, stop, row in zip(first.tolist(), end.tolist(), inverse[end - 1].tolist(), strict=True):
        if start < gather[row]:  # else the last shared row, and so every one above it, was there before
            head = inverse[start:stop]
            gather[head] = np.minimum(gather[head], np.arange(start, stop))


def _padded(plan: PrefixPlan, padding: int) -> PrefixPlan:
    """The plan with `padding` rows behind the last."""
    return replace(
        plan,
        gather_indices=np.append(plan.gather_indices, np.zeros(padding, dtype=np.int64)),
        position_ids=np.append(plan.position_ids, np.arange(padding)),
        path_cu_seqlens_q=np.append(plan.path_cu_seqlens_q, plan.num_rows + padding),
        num_padding=padding,
    )


def _read_only(array: IntArray) -> IntArray:
    array.setflags(write=False)
    return array


def _lengths(cu_seqlens: IntArray) -> IntArray:
    """(n,). `np.diff` in half its time, which is 1 us."""
    lengths: IntArray = cu_seqlens[1:] - cu_seqlens[:-1]
    return lengths


def _cumulative(lengths: IntArray) -> IntArray:
    """(n+1,). where each length starts when they lie back to back, and their sum."""
    bounds = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.add.accumulate(lengths, out=bounds[1:])
    return bounds


def concatenate_ranges(starts: IntArray, lengths: IntArray) -> IntArray:
    """(sum of lengths,). the ranges [start, start + length), none of them empty, back to back: ones, added up."""
    ends = np.add.accumulate(lengths)
    steps = np.ones(ends[-1] if len(ends) else 0, dtype=np.int64)
    steps[:1] = starts[:1]
    steps[ends[:-1]] = starts[1:] - starts[:-1] - lengths[:-1] + 1
    return np.add.accumulate(steps, out=steps)


def _validated(input_ids: Any, cu_seqlens: Any, position_ids: Any) -> tuple[IntArray, IntArray, IntArray | None]:
    """int64, of one dimension, of lengths that fit each other. `sort_sequences` finds negative tokens and positions."""
    ids = _integers("input_ids", input_ids)
    bounds = _integers("cu_seqlens", cu_seqlens).copy()  # the plan keeps it and makes it read-only
    if not len(bounds) or bounds[0] != 0:
        raise ValueError(f"cu_seqlens must start at 0, got {bounds[:1].tolist() or 'no entry'}")
    falls = bounds[1:] < bounds[:-1]
    if np.count_nonzero(falls):
        _check_not_negative("cu_seqlens", bounds)
        i = int(falls.argmax())
        raise ValueError(
            f"cu_seqlens must not fall: cu_seqlens[{i}] = {bounds[i]}, cu_seqlens[{i + 1}] = {bounds[i + 1]}"
        )
    if bounds[-1] != len(ids):
        raise ValueError(f"cu_seqlens must end at the number of tokens, {len(ids)}, got {bounds[-1]}")
    if position_ids is None:
        return ids, bounds, None
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
    if array.dtype == np.uint64 and array.max() > np.iinfo(np.int64).max:
        raise ValueError(f"{name} must fit into int64, got {array.max()}")
    return array.astype(np.int64, copy=False)


def _check_not_negative(name: str, values: IntArray) -> None:
    if values.min(initial=0) < 0:
        place = int((values < 0).argmax())
        raise ValueError(f"{name} must not be negative: {name}[{place}] = {values[place]}")
