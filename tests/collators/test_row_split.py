"""The parts of a micro-batch, every row and prediction on one rank."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from radixtrain.collators.radix import RadixCollator
from radixtrain.collators.row_split import RowShare, split_batch
from radixtrain.collators.steps import StepCollator
from radixtrain.testing import ragged_batches
from tests.collators.predictions import entries_of


def predictions(batch: dict[str, Any], first_row: int = 0) -> Counter[tuple[Any, ...]]:
    """(row, label, token) -> weight, without predictions of weight 0."""
    found: Counter[tuple[Any, ...]] = Counter()
    for row, label, weight, *tokens in entries_of(batch):
        found[row + first_row, label, *tokens] += weight
    return Counter({key: weight for key, weight in found.items() if weight})


@settings(max_examples=200, deadline=None)
@given(ragged_batches(), st.integers(1, 9), st.booleans(), st.sampled_from([None, 4]), st.data())
def test_the_parts_together_are_the_micro_batch(sequences, size, has_floats, multiple, data):
    features: list[dict[str, Any]] = []
    for ids in sequences:
        features.append({"input_ids": ids, "labels": [data.draw(st.sampled_from([-100, 0, 1])) for _ in ids]})
        if has_floats:
            features[-1]["loss_weights"] = [1.0 + place % 3 for place in range(len(ids))]
    whole = RadixCollator(merge_labels=True, pad_to_multiple_of=multiple)(features)
    parts = [split_batch(whole, RowShare(rank, size)) for rank in range(size)]
    num_rows = whole["input_ids"].shape[1]
    count = -(-num_rows // size)
    for name in ("input_ids", "position_ids"):
        assert {part[name].shape[-1] for part in parts} == {count}
        filled = torch.cat([part[name] for part in parts], -1)
        assert torch.equal(filled[..., :num_rows], whole[name])
        assert (filled[..., num_rows:] == whole[name][..., :1]).all()
    found = sum((predictions(part, rank * count) for rank, part in enumerate(parts)), Counter())
    assert found == predictions(whole)
    for part in parts:
        assert part["radix"].split == num_rows == part["radix"].layout.num_rows
        assert part["radix"].predictor_indices.numel() and part["shift_labels"].shape[0] == 1
        assert part["radix"].predictor_indices.min() >= 0 and part["radix"].predictor_indices.max() < count
        assert part["radix"].prediction_rows.dtype == torch.int64 and part.keys() == whole.keys()


@settings(max_examples=50, deadline=None)
@given(ragged_batches(), st.sampled_from([(2, 2), (4, 2), (6, 3)]), st.sampled_from([1, 3, None]))
def test_the_ranks_of_a_group_have_the_same_micro_batches(sequences, sizes, max_tokens):
    """Those that a group alone would have, of as many times the budget; every group has as many."""
    (num_ranks, sp_size), features = sizes, [{"input_ids": ids, "labels": ids} for ids in sequences]
    split = StepCollator(max_tokens=max_tokens, num_ranks=num_ranks, sp_size=sp_size)
    alone = StepCollator(max_tokens=max_tokens and max_tokens * sp_size, num_ranks=num_ranks // sp_size)
    for rank in range(num_ranks):
        step = replace(split, rank=rank)(features)
        expected = replace(alone, rank=rank // sp_size)(features)
        assert step.members == expected.members and step.num_labels == expected.num_labels
        for batch, whole in zip(step.micro_batches, expected.micro_batches, strict=True):
            part = split_batch(whole, RowShare(rank % sp_size, sp_size))
            assert all(torch.equal(x, part[name]) for name, x in batch.items() if isinstance(x, torch.Tensor))


@pytest.mark.parametrize(
    "options", [{"num_ranks": 3}, {"num_ranks": 2, "dedup": False}, {"num_ranks": 2, "merge_labels": False}]
)
def test_what_is_not_split(options):
    with pytest.raises(ValueError, match="sp_size 2 must divide num_ranks, and needs dedup and merge_labels"):
        StepCollator(sp_size=2, **options)
