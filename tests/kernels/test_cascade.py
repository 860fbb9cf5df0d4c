"""The calls of the cascade, against the pairs of (query, key) that the tree mask allows."""

from collections import Counter

import numpy as np
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from plans import DEEP, FOREST, plan_of

from radixtrain.kernels.cascade import BUNDLE, bundled_pieces
from radixtrain.testing import ragged_batches
from radixtrain.tree.layout import TreeLayout


def layout_of(sequences, **options):
    return TreeLayout.from_plan(plan_of(sequences, **options))


def bundled(layout, bundle=BUNDLE):
    return bundled_pieces(layout.segment_starts, layout.subtree_ends, layout.row_subtree_ends, bundle)


def pairs(piece, num_rows):
    """Counts every (query, key) pair that a piece computes."""
    rows = torch.arange(num_rows)
    queries, keys = rows[piece.q_rows].tolist(), rows[piece.k_rows].tolist()
    q, k = piece.ragged.cu_seqlens_q.tolist(), piece.ragged.cu_seqlens_k.tolist()
    assert (q[0], k[0]) == (0, 0)
    assert (q[-1], k[-1]) == (len(queries), len(keys))
    assert piece.ragged.max_seqlen_q == max(np.diff(q), default=0)
    assert piece.ragged.max_seqlen_k == max(np.diff(k), default=0)
    if piece.ragged.bounds is not None:
        assert piece.ragged.bounds == tuple(zip(q[:-1], q[1:], k[:-1], k[1:], strict=True))
    found = Counter()
    masks = piece.ragged.masks or [None] * (len(q) - 1)
    for q0, q1, k0, k1, mask in zip(q[:-1], q[1:], k[:-1], k[1:], masks, strict=True):
        hidden = (k1 - k0) - (q1 - q0)  # bottom-right causal: the last query sees every key
        for i in range(q0, q1):
            seen = k0 + hidden + (i - q0) + 1 if piece.ragged.causal else k1
            places = range(k0, seen) if mask is None else (k0 + torch.where(mask[i - q0] == 0)[0]).tolist()
            found.update((queries[i], keys[place]) for place in places)
    return found


def mask_pairs(plan):
    ends = plan.row_subtree_ends.tolist()
    return {(query, key) for key, end in enumerate(ends) for query in range(key, end)}


def test_levels_of_a_single_segment_are_slices():
    own, several, single = layout_of(FOREST).packed_pieces()
    assert own.q_rows == own.k_rows == slice(None)
    assert several.q_rows.tolist() == [2, 3, 4, 6, 7, 8, 9]
    assert several.k_rows.tolist() == [0, 1, 5]
    assert (single.q_rows, single.k_rows) == (slice(8, 10), slice(7, 8))


def test_bundles_literally():
    """Rows 7 8 | 5 | 9 6 | 9 | 1 | 2 | 2 | 4 in bundles of 3: [7 8 5] [9 6 9] [1 2 2] [4]."""
    own, *after = bundled(layout_of(FOREST), bundle=3)
    assert own.ragged.cu_seqlens_q.tolist() == [0, 3, 6, 9, 10]
    seen = [None if mask is None else (mask == 0).int().tolist() for mask in own.ragged.masks]
    assert seen == [
        [[1, 0, 0], [1, 1, 0], [1, 1, 1]],
        [[1, 0, 0], [1, 1, 0], [0, 0, 1]],
        [[1, 0, 0], [0, 1, 0], [0, 1, 1]],
        None,
    ]
    assert [(piece.q_rows, piece.k_rows) for piece in after] == [
        (slice(3, 5), slice(0, 2)),  # 9 6 onto 7 8
        (slice(6, 10), slice(5, 6)),  # all of the second tree onto 9
        (slice(9, 10), slice(7, 8)),  # 4 onto 2
    ]


def test_long_segments_are_bundles_and_keep_their_descendants_in_one_slice():
    trunk = list(range(100, 100 + BUNDLE + 1))
    own, after = bundled(layout_of([[*trunk, 1], [*trunk, 2], [*trunk, 3]]))
    assert own.ragged.bounds == ((0, len(trunk), 0, len(trunk)), (len(trunk), len(trunk) + 3) * 2)
    assert own.ragged.masks[0] is None
    assert (after.q_rows, after.k_rows) == (slice(len(trunk), len(trunk) + 3), slice(0, len(trunk)))


def test_many_short_branches_are_few_calls():
    sequences = [[*range(100, 700), 1000 + n // 4, 2000 + n, 3, 4, 5] for n in range(64)]
    layout = layout_of(sequences)
    num_segments = len(layout.subtree_ends)
    own, *after = layout.pieces
    assert num_segments == 1 + 16 + 64
    assert len(own.ragged.bounds) <= 12 and len(after) <= 12


@example(DEEP, 1, None, 3)
@settings(max_examples=60, deadline=None)
@given(
    ragged_batches(min_length=0, min_sequences=0),
    st.sampled_from([1, 2, 3, 1000]),
    st.sampled_from([None, 8]),
    st.sampled_from([1, 2, 3, 5, 64]),
)
def test_every_pair_of_the_mask_is_in_one_call(sequences, min_shared_tokens, pad_to_multiple_of, bundle):
    plan = plan_of(sequences, min_shared_tokens=min_shared_tokens, pad_to_multiple_of=pad_to_multiple_of)
    layout = TreeLayout.from_plan(plan)
    for pieces in (tuple(layout.packed_pieces()), bundled(layout, bundle)):
        assert sum((pairs(piece, plan.num_rows) for piece in pieces), Counter()) == Counter(mask_pairs(plan))
        assert pieces[0].ragged.cu_seqlens_q[-1] == plan.num_rows, "the first meets every row"
    assert len(tuple(layout.packed_pieces())) == 1 + len(layout.levels) == 1 + max(plan.depth - 1, 0)
