"""The prefix plan: which tokens of a packed ragged batch are the same computation, and which row computes them.

Two tokens are the same node when their whole history of (token, position) is the same. The plan numbers the distinct
nodes of that trie in depth-first pre-order, so that

- a segment (an edge of the radix tree, a run of nodes without a branch) owns a contiguous range of unique rows;
- all its descendants are the contiguous range right after it;
- the tree mask is one integer per key: query q sees key k iff `k <= q < subtree_end(k)`.

No pointer tree is walked. The sequences are sorted and neighbours are compared once (`radixtrain/tree/sorting.py`).
Everything is read off the array of longest common prefixes (LCP), as a suffix array replaces a suffix tree (Abouelhoda,
Kurtz and Ohlebusch 2004, "lcp-intervals"). In sorted order the new tokens of a sequence are a contiguous suffix of it,
and still are when the branch with the most rows has moved to the front, where it continues the rows of its parent.

    sequences      in order, with LCP      unique rows (U = 6)           segments
    0: 7 8 9       2: 7 8 9 6  lcp 0       row    0 1 2 3 4 5            [0, 2)  7 8  subtree_end 5
    1: 7 8 5       0: 7 8 9    lcp 3       token  7 8 9 6 5 9            [2, 4)  9 6  subtree_end 4
    2: 7 8 9 6     1: 7 8 5    lcp 2                                     [4, 5)  5    subtree_end 5
    3: 9           3: 9        lcp 0                                     [5, 6)  9    subtree_end 6

NumPy only: the plan is built in DataLoader workers, and nothing here imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from radixtrain.tree.arrays import IntArray, cumulative, lengths_of, read_only, validated_batch
from radixtrain.tree.sorting import heaviest_first, sort_sequences, without_small_branches


@dataclass(frozen=True, eq=False, repr=False)
class PrefixPlan:
    """Index arrays between a packed ragged batch (T tokens) and its unique tokens (U rows). Immutable; all int64.

    gather_indices: (U,). unique row -> one of its tokens in the packed layout: `x_U = x_T[gather_indices]`.
    inverse_indices: (T,). packed token -> its unique row: `x_T = x_U[inverse_indices]`.
    position_ids: (U,). position of each unique row, in tokens from the start of its sequence unless given otherwise.
    cu_seqlens: (B+1,). where each sequence starts in the packed layout, as given.
    path_sequences: (E,). the sequences that bring new rows, in the order of these. The path of each is its rows, the
        last of which are new.
    path_cu_seqlens_q: (E+1,). where the new rows of each path start, and U.
    num_padding: padding rows at the end of U. They are a segment of their own that nothing else sees, and one more path
        after those of the sequences.

    Attention needs more, which is computed when it is first read:

    path_cu_seqlens_k: (E+1,). where each path starts in `path_keys`.
    path_keys: (T',). the rows of all paths, back to back: one varlen attention call, causal from the bottom right, that
        needs no tree.
    segment_starts: (S+1,). first unique row of each segment, and U.
    segment_parents: (S,). the segment that this one continues, -1 at a root.
    subtree_ends: (S,). one past the last unique row of the segment's descendants.

    >>> plan = build_prefix_plan([1, 2, 3, 1, 2, 4], [0, 3, 6])
    >>> plan
    PrefixPlan(B=2, T=6, U=4, r=1.50, depth=2, segments=3)
    >>> plan.segment_starts.tolist(), plan.segment_parents.tolist()
    ([0, 2, 3, 4], [-1, 0, 0])
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
        """Pickle without what is derived, and read-only again afterwards."""
        return type(self), tuple(getattr(self, field.name) for field in fields(self))

    @property
    def num_sequences(self) -> int:
        """Return B, the number of sequences."""
        return len(self.cu_seqlens) - 1

    @property
    def num_tokens(self) -> int:
        """Return T, the number of packed original tokens."""
        return len(self.inverse_indices)

    @property
    def num_rows(self) -> int:
        """Count the rows that the model computes: the unique tokens and the padding."""
        return len(self.gather_indices)

    @property
    def num_unique_tokens(self) -> int:
        """Return U, the nodes of the token trie, without padding."""
        return self.num_rows - self.num_padding

    @property
    def num_segments(self) -> int:
        """Return S, the number of segments, including that of the padding."""
        return len(self.segment_parents)

    @property
    def compression_ratio(self) -> float:
        """Return r = T / U; 1.0 for an empty batch."""
        return self.num_tokens / self.num_unique_tokens if self.num_tokens else 1.0

    @cached_property
    def path_cu_seqlens_k(self) -> IntArray:
        lengths = lengths_of(self.cu_seqlens)[self.path_sequences]
        return read_only(cumulative(np.append(lengths, self.num_padding) if self.num_padding else lengths))

    @cached_property
    def path_keys(self) -> IntArray:
        bounds = (self.cu_seqlens[self.path_sequences + end].tolist() for end in (0, 1))
        paths = [self.inverse_indices[start:end] for start, end in zip(*bounds, strict=True)]
        return read_only(np.concatenate([*paths, np.arange(self.num_unique_tokens, self.num_rows)]))

    @property
    def segment_starts(self) -> IntArray:
        return self._segments[0]

    @property
    def segment_parents(self) -> IntArray:
        return self._segments[1]

    @cached_property
    def _segments(self) -> tuple[IntArray, IntArray]:
        """Return `segment_starts` and `segment_parents`: cut before each row a path enters and after each it leaves."""
        first_new, last_shared = self.path_cu_seqlens_q[:-1], self._last_shared_rows()
        jumps = last_shared != first_new - 1
        jumps[:1] = True
        jumps_to, leaves = first_new[jumps], last_shared[jumps]
        is_start = np.zeros(self.num_rows + 1, dtype=bool)
        is_start[jumps_to] = is_start[leaves + 1] = is_start[self.num_rows] = True
        starts = is_start.nonzero()[0]
        row_before = starts[:-1] - 1
        row_before[starts.searchsorted(jumps_to)] = leaves
        return read_only(starts), read_only(starts.searchsorted(row_before, side="right") - 1)

    def _last_shared_rows(self) -> IntArray:
        """Return the row before the first new one of each path, (E,); -1 at a root."""
        num_shared = lengths_of(self.path_cu_seqlens_k) - lengths_of(self.path_cu_seqlens_q)
        rows = np.full(len(num_shared), -1)
        paths = num_shared.nonzero()[0]
        rows[paths] = self.inverse_indices[self.cu_seqlens[self.path_sequences[paths]] + num_shared[paths] - 1]
        return rows

    @cached_property
    def subtree_ends(self) -> IntArray:
        """Return the end of each segment's descendants: pre-order puts them right after it, so ends travel up."""
        ends, parents = self.segment_starts[1:].tolist(), self.segment_parents.tolist()
        for segment in range(len(ends) - 1, -1, -1):
            parent = parents[segment]
            if parent >= 0 and ends[parent] < ends[segment]:
                ends[parent] = ends[segment]
        return read_only(np.array(ends, dtype=np.int64))

    @property
    def depth(self) -> int:
        """Count the levels of the radix tree; 1 if nothing branches, 0 for an empty batch."""
        levels: list[int] = []
        for parent in self.segment_parents.tolist():
            levels.append(levels[parent] + 1 if parent >= 0 else 1)
        return max(levels, default=0)

    def __repr__(self) -> str:
        padding = f" + {self.num_padding} padding" if self.num_padding else ""
        return (
            f"PrefixPlan(B={self.num_sequences}, T={self.num_tokens}, U={self.num_unique_tokens}{padding}, "
            f"r={self.compression_ratio:.2f}, depth={self.depth}, segments={self.num_segments})"
        )


def build_prefix_plan(
    input_ids: npt.ArrayLike,
    cu_seqlens: npt.ArrayLike,
    position_ids: npt.ArrayLike | None = None,
    *,
    min_shared_tokens: int = 1,
    pad_to_multiple_of: int | None = None,
) -> PrefixPlan:
    """Build the prefix plan of a packed ragged batch.

    input_ids: (T,), integer. token ids of all sequences, back to back.
    cu_seqlens: (B+1,), integer. where each sequence starts, and T. Empty sequences are allowed.
    position_ids: (T,), integer. positions in tokens; default: restart at 0 in every sequence. Tokens at different
        positions are never shared.
    min_shared_tokens: a branch point that saves fewer tokens than this gets no branch: the run before it is
        computed once per branch instead. A branch point saves the length of the run times (branches - 1).
    pad_to_multiple_of: pad the unique rows to a multiple of this many; padding rows gather token 0 and are seen by
        none.

    Raises ValueError that names the wrong value and its place for anything that is not such a batch.

    >>> plan = build_prefix_plan([1, 2, 3, 1, 2, 4], [0, 3, 6])
    >>> plan.gather_indices.tolist(), plan.inverse_indices.tolist()
    ([0, 1, 2, 5], [0, 1, 2, 0, 1, 3])

    Source: the fold and scatter indices of RadixMLP (section 3), with `gather_indices` for `fold_gather` and
    `inverse_indices` for `scatter_indices`.
    """
    ids, bounds, positions = validated_batch(input_ids, cu_seqlens, position_ids)
    _check_at_least_one("min_shared_tokens", min_shared_tokens)
    _check_at_least_one("pad_to_multiple_of", pad_to_multiple_of)

    by_order = sort_sequences(ids, bounds, positions)
    if min_shared_tokens > 1:
        by_order = replace(by_order, lcp=without_small_branches(by_order.lcp, min_shared_tokens))
    by_order = heaviest_first(by_order)
    order, lengths, lcp, starts = by_order.order, by_order.lengths, by_order.lcp, bounds[by_order.order]
    num_new = lengths - lcp
    depth_minus_row = lengths - np.add.accumulate(num_new)  # of the last rows that each sequence adds
    row_minus_token = np.zeros(len(bounds) - 1, dtype=np.int64)
    row_minus_token[order] = -starts - depth_minus_row

    count = np.arange(len(ids))
    inverse = _shifted(count, row_minus_token, lengths_of(bounds))
    _copy_shared_heads(inverse, starts, lcp)
    depths = _shifted(count, depth_minus_row, num_new)
    gather = _shifted(depths, starts, num_new)
    brings = num_new.nonzero()[0]
    plan = PrefixPlan(
        gather_indices=gather,
        inverse_indices=inverse,
        position_ids=depths if positions is None else positions[gather],
        cu_seqlens=bounds,
        path_sequences=order[brings],
        path_cu_seqlens_q=cumulative(num_new[brings]),
    )
    padding = -len(gather) % pad_to_multiple_of if pad_to_multiple_of else 0
    return _padded(plan, padding) if padding else plan


def _check_at_least_one(name: str, number: int | None) -> None:
    if number is not None and number < 1:
        raise ValueError(f"{name} must be at least 1, got {number}")


def _shifted(values: IntArray, shifts: IntArray, lengths: IntArray) -> IntArray:
    """Cut the first values into runs of these lengths, and add to each run its shift."""
    shifted = shifts.repeat(lengths)
    shifted += values[: len(shifted)]
    return shifted


def _copy_shared_heads(inverse: IntArray, starts: IntArray, lcp: IntArray) -> None:
    """Write the rows of the tokens that a sequence shares with the one before it in sorted order, in place."""
    before, num_before, head = 0, 0, inverse[:0]
    for start, shared in zip(starts.tolist(), lcp.tolist(), strict=True):
        if shared != num_before:  # else the sequence before took the same head from its neighbour
            head = inverse[before : before + shared]
        if shared:
            inverse[start : start + shared] = head
        before, num_before = start, shared


def _padded(plan: PrefixPlan, padding: int) -> PrefixPlan:
    """Append `padding` rows to the plan."""
    return replace(
        plan,
        gather_indices=np.append(plan.gather_indices, np.zeros(padding, dtype=np.int64)),
        position_ids=np.append(plan.position_ids, np.arange(padding)),
        path_cu_seqlens_q=np.append(plan.path_cu_seqlens_q, plan.num_rows + padding),
        num_padding=padding,
    )
