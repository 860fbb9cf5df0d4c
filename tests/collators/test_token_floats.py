"""Loss weights, log-probabilities and advantages on their way from a feature to the batch."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from radixtrain.collators.features import all_feature_arrays
from radixtrain.collators.radix import RadixCollator
from radixtrain.collators.steps import PaddedCollator, StepCollator
from radixtrain.testing import ragged_batches

N = -100
FEATURES = [
    {"input_ids": [7, 8, 9], "labels": [7, 8, 9], "loss_weights": [9.0, -2.0, 0.5]},
    {"input_ids": [7, 8, 5], "mask": [0, 1, 1], "weights": [9, 2, 3]},
    {"input_ids": [7, 8], "labels": [N, 8]},
]
MERGED = RadixCollator(merge_labels=True)


def refusal(features, collator=MERGED):
    with pytest.raises(ValueError) as error:
        collator(features)
    return str(error.value)


def entries(batch):
    """(predictor, label, weight, original token) of each prediction."""
    predictors = batch["radix_predictor_indices"][batch["radix_prediction_rows"]].tolist()
    columns = (batch["shift_labels"][0], batch["radix_loss_weights"], batch["radix_label_indices"])
    return list(zip(predictors, *(column.tolist() for column in columns), strict=True))


def test_three_sequences():
    """The two copies of 8 after 7 cancel, and both stay; a feature without weights weighs 1."""
    batch = MERGED(FEATURES)
    assert batch["input_ids"].tolist() == [[7, 8, 5, 9]]
    assert entries(batch) == [(0, 8, -2.0, 1), (0, 8, 2.0, 4), (0, 8, 1.0, 7), (1, 9, 0.5, 2), (1, 5, 3.0, 5)]
    assert batch["radix_predictor_indices"].tolist() == [0, 1], "one hidden row for all predictions of a predictor"
    assert batch["radix_loss_weights"].dtype == torch.float32
    assert not {"labels", "radix_old_logprobs", "radix_advantages"} & {*batch}


def test_the_padded_collator_has_the_same():
    batch = PaddedCollator()(FEATURES)
    assert batch["shift_labels"].tolist() == [[8, 9, 8, 5, 8]]
    assert batch["radix_loss_weights"].tolist() == [-2.0, 0.5, 2.0, 3.0, 1.0]


def test_of_a_policy():
    features = [
        {"input_ids": [7, 8, 9], "labels": [N, 8, 9], "old_logprobs": [0.0, -0.5, -1.5], "advantages": 2},
        {"input_ids": [7, 8, 5], "labels": [N, N, 5], "old_logprobs": [0, 0, -3], "advantages": [0.0, 0.0, -1.0]},
        {"input_ids": [4], "labels": [N]},
    ]
    for collator in (MERGED, PaddedCollator()):
        batch = collator(features)
        found = zip(
            *(batch[f"radix_{name}"].tolist() for name in ("label_indices", "old_logprobs", "advantages")), strict=True
        )
        assert sorted(found) == [(1, -0.5, 2.0), (2, -1.5, 2.0), (5, -3.0, -1.0)]
        assert batch["radix_old_logprobs"].dtype == batch["radix_advantages"].dtype == torch.float32
        assert batch["radix_loss_weights"].tolist() == [1.0] * 3


def test_padding_takes_its_floats_with_it():
    padded = {"input_ids": [0, 7, 8, 0], "attention_mask": [0, 1, 1, 0], "labels": [N, N, 8, N]}
    batch = MERGED([{**padded, "loss_weights": [1.0, 2.0, 3.0, 4.0], "advantages": [1, 2, 3, 4]}])
    assert (batch["radix_loss_weights"].tolist(), batch["radix_advantages"].tolist()) == ([3.0], [3.0])


def test_what_is_given_without_a_label_is_not_read():
    [array] = all_feature_arrays(
        [{"input_ids": [7, 8, 9], "labels": [N, 8, N], "old_logprobs": [float("nan"), -1.0, float("inf")]}]
    )
    assert array.old_logprobs.tolist() == [0.0, -1.0, 0.0]


@pytest.mark.parametrize("as_input", [tuple, np.array, torch.tensor, lambda x: np.array(x, np.float16)])
def test_lists_arrays_and_tensors(as_input):
    weights = [0.0, -2.0, 0.5]
    batch = MERGED([{**FEATURES[0], "loss_weights": as_input(weights)}])
    assert batch["radix_loss_weights"].tolist() == weights[1:]


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"loss_weights": [1.0]}, "loss_weights has 1 entries, input_ids has 2"),
        ({"weights": [[1.0, 2.0]]}, "weights must be a flat list of numbers, got float64 (1, 2)"),
        ({"loss_weights": ["1", "2"]}, "loss_weights must be a flat list of numbers, got <U1 (2,)"),
        ({"loss_weights": [True, False]}, "loss_weights must be a flat list of numbers, got bool (2,)"),
        ({"loss_weights": 2.0}, "loss_weights must be a flat list of numbers, got float64 ()"),
        ({"old_logprobs": [None, -1.0]}, "old_logprobs must be a flat list of numbers, got object (2,)"),
        ({"advantages": "1"}, "advantages must be a flat list of numbers or one number, got <U1 ()"),
        ({"advantages": float("nan")}, "advantages must be finite on labelled tokens: advantages[1] = nan"),
        ({"weights": [0, 1e39]}, "weights must be finite on labelled tokens: weights[1] = 1e+39"),
        ({"old_logprobs": [0.0, -np.inf]}, "old_logprobs must be finite on labelled tokens: old_logprobs[1] = -inf"),
    ],
)
def test_floats_that_are_refused(extra, message):
    feature = {"input_ids": [7, 8], "labels": [N, 8]}
    assert refusal([{**feature, "weights": [1, 1]}, {**feature, **extra}]) == f"feature 1: {message}"


def test_two_names_of_the_weights_are_refused():
    feature = {"input_ids": [7, 8], "labels": [N, 8], "weights": [1, 1], "loss_weights": [1, 1]}
    assert refusal([feature]) == "feature 0 has loss_weights and weights, two names of the same weights; remove one"


@pytest.mark.parametrize("collator", [MERGED, PaddedCollator(), StepCollator(max_tokens=2)])
@pytest.mark.parametrize("name", ["old_logprobs", "advantages"])
def test_what_no_number_stands_for_is_in_all_features_or_in_none(name, collator):
    """Also if they would come into different micro-batches."""
    features = [{"input_ids": [7, 8], "labels": [N, 8]}, {"input_ids": [5, 6], "labels": [N, 6], name: [0.0, -1.0]}]
    assert refusal(features, collator) == f"feature 0 bears loss and has no {name}, but feature 1 has some"


@pytest.mark.parametrize("collator", [RadixCollator(), StepCollator(max_tokens=3, merge_labels=False)])
@pytest.mark.parametrize("name", ["loss_weights", "weights", "old_logprobs", "advantages"])
def test_a_models_own_loss_would_ignore_them(name, collator):
    features = [{"input_ids": [5, 6], "labels": [N, 6]}, {"input_ids": [7, 8], "labels": [N, 8], name: [1.0, 1.0]}]
    features[0] |= {name: None} if "weights" in name else {"labels": [N, N]}
    known = "loss_weights" if name == "weights" else name
    assert refusal(features, collator).startswith(
        f"feature 1 has {known}, which the loss of a Hugging Face model ignores, so that its gradient would be "
        f"another. Collate with merge_labels=True"
    )


@settings(max_examples=60, deadline=None)
@given(st.data(), ragged_batches(), st.sampled_from([1, 2, 1000]), st.sampled_from([None, 4, 12]))
def test_each_float_stays_with_its_token(data, sequences, min_shared_tokens, max_tokens):
    """In every micro-batch, each prediction has the floats of the token that it is, found by its place in the batch."""
    label = st.sampled_from([N, 0, 1, 2])
    features, expected = [], []
    for row, ids in enumerate(sequences):
        labels = [data.draw(label) for _ in ids]
        numbers = [8.0 * row + place + 0.25 for place in range(len(ids))]  # each its own
        columns = {
            "loss_weights": numbers,
            "old_logprobs": [-x for x in numbers],
            "advantages": [x + 0.5 for x in numbers],
        }
        features.append({"input_ids": ids, "labels": labels, **columns})
        expected += [(labels[n], x, -x, x + 0.5) for n, x in enumerate(numbers) if n and labels[n] != N]
    for dedup in (True, False):
        step = StepCollator(dedup=dedup, max_tokens=max_tokens, min_shared_tokens=min_shared_tokens)(features)
        found = []
        for batch, members in zip(step.micro_batches, step.members, strict=True):
            keys = ("radix_loss_weights", "radix_old_logprobs", "radix_advantages", "radix_label_indices")
            packed = [token for index in members for token in features[index]["loss_weights"]]
            entries = zip(batch["shift_labels"][0].tolist(), *(batch[key].tolist() for key in keys), strict=True)
            for target, weight, old, advantage, token in entries:
                assert packed[token] == weight
                found.append((target, weight, old, advantage))
        assert sorted(found) == sorted(expected)
        assert step.num_labels == len(expected)
