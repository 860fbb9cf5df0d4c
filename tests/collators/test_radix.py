"""`RadixCollator`: exact tensors and keys, the shapes that a stock model must choke on, and what users feed it."""

from functools import partial

import pytest
import torch
from accelerate.utils import find_batch_size as of_accelerate
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch.utilities.data import extract_batch_size
from transformers.trainer_pt_utils import find_batch_size

from radixtrain.collators.misuse_guard import end_watch
from radixtrain.collators.radix import RadixCollator
from radixtrain.errors import UserError
from radixtrain.testing import ragged_batches
from tests.collators.predictions import entries_of, expected_of, predictions_of
from tests.support.batches import as_python
from tests.support.models import tiny_qwen3

N = -100
DOCSTRING = [
    {"input_ids": [7, 8, 9], "labels": [N, N, 9]},
    {"input_ids": [7, 8, 5], "labels": [N, N, 5]},
]


def test_a_tokenizer_is_not_taken():
    """As Hugging Face's collators take one."""
    with pytest.raises(UserError, match=r"no tokenizer, got dict: write RadixCollator\(\)"):
        RadixCollator({})


def test_two_sequences():
    long = torch.int64
    assert as_python(RadixCollator()(DOCSTRING)) == {
        "input_ids": (long, [[7, 8, 5], [9, 7, 8]]),
        "position_ids": (long, [[0, 1, 2, 2]]),
        "labels": (long, [[N, 9], [N, 5]]),
        "shift_labels": (long, [[9, N], [5, N]]),
        "radix": {
            "cu_seqlens": (torch.int32, [0, 3, 6]),
            "predictor_indices": (long, [1]),
            "prediction_rows": (long, [0, 0, 0, 0]),
            "place_rows": [[0, -1], [0, -1]],
            "loss_weights": (long, [1, 0, 1, 0]),
            "label_indices": (long, [2, 0, 5, 0]),
            "layout": {
                "gather_indices": [3, 4, 5, 2],
                "inverse_indices": [0, 1, 3, 0, 1, 2],
                "cu_seqlens": [0, 3, 6],
                "segment_starts": [0, 2, 3, 4],
                "subtree_ends": [4, 3, 4],
                "path_keys": [0, 1, 2, 0, 1, 3],
                "pieces": [
                    [([0, 3, 6], slice(0, 6))] * 2,  # every token
                    [([0, 3, 4], slice(0, 4)), ([0, 3, 6], slice(0, 6))],  # new rows onto their paths
                    [([0, 3, 4], slice(0, 4))] * 2,  # both ends onto themselves
                    [([0, 1], slice(3, 4)), ([0, 2], slice(0, 2))],  # the last row onto what both have
                ],
            },
        },
    }


def test_two_sequences_merged():
    batch = RadixCollator(merge_labels=True)([*DOCSTRING, DOCSTRING[0]])
    assert set(batch) == {"input_ids", "position_ids", "shift_labels", "radix"}
    assert batch["radix"].token_loss and batch["radix"].label_indices is None
    assert batch["input_ids"].tolist() == [[7, 8, 5, 9]]
    assert batch["shift_labels"].tolist() == [[5, 9]]
    assert batch["radix"].predictor_indices.tolist() == [1], "one hidden row for both"
    assert batch["radix"].prediction_rows.tolist() == [0, 0]
    assert batch["radix"].loss_weights.tolist() == [1, 2]
    # Lightning's bf16-true converts every float of a batch, and bfloat16 has no 301.
    assert batch["radix"].loss_weights.dtype == torch.int64


def test_labels_above_32_bits_are_told_apart():
    labels = [2**62, 5, 2**62, 2**40]
    batch = RadixCollator(merge_labels=True)([{"input_ids": [1, 2], "labels": [N, label]} for label in labels])
    assert batch["shift_labels"].tolist() == [[5, 2**40, 2**62]]
    assert batch["radix"].loss_weights.tolist() == [1, 1, 2]


def test_position_ids():
    ids = [7, 8, 9]
    shifted, plain = {"input_ids": ids, "position_ids": [4, 5, 6]}, {"input_ids": ids}
    collator = RadixCollator(loss_on_all=True)
    assert collator([shifted])["position_ids"].tolist() == [[4, 5, 6]]
    batch = collator([plain, shifted, {**plain, "position_ids": None}])
    assert batch["input_ids"].tolist() == [[7, 8, 9]] * 3
    assert batch["position_ids"].tolist() == [[0, 1, 2, 4, 5, 6]]
    assert batch["radix"].layout.inverse_indices.tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2]


@pytest.mark.parametrize(
    ("features", "options", "ids", "expected"),
    [
        pytest.param(
            [[7, 8, 9]], {}, [[7, 8, 9]], [[8, 9, N, N]], id="as many as columns with the one that ends a row"
        ),
        pytest.param([[7, 8, 9], [7, 8]], {}, [[7, 8, 9]] * 2, [[8, 9, N, N], [8, N, N, N]], id="a shared label"),
        pytest.param([[7, 8]] * 4, {"pad_to_multiple_of": 4}, [[7, 8], [7, 7]] * 2, [[8, N, N]] * 4, id="padding"),
        pytest.param([[7, 8], [9]], {"pad_to_multiple_of": 8}, [[7, 8, 9, 7], [7] * 4], [[8, N], [N, N]], id="wide"),
        pytest.param([[7]], {}, [[7]], [[N, N]], id="no label and one row"),
        pytest.param([[7, 8, 9], [5, 6]], {}, [[5, 6, 7], [8, 9, 5]], [[8, 9, N, N], [6, N, N, N]], id="no sharing"),
    ],
)
def test_labels_are_never_as_wide_as_ids_so_that_a_stock_model_raises(features, options, ids, expected):
    batch = RadixCollator(loss_on_all=True, **options)([{"input_ids": each} for each in features])
    assert batch["input_ids"].tolist() == ids
    assert batch["shift_labels"].tolist() == expected
    assert len(expected[0]) != len(ids[0])
    end_watch()  # nothing but its shapes is left to refuse a batch by
    names = r"batch_size|did not pass the backbone of a shared model|size of tensor"
    with pytest.raises((ValueError, RuntimeError), match=names):
        tiny_qwen3()(**batch)  # the second once a model of this process was shared


@settings(max_examples=100, deadline=None)
@given(st.data(), ragged_batches(), st.sampled_from([1, 2, 1000]), st.sampled_from([None, 8]))
def test_every_labelled_token_is_predicted_by_the_token_before_it(data, sequences, min_shared_tokens, multiple):
    labels = [[data.draw(st.sampled_from([N, 0, 1, 2])) for _ in ids] for ids in sequences]
    features = [{"input_ids": ids, "labels": row} for ids, row in zip(sequences, labels, strict=True)]
    collator = partial(RadixCollator, min_shared_tokens=min_shared_tokens, pad_to_multiple_of=multiple)
    batch, merged = collator()(features), collator(merge_labels=True)(features)

    assert batch["labels"].shape[1] not in (0, batch["input_ids"].shape[1])
    assert len(batch["labels"]) == len(batch["input_ids"]) == len(sequences)
    inverse = batch["radix"].layout.inverse_indices.tolist()
    assert batch["input_ids"].flatten()[inverse].tolist() == [token for ids in sequences for token in ids]
    assert batch["position_ids"][0, inverse].tolist() == [place for ids in sequences for place in range(len(ids))]

    expected = expected_of(features)
    assert predictions_of(batch, features) == predictions_of(merged, features) == expected
    packed = [label for row in labels for label in row]
    assert all(packed[token] == label for _, label, weight, token in entries_of(batch) if weight)
    of_rows = [[y for y in row[1:] if y != N] for row in labels]
    assert [[y for y in row if y != N] for row in batch["labels"].tolist()] == of_rows
    assert batch["labels"][:, 1:].tolist() == batch["shift_labels"][:, :-1].tolist()
    assert (batch["labels"][:, 0] == N).all() and (batch["shift_labels"][:, -1] == N).all(), "a loss may shift itself"

    rows = [(row, label) for row, label, _ in entries_of(merged)]
    assert rows == sorted({(row, label) for row, label, weight, _ in entries_of(batch) if weight})
    assert merged["radix"].predictor_indices.tolist() == sorted({row for row, _ in rows}), "a head runs once for each"
    assert as_python(merged["radix"].layout) == as_python(batch["radix"].layout)
    num_rows = merged["input_ids"].numel()
    assert torch.equal(merged["input_ids"][0], batch["input_ids"].flatten()[:num_rows])
    assert torch.equal(merged["position_ids"], batch["position_ids"])


def test_frameworks_find_the_number_of_sequences():
    """That of an ordinary batch. Lightning weights its epoch means by it."""
    batch = RadixCollator()([{"input_ids": [7, 8, n, n], "labels": [N, N, n, n]} for n in range(5)])
    assert [read(batch) for read in (extract_batch_size, find_batch_size, of_accelerate)] == [5, 5, 5]
    assert batch["input_ids"].numel() == 5 * 4
