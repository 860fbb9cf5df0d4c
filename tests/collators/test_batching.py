"""Micro-batches against a count of the distinct prefixes that each one holds."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixtrain.collators.batching import cut_by_padded_tokens, cut_step
from radixtrain.testing import ragged_batches

BUDGETS = st.sampled_from([1, 3, 6, 10, 20, 1000, None])


def arrays(sequences):
    return [np.array(sequence, dtype=np.int64) for sequence in sequences]


def cut_by_unique_tokens(sequences, max_tokens):
    return cut_step(sequences, max_tokens).groups


def num_unique(sequences):
    return len({tuple(ids[: n + 1]) for ids in sequences for n in range(len(ids))})


def num_padded(sequences):
    return len(sequences) * max(map(len, sequences))


@pytest.mark.parametrize(
    ("sequences", "max_tokens", "expected"),
    [
        pytest.param([[1, 2, 3], [5, 6], [1, 2, 4]], None, [[0, 2, 1]], id="no budget: one batch, sorted"),
        pytest.param([[1, 2, 3], [5, 6], [1, 2, 4]], 6, [[0, 2, 1]], id="exactly full"),
        pytest.param([[1, 2, 3], [5, 6], [1, 2, 4]], 5, [[0, 2], [1]], id="one too many"),
        pytest.param([[1, 2, 3], [5, 6], [1, 2, 4]], 4, [[0, 2], [1]], id="the shared part is paid once"),
        pytest.param([[1, 2, 3], [5, 6], [1, 2, 4]], 3, [[0], [2], [1]], id="the first of a batch pays all of itself"),
        pytest.param(
            [[9] * 7, [9] * 7, [1]], 3, [[2], [0], [1]], id="a longer one has a batch of its own, its copy too"
        ),
        pytest.param([[4, 4]] * 5, 2, [[0, 1, 2, 3, 4]], id="copies cost nothing"),
        pytest.param([], 4, [], id="empty"),
    ],
)
def test_cut_by_unique_tokens(sequences, max_tokens, expected):
    assert cut_by_unique_tokens(arrays(sequences), max_tokens) == expected


@pytest.mark.parametrize(
    ("lengths", "max_tokens", "expected"),
    [
        pytest.param([2, 5, 3, 5], None, [[1, 3, 2, 0]], id="no budget: one batch, longest first"),
        pytest.param([2, 5, 3, 5], 20, [[1, 3, 2, 0]], id="exactly full"),
        pytest.param([2, 5, 3, 5], 19, [[1, 3, 2], [0]], id="one too many"),
        pytest.param([2, 5, 3, 5], 10, [[1, 3], [2, 0]], id="a row costs the longest row"),
        pytest.param([2, 5, 3, 5], 4, [[1], [3], [2], [0]], id="a longer one has a batch of its own"),
        pytest.param([2, 2, 2], 4, [[0, 1], [2]], id="equal lengths keep their order"),
    ],
)
def test_cut_by_padded_tokens(lengths, max_tokens, expected):
    assert cut_by_padded_tokens(arrays([[1] * length for length in lengths]), max_tokens) == expected


def test_an_empty_sequence_is_not_lost():
    with pytest.raises(ValueError, match="sequence 1 is empty"):
        cut_by_unique_tokens(arrays([[1, 2], [], [3]]), None)


@settings(max_examples=100, deadline=None)
@given(ragged_batches(max_sequences=10), BUDGETS)
@pytest.mark.parametrize(
    ("cut", "cost"), [(cut_by_unique_tokens, num_unique), (cut_by_padded_tokens, num_padded)], ids=["unique", "padded"]
)
def test_nothing_is_lost_and_the_budget_is_kept_and_used(cut, cost, sequences, max_tokens):
    members = cut(arrays(sequences), max_tokens)
    assert sorted(index for batch in members for index in batch) == list(range(len(sequences)))
    batches = [[sequences[index] for index in batch] for batch in members]
    if max_tokens is None:
        assert len(batches) == 1
        return
    for batch in batches:
        assert cost(batch) <= max_tokens or len(batch) == 1
    for batch, following in pairwise(batches):
        assert cost([*batch, following[0]]) > max_tokens, "cut before the budget was full"


@settings(max_examples=60, deadline=None)
@given(ragged_batches(max_sequences=10), BUDGETS)
def test_no_cut_computes_less_than_the_bound(sequences, max_tokens):
    cut = cut_step(arrays(sequences), max_tokens)
    assert cut.num_unique_tokens == num_unique(sequences)
    assert cut.num_unique_tokens <= sum(num_unique([sequences[index] for index in group]) for group in cut.groups)
    assert cut_step([], max_tokens) == ([], 0)
