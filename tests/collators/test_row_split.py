"""The parts of a micro-batch, every row and prediction on one rank; and what ranks compute and send is as predicted."""

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from forked_ranks import on_ranks
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import tiny_qwen3

from radixtrain import prepare_model
from radixtrain.collators.radix import RadixCollator
from radixtrain.collators.row_split import divide, sp_sizes, split_batch
from radixtrain.collators.steps import StepCollator
from radixtrain.distributed import ranks
from radixtrain.hf.dimensions import ModelDimensions
from radixtrain.hf.predicting_rows import forward_rows
from radixtrain.testing import ragged_batches

FLOATS = ("old_logprobs", "advantages")


def predictions(batch: dict[str, Any], first_row: int = 0) -> Counter[tuple[Any, ...]]:
    """(row, label, floats) -> weight, without predictions of weight 0."""
    rows = (batch["radix"].predictor_indices[batch["radix"].prediction_rows] + first_row).tolist()
    columns = [x.tolist() for name in FLOATS if (x := getattr(batch["radix"], name)) is not None]
    found: Counter[tuple[Any, ...]] = Counter()
    for row, label, weight, *floats in zip(
        rows, batch["shift_labels"][0].tolist(), batch["radix"].loss_weights.tolist(), *columns, strict=True
    ):
        found[row, label, *floats] += weight
    return Counter({key: weight for key, weight in found.items() if weight})


@settings(max_examples=200, deadline=None)
@given(ragged_batches(), st.integers(1, 9), st.booleans(), st.sampled_from([None, 4]), st.data())
def test_the_parts_together_are_the_micro_batch(sequences, size, has_floats, multiple, data):
    features: list[dict[str, Any]] = []
    for ids in sequences:
        features.append({"input_ids": ids, "labels": [data.draw(st.sampled_from([-100, 0, 1])) for _ in ids]})
        if has_floats:
            features[-1] |= {name: [0.5 * place for place in range(len(ids))] for name in ("old_logprobs",)}
            features[-1]["loss_weights"] = [1.0 + place % 3 for place in range(len(ids))]
    whole = RadixCollator(merge_labels=True, pad_to_multiple_of=multiple)(features)
    parts = [split_batch(whole, rank, size) for rank in range(size)]
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
            part = split_batch(whole, rank % sp_size, sp_size)
            assert all(torch.equal(x, part[name]) for name, x in batch.items() if isinstance(x, torch.Tensor))


@pytest.mark.parametrize(
    "options", [{"num_ranks": 3}, {"num_ranks": 2, "dedup": False}, {"num_ranks": 2, "merge_labels": False}]
)
def test_what_is_not_split(options):
    with pytest.raises(ValueError, match="sp_size 2 must divide num_ranks, and needs dedup and merge_labels"):
        StepCollator(sp_size=2, **options)


def step(num_sequences: int) -> list[np.ndarray]:
    """A prompt of 100 tokens, and answers of 10."""
    return [np.array([*range(100), *[200 + number] * 10]) for number in range(num_sequences)]


def test_a_step_on_two_ranks() -> None:
    """Data parallel computes the prompt twice; the split once, and fills up the second step to an even number."""
    steps = [step(4), [np.arange(5)]]
    parallel, split = (divide(steps, 2, sp_size, 1000) for sp_size in (1, 2))
    assert (parallel.num_rows, split.num_rows) == ((120 + 5) / 2, (70 + 3) / 2)
    assert (parallel.r, split.r) == (445 / 245, 445 / 146)
    assert (parallel.most_rows, split.most_rows) == (120, 70)


def test_the_budget_is_that_of_a_rank() -> None:
    """Four sequences of 110 tokens: in micro-batches of 120 of one rank, or of 240 of both."""
    for sp_size, max_tokens, rows in ((1, 120, (120, 120)), (1, 110, (220, 110)), (2, 110, (70, 70))):
        found = divide([step(4)], 2, sp_size, max_tokens)
        assert (found.num_rows, found.most_rows) == rows


def test_which_numbers_of_ranks_can_split() -> None:
    assert sp_sizes(8, 4) == [1, 2, 4]
    assert sp_sizes(6, 4) == [1, 2]
    assert sp_sizes(8, 14) == [1, 2]


@pytest.mark.parametrize(("size", "sp_size"), [(2, 2), (4, 2), (3, 1)])
def test_ranks_compute_and_send_as_much(monkeypatch: pytest.MonkeyPatch, size: int, sp_size: int) -> None:
    sequences = step(5)
    model = tiny_qwen3()
    dimensions, features = ModelDimensions.of(model.config), [{"input_ids": ids, "labels": ids} for ids in sequences]
    model.resize_token_embeddings(300)
    expected = divide([sequences], size, sp_size, 200)
    sent = 0.0
    exchange = dist.all_to_all_single

    def counting(received: Any, parts: torch.Tensor, group: Any) -> Any:
        nonlocal sent
        sent += parts.nbytes * (1 - 1 / dist.get_world_size(group))
        return exchange(received, parts, group=group)

    monkeypatch.setattr(dist, "all_to_all_single", counting)

    def work(rank: int) -> tuple[int, float]:
        prepare_model(model, sp_group=ranks().sp_group)
        found = replace(StepCollator(max_tokens=200), rank=rank, num_ranks=size, sp_size=sp_size)(features)
        for batch in found.micro_batches:
            forward_rows(model, batch, plain_head=True).loss_sum().backward()
        return found.num_computed_tokens, sent

    computed, exchanged = zip(*on_ranks(size, work, sp_size=sp_size), strict=True)
    assert expected.num_rows == max(computed)
    assert expected.r == sum(map(len, sequences)) / sum(computed)
    sent_numbers = model.config.num_hidden_layers * dimensions.sent_numbers(sp_size)
    assert 4 * expected.num_rows * sent_numbers == max(exchanged)
