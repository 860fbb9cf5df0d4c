"""One optimizer step: the same predictions with the same weights, however it is cut."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from radixtrain.collators.padded import PaddedCollator
from radixtrain.collators.radix import RadixCollator
from radixtrain.collators.steps import StepCollator
from radixtrain.testing import ragged_batches
from radixtrain.tree.cost_model import Rates, StepCost

N = -100
FEATURES = [
    {"input_ids": [1, 2, 3], "labels": [N, N, 3]},
    {"input_ids": [5, 6], "labels": [N, 6]},
    {"input_ids": [1, 2, 4], "labels": [N, 2, 4]},
]


@st.composite
def steps(draw):
    sequences = draw(ragged_batches())
    label = st.sampled_from([N, 0, 1, 2])
    return [{"input_ids": ids, "labels": [draw(label) for _ in ids]} for ids in sequences]


def expected_predictions(features):
    """(whole history of the predictor, label) -> how many tokens."""
    found = Counter()
    for feature in features:
        ids, labels = feature["input_ids"], feature["labels"]
        found.update((tuple(ids[:n]), labels[n]) for n in range(1, len(ids)) if labels[n] != N)
    return found


def histories_of_rows(batch, sequences):
    """For every row that the model computes, the tokens up to it, read from the sequence that the row comes from."""
    if "attention_mask" in batch:
        width = batch["input_ids"].shape[1]
        return [tuple(sequences[n // width][: n % width + 1]) for n in range(batch["input_ids"].numel())]
    ends = [tuple(ids[: n + 1]) for ids in sequences for n in range(len(ids))]
    return [ends[token] for token in batch["radix_gather_indices"].tolist()]


def predictions(step, features):
    found = Counter()
    for batch, members in zip(step.micro_batches, step.members, strict=True):
        if not members:
            assert_weighs_nothing(batch)
            continue
        rows = histories_of_rows(batch, [features[index]["input_ids"] for index in members])
        predictors = batch["radix_predictor_indices"].tolist()
        labels = batch["shift_labels"][0].tolist()
        if "radix_loss_weights" in batch:
            predictors = [predictors[row] for row in batch["radix_prediction_rows"].tolist()]
            weights = batch["radix_loss_weights"].tolist()
        else:
            weights = [float(label != N) for label in labels]
        for row, label, weight in zip(predictors, labels, weights, strict=True):
            if weight:
                found[rows[row], label] += weight
    return found


def assert_weighs_nothing(batch):
    if "radix_loss_weights" in batch:
        assert not batch["radix_loss_weights"].any()
    else:
        assert (batch["shift_labels"] == N).all()


@pytest.mark.parametrize(
    ("options", "members", "num_computed"),
    [
        pytest.param({}, [[0, 2, 1]], 6, id="one micro-batch"),
        pytest.param({"max_tokens": 4}, [[0, 2], [1]], 6, id="cut between prefixes"),
        pytest.param({"max_tokens": 3}, [[0], [2], [1]], 8, id="cut inside a prefix"),
        pytest.param({"pad_to_multiple_of": 8}, [[0, 2, 1]], 8, id="padded unique tokens"),
        pytest.param({"min_shared_tokens": 3}, [[0, 2, 1]], 8, id="nothing worth sharing"),
        pytest.param({"dedup": False}, [[0, 2, 1]], 9, id="padded baseline"),
        pytest.param({"dedup": False, "max_tokens": 6}, [[0, 2], [1]], 8, id="padded baseline, cut"),
    ],
)
def test_a_step(options, members, num_computed):
    step = StepCollator(**options)(FEATURES)
    assert step.where == ()
    assert step.members == members
    assert len(step.micro_batches) == len(members)
    counts = step.num_labels, step.num_tokens, step.num_computed_tokens
    assert counts == (4, 8, num_computed)
    assert set(map(type, counts)) == {int}
    assert step.num_unique_tokens == (6 if options.get("dedup", True) else None), "whatever the cut adds"


def test_a_step_moves_with_everything_else_as_it_was():
    step = replace(StepCollator(max_tokens=4)(FEATURES), where=("a:1", "a:2", "a:3"))
    moved = step.to("meta")
    assert replace(moved, micro_batches=[]).__dict__ == replace(step, micro_batches=[]).__dict__
    for before, after in zip(step.micro_batches, moved.micro_batches, strict=True):
        assert list(before) == list(after)
        for name, value in before.items():
            tensor = isinstance(value, torch.Tensor)
            assert after[name].device.type == "meta" if tensor else after[name] is value
            assert not tensor or value.device.type == "cpu", "the step that was given is not changed"


def test_options_have_names():
    for collator in (StepCollator, PaddedCollator):
        with pytest.raises(TypeError, match="positional argument"):
            collator(3)


@pytest.mark.parametrize(
    ("options", "collator"),
    [
        ({}, RadixCollator(merge_labels=True)),
        ({"merge_labels": False}, RadixCollator()),
        (
            {"min_shared_tokens": 3, "pad_to_multiple_of": 5},
            RadixCollator(min_shared_tokens=3, pad_to_multiple_of=5, merge_labels=True),
        ),
        ({"dedup": False, "pad_token_id": 9}, PaddedCollator(pad_token_id=9)),
    ],
    ids=["merged", "listed", "plan options", "baseline"],
)
def test_micro_batches_are_those_of_the_collator(options, collator):
    step = StepCollator(**options)(FEATURES)
    (batch,), (members,) = step.micro_batches, step.members
    expected = collator([FEATURES[index] for index in members])
    assert list(batch) == list(expected)
    for key, value in expected.items():
        assert (
            getattr(batch[key], "tolist", lambda key=key: batch[key])() == getattr(value, "tolist", lambda v=value: v)()
        )


@pytest.mark.parametrize(
    "options", [{}, {"merge_labels": False}, {"dedup": False}], ids=["merged", "listed", "baseline"]
)
def test_a_step_without_labels(options):
    step = StepCollator(max_tokens=2, **options)(
        [{"input_ids": [1, 2], "labels": [N, N]}, {"input_ids": [3], "labels": [3]}]
    )
    assert step.num_labels == 0
    assert step.num_tokens == 3


@settings(max_examples=100, deadline=None)
@given(
    steps(),
    st.sampled_from([1, 3, 6, 12, None]),
    st.sampled_from(
        [{}, {"merge_labels": False}, {"min_shared_tokens": 3}, {"pad_to_multiple_of": 4}, {"dedup": False}]
    ),
)
def test_the_predictions_of_a_step_do_not_depend_on_the_cut(features, max_tokens, options):
    step = StepCollator(max_tokens=max_tokens, **options)(features)
    assert sorted(index for members in step.members for index in members) == list(range(len(features)))
    expected = expected_predictions(features)
    assert predictions(step, features) == expected
    assert step.num_labels == sum(expected.values())
    assert step.num_tokens == sum(len(feature["input_ids"]) for feature in features)
    assert step.num_computed_tokens == sum(batch["input_ids"].numel() for batch in step.micro_batches)
    prefixes = {tuple(feature["input_ids"][: n + 1]) for feature in features for n in range(len(feature["input_ids"]))}
    if options.get("dedup", True):
        assert step.num_unique_tokens == len(prefixes) <= step.num_computed_tokens


@settings(max_examples=60, deadline=None)
@given(steps(), st.sampled_from([3, 6, 12, 24]))
@pytest.mark.parametrize(
    "options",
    [{}, {"dedup": False}, {"min_shared_tokens": 3}, {"pad_to_multiple_of": 4}, {"positions": True}],
    ids=["radix", "baseline", "min_shared_tokens", "pad_to_multiple_of", "position_ids"],
)
def test_no_micro_batch_computes_more_than_max_tokens(options, features, max_tokens):
    """Unless it is a single sequence."""
    options = dict(options)
    if options.pop("positions", False):
        features = [
            {**feature, "position_ids": list(range(start, start + len(feature["input_ids"])))}
            for start, feature in enumerate(features)
        ]
    step = StepCollator(max_tokens=max_tokens, **options)(features)
    for batch, members in zip(step.micro_batches, step.members, strict=True):
        assert batch["input_ids"].numel() <= max_tokens or len(members) == 1


SHARED_OPTIONS = [
    {},
    {"merge_labels": False},
    {"min_shared_tokens": 3},
    {"pad_to_multiple_of": 4},
    {"min_shared_tokens": 4, "pad_to_multiple_of": 3},
    {"shared_targets": "once"},
    {"dedup": False},
]


@settings(max_examples=80, deadline=None)
@given(steps(), st.sampled_from([1, 3, 6, 12, None]), st.sampled_from([2, 3, 7]), st.sampled_from(SHARED_OPTIONS))
def test_the_ranks_together_make_the_step(features, max_tokens, num_ranks, options):
    """Every sequence on one rank, as many micro-batches on each, none above the budget, the predictions of one rank."""
    one = StepCollator(max_tokens=max_tokens, **options)
    whole = one(features)
    shares = [replace(one, rank=rank, num_ranks=num_ranks)(features) for rank in range(num_ranks)]
    assert len({len(step.micro_batches) for step in shares}) == 1
    seen = [index for step in shares for members in step.members for index in members]
    assert sorted(seen) == list(range(len(features)))
    assert sum((predictions(step, features) for step in shares), Counter()) == predictions(whole, features)
    for step in shares:
        counts = step.num_labels, step.num_tokens, step.num_unique_tokens
        assert counts == (whole.num_labels, whole.num_tokens, whole.num_unique_tokens)
        assert step.num_computed_tokens == sum(batch["input_ids"].numel() for batch in step.micro_batches)
        for batch, members in zip(step.micro_batches, step.members, strict=True):
            assert max_tokens is None or batch["input_ids"].numel() <= max_tokens or len(members) <= 1


def test_the_share_of_a_rank():
    steps = [StepCollator(max_tokens=3, rank=rank, num_ranks=2)(FEATURES) for rank in (0, 1)]
    assert [step.members for step in steps] == [[[0], []], [[2], [1]]]
    assert [step.num_computed_tokens for step in steps] == [3 + 2, 3 + 2]
    assert [(step.num_labels, step.num_tokens, step.num_unique_tokens) for step in steps] == [(4, 8, 6)] * 2
    assert_weighs_nothing(steps[0].micro_batches[1])


def test_ranks_that_choose_branches_keep_the_number_of_micro_batches():
    """By a cost that finds few branches worth their calls: the collator of one rank would cut such a micro-batch."""
    rates = Rates(call=1.0, rectangle=1e-3, pair=1e-9, element=1e-9, flop=1e-9)
    sizes = {"num_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "row_flops": 1e6}
    cost = StepCost(rates=rates, on_host=True, **sizes)
    features = [{"input_ids": [1, 2, *ids], "labels": [N, N, *ids]} for ids in ([3], [4], [5, 6], [5, 7], [8], [9])]
    for rank in (0, 1):
        step = StepCollator(max_tokens=8, step_cost=cost, rank=rank, num_ranks=2)(features)
        assert [batch["input_ids"].numel() <= 8 for batch in step.micro_batches] == [True]


@pytest.mark.parametrize(("rank", "num_ranks"), [(2, 2), (-1, 2), (0, 0)])
def test_a_rank_that_there_is_not(rank, num_ranks):
    with pytest.raises(ValueError, match=f"rank must be from 0 to {num_ranks - 1}, as num_ranks says; got {rank}"):
        StepCollator(rank=rank, num_ranks=num_ranks)


@pytest.mark.parametrize("dedup", [True, False], ids=["radix", "baseline"])
@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"input_ids": []}, "feature 1: input_ids is empty"),
        ({"input_ids": [9, 9, 9, 9], "labels": [9]}, "feature 1: labels has 1 entries, input_ids has 4"),
        ({"labels": [1]}, "feature 1 has no input_ids, only ['labels']"),
    ],
    ids=["empty", "labels", "no input_ids"],
)
def test_errors_name_the_feature_of_the_step(dedup, bad, message):
    """By its index in the step, wherever sorting put it in its micro-batch."""
    with pytest.raises(ValueError) as error:
        StepCollator(dedup=dedup)([{"input_ids": [5], "labels": [5]}, bad, {"input_ids": [1], "labels": [1]}])
    assert str(error.value) == message


def test_in_the_workers_of_a_data_loader():
    collator = StepCollator(max_tokens=4)
    collator([FEATURES[0]])  # what it keeps between calls travels too
    items = list(
        DataLoader(FEATURES, batch_size=3, collate_fn=collator, num_workers=2, multiprocessing_context="spawn")
    )
    (step,) = items
    assert step.members == [[0, 2], [1]]
    assert predictions(step, FEATURES) == expected_predictions(FEATURES)
