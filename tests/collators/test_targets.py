"""`shared_targets="once"`: each label that several sequences share counts once, however the step is cut."""

from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixtrain.collators.features import token_rows
from radixtrain.collators.radix import RadixCollator
from radixtrain.collators.steps import StepCollator
from radixtrain.collators.targets import features_once, keep_once
from radixtrain.testing import ragged_batches

N = -100
BRANCHES = [
    {"input_ids": [7, 8, 9, 4], "labels": [7, 8, N, 4]},
    {"input_ids": [7, 8, 9, 5], "labels": [7, 8, 9, 5]},
    {"input_ids": [7, 8, 9, 5], "labels": [N, N, 9, 5]},
    {"input_ids": [1, 8], "labels": [1, 8]},
]


def labels_of(arrays):
    return [array.labels.tolist() for array in arrays]


def test_the_first_sequence_that_has_a_label_keeps_it():
    """A first token is never predicted, so its label does not matter."""
    kept = keep_once(token_rows(BRANCHES))
    assert labels_of(kept) == [[N, 8, N, 4], [N, N, 9, 5], [N, N, N, N], [N, 8]]
    assert [array.input_ids.tolist() for array in kept] == [feature["input_ids"] for feature in BRANCHES]
    assert [array.loss_weights for array in kept] == [None] * 4


def test_samples_with_other_advantages_or_positions_are_other_samples():
    sample = {"input_ids": [7, 8, 9], "labels": [N, 8, 9], "old_logprobs": [0.0, -0.5, -1.0]}
    features = [{**sample, "advantages": 1.0}, {**sample, "advantages": -1.0}, {**sample, "advantages": 1.0}]
    features += [{**features[0], "old_logprobs": [0.0, -0.5, -1.25]}, {**features[0], "position_ids": [4, 5, 6]}]
    kept = labels_of(keep_once(token_rows(features)))
    assert kept == [[N, 8, 9], [N, 8, 9], [N, N, N], [N, N, 9], [N, 8, 9]]


@pytest.mark.parametrize("collator", [RadixCollator, StepCollator])
def test_other_values_are_refused(collator):
    with pytest.raises(ValueError, match=r"^shared_targets must be every or once, got 'mean'$"):
        collator(shared_targets="mean")


def test_features_of_other_trainers():
    padded = {"input_ids": [0, 7, 8], "attention_mask": [0, 1, 1], "labels": [N, N, 8], "weights": [0, 0, 3]}
    once = features_once([padded, {"input_ids": [7, 8], "labels": [N, 8]}])
    assert [{name: column.tolist() for name, column in feature.items()} for feature in once] == [
        {"input_ids": [7, 8], "labels": [N, 8], "loss_weights": [0.0, 2.0]},
        {"input_ids": [7, 8], "labels": [N, N], "loss_weights": [1.0, 1.0]},
    ]


@settings(max_examples=60, deadline=None)
@given(st.data(), ragged_batches(), st.sampled_from([None, 3, 8]), st.sampled_from([1, 3]), st.booleans())
def test_each_target_counts_once_whatever_the_cut(data, sequences, max_tokens, min_shared_tokens, dedup):
    """By walking over every labelled token: its whole history, its label and the mean of the weights of its copies."""
    label, weight = st.sampled_from([N, 0, 1]), st.sampled_from([-1.0, 0.0, 0.5, 2.0])
    features, copies = [], defaultdict(list)
    for ids in sequences:
        labels, weights = [data.draw(label) for _ in ids], [data.draw(weight) for _ in ids]
        features.append({"input_ids": ids, "labels": labels, "loss_weights": weights})
        for place in range(1, len(ids)):
            if labels[place] != N:
                copies[tuple(ids[:place]), labels[place]].append(weights[place])
    options = {"max_tokens": max_tokens, "min_shared_tokens": min_shared_tokens, "dedup": dedup}
    step = StepCollator(shared_targets="once", **options)(features)
    found = {}
    for batch, members in zip(step.micro_batches, step.members, strict=True):
        histories = [
            tuple(ids[:n]) for index in members for ids in [features[index]["input_ids"]] for n in range(len(ids))
        ]
        columns = (getattr(batch["radix"], name).tolist() for name in ("label_indices", "loss_weights"))
        for target, token, value in zip(batch["shift_labels"][0].tolist(), *columns, strict=True):
            assert (histories[token], target) not in found, "once"
            found[histories[token], target] = value
    # Stored as float32.
    assert found == {pair: pytest.approx(sum(ws) / len(ws), rel=2**-23) for pair, ws in copies.items()}
    assert step.num_labels == len(copies)
