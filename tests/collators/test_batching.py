"""Micro-batches against a count of the distinct prefixes that each one holds."""

from itertools import combinations_with_replacement, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixtrain.collators.batching import share_by_padded_tokens, share_by_unique_tokens
from radixtrain.testing import ragged_batches

UNIQUE, PADDED = share_by_unique_tokens, share_by_padded_tokens
BUDGETS = st.sampled_from([1, 3, 6, 10, 20, 1000, None])


def arrays(sequences):
    return [np.array(sequence, dtype=np.int64) for sequence in sequences]


def num_unique(sequences):
    return len({tuple(ids[: n + 1]) for ids in sequences for n in range(len(ids))})


def num_padded(sequences):
    return len(sequences) * max(map(len, sequences))


def test_an_empty_sequence_is_not_lost():
    with pytest.raises(ValueError, match="sequence 1 is empty"):
        share_by_unique_tokens(arrays([[1, 2], [], [3]]), 1, None)


@settings(max_examples=100, deadline=None)
@given(ragged_batches(max_sequences=10), BUDGETS)
@pytest.mark.parametrize(("share", "cost"), [(UNIQUE, num_unique), (PADDED, num_padded)], ids=["unique", "padded"])
def test_nothing_is_lost_and_the_budget_is_kept_and_used(share, cost, sequences, max_tokens):
    [members] = share(arrays(sequences), 1, max_tokens).groups
    assert sorted(index for batch in members for index in batch) == list(range(len(sequences)))
    batches = [[sequences[index] for index in batch] for batch in members]
    if max_tokens is None:
        assert len(batches) == 1
        return
    for batch in batches:
        assert cost(batch) <= max_tokens or len(batch) == 1
    for batch, following in pairwise(batches):
        assert cost([*batch, following[0]]) > max_tokens, "cut before the budget was full"


@pytest.mark.parametrize(
    ("share", "sequences", "num_ranks", "max_tokens", "groups", "costs"),
    [
        (UNIQUE, [[7, 8, 3], [7, 8, 1], [7, 8, 4], [7, 8, 2]], 2, 3, [[[1], [3]], [[0], [2]]], [6, 6]),
        (UNIQUE, [[1, 2], [3, 4]], 3, None, [[[0]], [[1]], []], [2, 2, 0]),  # nothing for a rank
        (UNIQUE, [[5] * 9], 2, 4, [[[0]], []], [9, 0]),  # longer than the budget
        (UNIQUE, [[4, 4]] * 5, 2, None, [[[0, 1, 2, 3, 4]], []], [2, 0]),  # copies cost nothing
        (UNIQUE, [], 2, 4, [[], []], [0, 0]),
        (PADDED, [[1] * 2, [1] * 5, [1] * 3, [1] * 5], 2, None, [[[1, 2]], [[3, 0]]], [10, 10]),  # every other one
        (PADDED, [[1] * 2, [1] * 5, [1] * 3, [1] * 5], 2, 5, [[[1], [2]], [[3], [0]]], [8, 7]),
        (PADDED, [[1] * 9, [1]], 3, 4, [[[0]], [[1]], []], [9, 1, 0]),
        (PADDED, [], 2, None, [[], []], [0, 0]),
    ],
)
def test_the_shares_of_ranks(share, sequences, num_ranks, max_tokens, groups, costs):
    shares = share(arrays(sequences), num_ranks, max_tokens)
    assert (shares.groups, shares.costs) == (groups, costs)
    assert shares.num_unique_tokens == (num_unique(sequences) if share is UNIQUE else None)


@settings(max_examples=60, deadline=None)
@given(ragged_batches(max_sequences=7), st.sampled_from([2, 3]))
def test_no_runs_of_the_sorted_order_are_better(sequences, num_ranks):
    """Every way to cut it is tried. A little better is allowed: 1/1000, of the search."""
    shares = share_by_unique_tokens(arrays(sequences), num_ranks, None)
    ordered = sorted(sequences)
    ways = combinations_with_replacement(range(len(ordered) + 1), num_ranks - 1)
    runs = ([ordered[start:end] for start, end in pairwise([0, *cuts, len(ordered)])] for cuts in ways)
    best = min(max(num_unique(run) for run in way) for way in runs)
    assert max(shares.costs) <= best * 1.001 + 1
    assert shares.costs == [num_unique([sequences[n] for group in rank for n in group]) for rank in shares.groups]


def test_positions_count():
    same = arrays([[1, 2, 3], [1, 2, 3]])
    assert share_by_unique_tokens(same, 2, None).costs == [3, 0]
    elsewhere = np.array([0, 1, 2, 5, 6, 7])
    assert share_by_unique_tokens(same, 2, None, elsewhere).costs == [3, 3]
