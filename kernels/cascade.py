"""Cascade as calls: segments attend to themselves, and their descendants attend to them without a mask.

U rows in depth-first pre-order. The descendants of segment v are the rows that follow it, so for one segment the
queries `[end, subtree_end)` and the keys `[start, end)` are plain slices. Segments of one level of the tree touch
disjoint rows. No row is copied.

A device gets one packed call for all segments and one for each level of the tree (`TreeLayout.packed_pieces`). The
host, whose kernels loop, gets bundles (`bundled_pieces`): short neighbouring segments share a call with their part of
the tree mask, because a call on a few tokens costs more than the pairs that such a mask hides. The descendants after a
bundle attend to the bundle's segments in calls of their own, which are slices. The 84 segments of 64 banking77 rows,
most of them a few tokens, were 104 calls one by one. Either way every pair of a query and a key that the tree mask
allows is in exactly one call.

It cannot apply a sliding window shorter than the longest sequence: a call does not know how far its keys are.

Sources: Hydragen (section 3) and FlashInfer's cascade for the forward; `merge_attention.py` for the backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from radixtrain.kernels.merge_attention import Piece
from radixtrain.kernels.varlen_args import Ragged

BUNDLE = 32  # most rows of a bundle of several segments; a longer segment is its own bundle


class Level(NamedTuple):
    """One level of the cascade: its segments with descendants, as one varlen call. Host ints.

    first_query, first_key: the first rows; with `num_entries` 1 the others follow them.
    """

    num_entries: int
    num_queries: int
    num_keys: int
    max_seqlen_q: int
    max_seqlen_k: int
    first_query: int
    first_key: int


def bundled_pieces(
    segment_starts: Tensor, subtree_ends: Tensor, row_subtree_ends: Tensor, bundle: int = BUNDLE
) -> tuple[Piece, ...]:
    """Make one call with an entry per bundle, and a slice per run of segments with descendants after its bundle.

    segment_starts (S+1), subtree_ends (S), row_subtree_ends (U): of a `TreeLayout` on the host.
    bundle: most rows of a bundle of several segments.
    """
    starts, ends = segment_starts.tolist(), subtree_ends.tolist()
    rows, after = cascade_bounds(starts, ends, bundle)
    own = Piece(slice(None), slice(None), _own_call(rows, starts, row_subtree_ends))
    return (own, *(_sliced_piece(*bounds) for bounds in after))


def cascade_bounds(
    starts: list[int], subtree_ends: list[int], bundle: int = BUNDLE
) -> tuple[list[int], list[tuple[int, int, int, int]]]:
    """Return the first row of each bundle, and U; and for each slice (first query, last + 1, first key, last + 1)."""
    first_segments = _bundles(starts, bundle)
    rows = [starts[segment] for segment in first_segments]
    return rows, list(_after_their_bundle(first_segments, starts, subtree_ends))


def _bundles(starts: list[int], bundle: int) -> list[int]:
    """Return the first segment of each bundle, and S. A bundle has as many segments as fit, or a single one."""
    firsts = [0] if len(starts) > 1 else []
    for segment, end in enumerate(starts[1:]):
        if end - starts[firsts[-1]] > bundle and segment > firsts[-1]:
            firsts.append(segment)
    return [*firsts, len(starts) - 1]


def _own_call(rows: list[int], starts: list[int], row_subtree_ends: Tensor) -> Ragged:
    """Make the call of bundles onto themselves: causal for a single segment, else with its part of the tree mask."""
    cu_seqlens = torch.tensor(rows, dtype=torch.int32, device="cpu")
    segment_at = dict(pairwise(starts))
    bounds = tuple((start, end, start, end) for start, end in pairwise(rows))
    masks = tuple(
        None if segment_at[start] == end else _tree_mask(start, end, row_subtree_ends) for start, end in pairwise(rows)
    )
    longest = max((end - start for start, end in pairwise(rows)), default=0)
    return Ragged(cu_seqlens, cu_seqlens, longest, longest, True, bounds, masks)


def _tree_mask(start: int, end: int, row_subtree_ends: Tensor) -> Tensor:
    """Make the mask, float32, of the rows [start, end): 0 if `k <= q < row_subtree_ends[k]`, else -inf."""
    rows = torch.arange(start, end, device="cpu")
    hidden = (rows[:, None] < rows) | (rows[:, None] >= row_subtree_ends[start:end])
    return torch.zeros(hidden.shape, device="cpu").masked_fill_(hidden, float("-inf"))


def _after_their_bundle(
    first_segments: list[int], starts: list[int], subtree_ends: list[int]
) -> Iterator[tuple[int, int, int, int]]:
    """Yield (first query, last query + 1, first key, last key + 1) of descendants outside their ancestor's bundle.

    Neighbouring segments whose subtrees end at one row share a slice.
    """
    for first, last in pairwise(first_segments):
        bundle_end, run_start = starts[last], starts[first]
        for segment in range(first, last):
            ends_here = segment + 1 == last or subtree_ends[segment + 1] != subtree_ends[segment]
            if ends_here:
                if subtree_ends[segment] > bundle_end:
                    yield bundle_end, subtree_ends[segment], run_start, starts[segment + 1]
                run_start = starts[segment + 1]


def _sliced_piece(first_query: int, query_end: int, first_key: int, key_end: int) -> Piece:
    ragged = Ragged.whole(query_end - first_query, key_end - first_key)
    return Piece(slice(first_query, query_end), slice(first_key, key_end), ragged)
