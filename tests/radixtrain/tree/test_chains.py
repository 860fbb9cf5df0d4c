"""The calls of the cascade, against the pairs of (query, key) that the tree mask allows."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from radixtrain.kernels.cpu_loops import rectangles_of
from radixtrain.testing import ragged_batches
from radixtrain.tree.chains import cascade
from radixtrain.tree.layout import TreeLayout
from tests.support.batches import DEEP, agent, comb, mask_pairs, plan_of, seen_pairs


def cut(sequences):
    plan = plan_of(sequences)
    return cascade(*(x.tolist() for x in (plan.segment_starts, plan.segment_parents, plan.subtree_ends)))


def test_the_drawn_chain():
    """Nine rows in a chain, with a row hanging on it after 2, 5 and 6: three places, the last one first."""
    chain = [*range(9)]
    own, *calls = cut([chain, [*chain[:2], 72], [*chain[:5], 75], [*chain[:6], 76]])
    assert own == [(0, 9, 0, 9), (9, 10, 9, 10), (10, 11, 10, 11), (11, 12, 11, 12)]
    assert calls == [
        [(9, 10, 5, 6), (11, 12, 0, 2)],  # 76 onto the third piece, 72 onto the first
        [(9, 11, 0, 5)],  # 76 and 75 onto the first two
    ]


def test_a_chain_below_a_chain():
    """Rows 7 8 9 | 4 4 4 5, and what hangs on the second chain, 6, reuses no call that its rows are in."""
    own, *calls = cut([[7, 8, 9, 1, 1, 1, 1, 1], [7, 8, 4, 4, 4, 5], [7, 8, 4, 4, 6]])
    assert own == [(0, 8, 0, 8), (8, 12, 8, 12), (12, 13, 12, 13)]
    assert calls == [[(8, 13, 0, 2)], [(12, 13, 8, 10)]]


@pytest.mark.parametrize(
    ("sequences", "most_calls", "most_merged"),
    [(agent(20), 6, 0.5), (comb(200), 9, 2.0), ([[*range(64), 100 + n] for n in range(32)], 2, 0.5)],
    ids=["an agent of 20 turns", "a comb of 200 forks", "one prompt"],
)
def test_few_calls_and_few_merged_rows(sequences, most_calls, most_merged):
    own, *calls = cut(sequences)
    merged = sum(end - start for entries in calls for start, end, *_ in entries)
    assert 1 + len(calls) <= most_calls
    assert merged <= most_merged * own[-1][1]


def test_many_short_branches_are_few_calls_on_the_host():
    layout = TreeLayout.from_plan(plan_of([[*range(600), 1000 + n // 4, 2000 + n, 3, 4, 5] for n in range(64)]))
    assert [len(piece.ragged.cu_seqlens_q) - 1 for piece in layout.pieces] == [64, 1, 16]
    assert sum(len(rectangles_of(piece.ragged)) for piece in layout.pieces) <= 24


@example(DEEP, 1, None)
@settings(max_examples=400, deadline=None)
@given(
    ragged_batches(min_length=0, min_sequences=0),
    st.sampled_from([1, 2, 3, 1000]),
    st.sampled_from([None, 8]),
)
def test_every_pair_of_the_mask_is_in_one_call(sequences, min_shared_tokens, pad_to_multiple_of):
    """In the calls of a cascade, and in the one of all paths.

    No call of a cascade has a query or a key twice: their shares of a gradient are added without an order.
    """
    plan = plan_of(sequences, min_shared_tokens=min_shared_tokens, pad_to_multiple_of=pad_to_multiple_of)
    layout = TreeLayout.from_plan(plan)
    assert layout.row_subtree_ends.tolist() == plan.subtree_ends.repeat(np.diff(plan.segment_starts)).tolist()
    pieces, pairs = layout.pieces, Counter(mask_pairs(plan))
    assert sum((seen_pairs(piece, plan.num_rows) for piece in pieces), Counter()) == pairs
    assert seen_pairs(replace(layout.paths, k_rows=layout.path_keys), plan.num_rows) == pairs
    assert pieces[0].ragged.cu_seqlens_q[-1] == plan.num_rows, "the first meets every row"
    for rows in (rows for piece in pieces for rows in (piece.q_rows, piece.k_rows)):
        taken = torch.arange(plan.num_rows)[rows].tolist()
        assert len(taken) == len(set(taken))
