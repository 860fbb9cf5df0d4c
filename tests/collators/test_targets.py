"""The prediction list against a walk over every labelled token."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixtrain.collators.targets import IGNORE_INDEX, Predictions, list_predictions, merge_predictions
from radixtrain.testing import ragged_batches
from radixtrain.tree.plan import build_prefix_plan

N = IGNORE_INDEX


def plan_and_labels(sequences, labels, **options):
    bounds = np.cumsum([0, *map(len, sequences)])
    plan = build_prefix_plan(np.array([t for ids in sequences for t in ids], dtype=np.int64), bounds, **options)
    return plan, np.array([label for row in labels for label in row], dtype=np.int64)


def as_lists(predictions):
    return {name: array.tolist() for name, array in predictions._asdict().items()}


@pytest.mark.parametrize(
    ("sequences", "labels", "rows", "targets", "tokens"),
    [
        pytest.param(
            [[7, 8, 9], [7, 8, 5]], [[N, N, 9], [N, N, 5]], [1, 1], [9, 5], [2, 5], id="several labels at a branch"
        ),
        pytest.param([[7, 8], [7, 8]], [[N, 8], [N, 8]], [0, 0], [8, 8], [1, 3], id="a label on a shared token, twice"),
        pytest.param([[7, 8], [7, 8]], [[N, 8], [N, N]], [0], [8], [1], id="labelled in one of two copies"),
        pytest.param([[1, 2, 3]], [[1, 2, 3]], [0, 1], [2, 3], [1, 2], id="nothing predicts a first token"),
        pytest.param([[4], [], [1, 2]], [[4], [], [1, 2]], [0], [2], [2], id="single and empty sequences"),
        pytest.param([[3, 4], [1, 2]], [[N, 4], [N, 2]], [0, 2], [2, 4], [3, 1], id="ascending rows"),
        pytest.param([[1, 2]], [[N, 9]], [0], [9], [1], id="a label need not be the next token"),
        pytest.param([[1, 2]], [[N, 0]], [0], [0], [1], id="token 0 is a label"),
        pytest.param([[1, 2]], [[N, N]], [], [], [], id="no label"),
        pytest.param([], [], [], [], [], id="empty batch"),
        pytest.param([[1, 2], []], [[N, 2], []], [0], [2], [1], id="an empty sequence at the end"),
    ],
)
def test_list_predictions(sequences, labels, rows, targets, tokens):
    assert as_lists(list_predictions(*plan_and_labels(sequences, labels))) == {
        "predictor_indices": rows,
        "labels": targets,
        "label_indices": tokens,
        "weights": [1] * len(rows),
    }


def test_merge_predictions():
    listed = Predictions(*map(np.array, ([0, 1, 1, 1, 3], [5, 9, 5, 9, 5], [1, 2, 5, 8, 4], [1, 1, 1, 1, 1])))
    assert as_lists(merge_predictions(listed)) == {
        "predictor_indices": [0, 1, 1, 3],
        "labels": [5, 5, 9, 5],
        "label_indices": [1, 5, 2, 4],
        "weights": [1, 1, 2, 1],
    }
    again = merge_predictions(merge_predictions(listed))
    assert again.weights.tolist() == [1, 1, 2, 1], "weights add up, they do not start again"


def test_merge_predictions_with_labels_above_32_bits():
    rows, labels, tokens = [1, 2, 2, 2, 2], [7, 2**62, 5, 2**62, 2**40], [1, 2, 3, 4, 5]
    listed = Predictions(*map(np.array, (rows, labels, tokens, [1] * 5)))
    assert as_lists(merge_predictions(listed)) == {
        "predictor_indices": [1, 2, 2, 2],
        "labels": [7, 5, 2**40, 2**62],
        "label_indices": [1, 3, 5, 2],
        "weights": [1, 1, 1, 2],
    }


def test_merge_predictions_of_nothing():
    merged = merge_predictions(list_predictions(*plan_and_labels([[1, 2]], [[N, N]])))
    assert as_lists(merged) == {name: [] for name in Predictions._fields}
    assert {array.dtype for array in merged} == {np.dtype(np.int64)}


def test_labels_are_not_changed():
    plan, labels = plan_and_labels([[1, 2], [3, 4]], [[1, 2], [3, 4]])
    list_predictions(plan, labels)
    assert labels.tolist() == [1, 2, 3, 4]


@settings(max_examples=100, deadline=None)
@given(
    st.data(),
    ragged_batches(min_length=0, min_sequences=0),
    st.sampled_from([1, 2, 4, 1000]),
    st.sampled_from([None, 8]),
)
def test_predictions_are_the_labelled_tokens(data, sequences, min_shared_tokens, pad_to_multiple_of):
    label = st.sampled_from([N, 0, 1, 2, 3])
    labels = [[data.draw(label) for _ in ids] for ids in sequences]
    options = {"min_shared_tokens": min_shared_tokens, "pad_to_multiple_of": pad_to_multiple_of}
    plan, packed = plan_and_labels(sequences, labels, **options)
    expected, token = [], 0
    for ids, row_labels in zip(sequences, labels, strict=True):
        for place in range(len(ids)):
            if place and row_labels[place] != N:
                expected.append((int(plan.inverse_indices[token - 1]), row_labels[place], token))
            token += 1

    listed = list_predictions(plan, packed)
    assert {array.dtype for array in listed} == {np.dtype(np.int64)}
    assert list(zip(*map(np.ndarray.tolist, listed[:3]), strict=True)) == sorted(expected, key=lambda e: (e[0], e[2]))
    assert listed.weights.tolist() == [1] * len(expected)

    merged = merge_predictions(listed)
    pairs = list(zip(merged.predictor_indices.tolist(), merged.labels.tolist(), strict=True))
    counted = Counter((row, target) for row, target, _ in expected)
    assert pairs == sorted(counted)
    assert merged.weights.tolist() == [counted[pair] for pair in pairs]
    assert merged.label_indices.tolist() == [min(t for row, y, t in expected if (row, y) == pair) for pair in pairs]
    assert merged.weights.sum() == len(expected)
