"""What a batch carries: sections of one tensor, whatever their dtypes and lengths."""

import pickle
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from radixtrain import RadixCollator
from radixtrain.collators.steps import PaddedCollator
from radixtrain.tree.radix_inputs import RadixInputs, layout_of, with_radix
from tests.support.batches import as_python

FEATURES = [{"input_ids": [7, 8, 9, 1], "labels": [-100, 8, 9, 1]}, {"input_ids": [7, 8, 5], "labels": [-100, 8, 5]}]
WEIGHTED = [{**each, "loss_weights": [0.0, -0.1, -1e-42]} for each in FEATURES[1:]]  # one of them denormal
BATCHES = {
    "listed": lambda: RadixCollator()(FEATURES),
    "merged": lambda: RadixCollator(merge_labels=True)(FEATURES),
    "weighted": lambda: RadixCollator(merge_labels=True)(WEIGHTED),
    "padded": lambda: PaddedCollator()(FEATURES),
}
LENGTHS = st.integers(0, 3)


@given(LENGTHS, LENGTHS, LENGTHS, LENGTHS)
def test_sections_come_back_bit_by_bit(num_bounds: int, num_rows: int, num_weights: int, num_plan: int) -> None:
    """Of any length, in any order: an int64 never starts at an odd place."""
    tensors = {
        "cu_seqlens": torch.arange(num_bounds, dtype=torch.int32) - 1,
        "predictor_indices": torch.arange(num_rows) - 2**40,
        "loss_weights": torch.full((num_weights,), -0.0),
        "prediction_rows": torch.arange(num_rows),
        "plan": torch.arange(num_plan, dtype=torch.int32),
    }
    radix = RadixInputs.of(**tensors, token_loss=True)
    assert radix.rows.dtype == torch.int32 and radix.token_loss and radix.host is radix.layout is None
    for name, tensor in tensors.items():
        found = radix.tensor(name)
        assert found.dtype == tensor.dtype and found.numpy().tobytes() == tensor.numpy().tobytes()
    assert radix.label_indices is None


def test_an_empty_section_may_have_any_stride() -> None:
    """As NumPy gives it to torch if nothing is labelled."""
    empty = torch.empty_strided((0,), (0,), dtype=torch.int64)
    radix = RadixInputs.of(cu_seqlens=torch.zeros(1, dtype=torch.int32), prediction_rows=empty)
    assert radix.prediction_rows.shape == (0,) and len(radix.rows) == 1


@pytest.mark.parametrize("name", BATCHES)
def test_sections_share_one_memory(name: str) -> None:
    radix = BATCHES[name]()["radix"]
    whole = radix.rows.untyped_storage().data_ptr()
    assert {radix.tensor(each).untyped_storage().data_ptr() for each in radix.sections} == {whole}
    assert sum(radix.tensor(each).nbytes for each in radix.sections) == radix.rows.nbytes


@pytest.mark.parametrize("name", BATCHES)
def test_pickled_and_moved_it_is_the_same(name: str) -> None:
    radix = BATCHES[name]()["radix"]
    assert as_python(pickle.loads(pickle.dumps(radix))) == as_python(radix) == as_python(radix.map(torch.clone))
    assert radix.to("cpu") is radix


@pytest.mark.parametrize("name", BATCHES)
def test_other_values_in_some_fields(name: str) -> None:
    """Of another dtype, new, none, and on the host; all else is as it was, and so is the batch that was given."""
    batch = BATCHES[name]()
    before = as_python(batch)
    weights, tokens = torch.tensor([0.5, 0.25, 2.0]), torch.tensor([5])
    changed = with_radix(batch, loss_weights=weights, label_indices=tokens, place_rows=None, num_tokens=3)
    expected: dict[str, Any] = {
        **{name: value for name, value in before["radix"].items() if name != "place_rows"},
        **as_python({"loss_weights": weights, "label_indices": tokens, "num_tokens": 3}),
    }
    assert as_python(changed["radix"]) == expected and as_python(batch) == before
    assert name == "padded" or as_python(layout_of(changed)) == expected["layout"]


@pytest.mark.parametrize("name", BATCHES)
def test_a_call_without_gradient_leaves_nothing_behind(name: str) -> None:
    """Indices that were read in inference mode can be saved for a later backward pass."""
    radix, rows = BATCHES[name]()["radix"], torch.ones(9, requires_grad=True)
    with torch.inference_mode():
        assert rows[radix.prediction_rows].sum() > 0
    rows[radix.prediction_rows].square().sum().backward()
    assert rows.grad is not None and rows.grad.sum() == 2 * len(radix.prediction_rows)
