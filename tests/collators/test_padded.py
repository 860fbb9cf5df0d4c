"""The baseline: padded rows, and one prediction per labelled token, into the flattened rows."""

from collections import Counter

import torch
from batch_contents import as_python, predictions_of
from hypothesis import given, settings
from hypothesis import strategies as st

from radixtrain.collators.steps import PaddedCollator
from radixtrain.testing import ragged_batches

N = -100


def test_two_sequences():
    features = [{"input_ids": [7, 8, 9, 6], "labels": [7, N, 9, 6]}, {"input_ids": [7, 5], "labels": [N, 5]}]
    batch = PaddedCollator(pad_token_id=3)(features)
    assert as_python(batch) == {
        "input_ids": (torch.int64, [[7, 8, 9, 6], [7, 5, 3, 3]]),
        "attention_mask": (torch.int64, [[1, 1, 1, 1], [1, 1, 0, 0]]),
        "position_ids": (torch.int64, [[0, 1, 2, 3], [0, 1, 2, 3]]),
        "shift_labels": (torch.int64, [[9, 6, 5]]),
        "radix_predictor_indices": (torch.int64, [1, 2, 4]),
        "radix_prediction_rows": (torch.int64, [0, 1, 2]),
        "radix_loss_weights": (torch.float32, [1.0, 1.0, 1.0]),
        "radix_label_indices": (torch.int64, [2, 3, 5]),
        "radix_cu_seqlens": (torch.int32, [0, 4, 6]),
    }


def test_first_tokens_are_not_predicted_by_the_row_above():
    batch = PaddedCollator()([{"input_ids": [7, 8], "labels": [7, 8]}, {"input_ids": [5, 6], "labels": [5, 6]}])
    assert batch["radix_predictor_indices"].tolist() == [0, 2]
    assert batch["shift_labels"].tolist() == [[8, 6]]


@settings(max_examples=60, deadline=None)
@given(st.data(), ragged_batches(), st.sampled_from([0, 3, 9]))
def test_every_labelled_token_is_predicted_by_the_token_before_it(data, sequences, pad_token_id):
    labels = [[data.draw(st.sampled_from([N, 0, 1, 2])) for _ in ids] for ids in sequences]
    features = [{"input_ids": ids, "labels": row} for ids, row in zip(sequences, labels, strict=True)]
    batch = PaddedCollator(pad_token_id=pad_token_id)(features)
    longest = max(map(len, sequences))
    assert batch["input_ids"].tolist() == [ids + [pad_token_id] * (longest - len(ids)) for ids in sequences]
    assert batch["attention_mask"].tolist() == [[1] * len(ids) + [0] * (longest - len(ids)) for ids in sequences]
    assert predictions_of(batch, sequences) == Counter(
        (tuple(ids[:place]), row[place])
        for ids, row in zip(sequences, labels, strict=True)
        for place in range(1, len(ids))
        if row[place] != N
    )
    assert batch["radix_prediction_rows"].tolist() == list(range(batch["shift_labels"].shape[1]))
    packed = [label for row in labels for label in row]
    assert [packed[token] for token in batch["radix_label_indices"].tolist()] == batch["shift_labels"][0].tolist()
    assert batch["radix_cu_seqlens"].diff().tolist() == list(map(len, sequences))
