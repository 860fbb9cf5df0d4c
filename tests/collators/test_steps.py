"""One optimizer step: the same predictions with the same weights, however it is cut."""

import pickle
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from radixtrain import share_prefixes
from radixtrain.collators.steps import PaddedCollator, StepCollator
from radixtrain.hf.predicting_rows import forward_rows
from radixtrain.testing import ragged_batches
from tests.collators.predictions import expected_of, predictions_of
from tests.support import cases
from tests.support.batches import as_python, tensors_of
from tests.support.models import tiny_hybrid, tiny_qwen3

N = -100
FEATURES = [
    {"input_ids": [1, 2, 3], "labels": [N, N, 3]},
    {"input_ids": [5, 6], "labels": [N, 6]},
    {"input_ids": [1, 2, 4], "labels": [N, 2, 4]},
]


@st.composite
def steps(draw):
    """Features; in half of the steps each has positions of its own, so that equal tokens differ; in half, weights."""
    sequences, has_positions, has_weights = draw(ragged_batches()), draw(st.booleans()), draw(st.booleans())
    features: list[dict[str, Any]] = []
    for start, ids in enumerate(sequences):
        features.append({"input_ids": ids, "labels": [draw(st.sampled_from([N, 0, 1, 2])) for _ in ids]})
        if has_positions:
            features[-1]["position_ids"] = list(range(start, start + len(ids)))
        if has_weights:  # each token its own
            features[-1]["loss_weights"] = [8.0 * start + place + 0.25 for place in range(len(ids))]
    return features


def predictions(step, features):
    found = Counter()
    for batch, members in zip(step.micro_batches, step.members, strict=True):
        found += predictions_of(batch, [features[index] for index in members]) if members else Counter()
        assert members or not batch["radix"].loss_weights.any(), "it only fills up"
    return found


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
        assert before["radix"].host is after["radix"].host and after["radix"].host.device.type == "cpu"
        for name, value in before.items():
            assert {x.device.type for x in tensors_of(after[name])} == {"meta"}
            assert {x.device.type for x in tensors_of(value)} == {"cpu"}, "the step that was given is not changed"


def test_an_error_names_the_feature_by_its_index_in_the_step():
    """Wherever sorting put it in its micro-batch."""
    features = [{"input_ids": [5], "labels": [5]}, {"input_ids": [9, 9], "labels": [9]}, FEATURES[0]]
    for dedup in (True, False):
        with pytest.raises(ValueError, match=r"^feature 1: labels has 1 entries, input_ids has 2$"):
            StepCollator(dedup=dedup)(features)


OPTIONS = [
    {},
    {"merge_labels": False},
    {"min_shared_tokens": 3},
    {"pad_to_multiple_of": 4},
    {"min_shared_tokens": 4, "pad_to_multiple_of": 3},
    {"dedup": False},
]


@settings(max_examples=200, deadline=None)
@given(steps(), st.sampled_from([1, 3, 6, 12, None]), st.sampled_from([1, 2, 3, 7]), st.sampled_from(OPTIONS))
def test_the_ranks_together_make_the_step_however_it_is_cut(features, max_tokens, num_ranks, options):
    """Every sequence on one rank, as many micro-batches on each, none above the budget, every prediction once.

    With the weight of its token, whatever the order of the batch.
    """
    if not options.get("merge_labels", True):
        features = [{**feature, "loss_weights": None} for feature in features]  # which a model's own loss would ignore
    one = StepCollator(max_tokens=max_tokens, **options)
    shares = [replace(one, rank=rank, num_ranks=num_ranks)(features) for rank in range(num_ranks)]
    assert len({len(step.micro_batches) for step in shares}) == 1
    seen = [index for step in shares for members in step.members for index in members]
    assert sorted(seen) == list(range(len(features)))
    expected = expected_of(features)
    assert sum((predictions(step, features) for step in shares), Counter()) == expected
    num_tokens = sum(len(feature["input_ids"]) for feature in features)
    num_labels = sum(label != N for feature in features for label in feature["labels"][1:])
    prefixes = {
        (*feature.get("position_ids", [0])[:1], *feature["input_ids"][: n + 1])
        for feature in features
        for n in range(len(feature["input_ids"]))
    }
    for step in shares:
        unique = len(prefixes) if options.get("dedup", True) else None
        assert (step.num_labels, step.num_tokens) == (num_labels, num_tokens)
        assert step.num_unique_tokens == unique
        assert step.num_computed_tokens == sum(batch["position_ids"].numel() for batch in step.micro_batches)
        for batch, members in zip(step.micro_batches, step.members, strict=True):
            assert max_tokens is None or batch["position_ids"].numel() <= max_tokens or len(members) <= 1


@pytest.mark.parametrize(("rank", "num_ranks"), [(2, 2), (-1, 2), (0, 0)])
def test_a_rank_that_there_is_not(rank, num_ranks):
    with pytest.raises(ValueError, match=f"rank must be from 0 to {num_ranks - 1}, as num_ranks says; got {rank}"):
        StepCollator(rank=rank, num_ranks=num_ranks)


def test_in_the_workers_of_a_data_loader():
    collator = StepCollator(max_tokens=4)
    collator([FEATURES[0]])
    copied = pickle.loads(pickle.dumps(collator))  # what it keeps between calls travels too
    (step,) = DataLoader(FEATURES, batch_size=3, collate_fn=copied, num_workers=1)
    assert step.members == [[0, 2], [1]]
    assert predictions(step, FEATURES) == expected_of(FEATURES)


def test_two_sequences():
    features = [{"input_ids": [7, 8, 9, 6], "labels": [7, N, 9, 6]}, {"input_ids": [7, 5], "labels": [N, 5]}]
    batch = PaddedCollator(pad_token_id=3)(features)
    assert as_python(batch) == {
        "input_ids": (torch.int64, [[7, 8, 9, 6], [7, 5, 3, 3]]),
        "attention_mask": (torch.int64, [[1, 1, 1, 1], [1, 1, 0, 0]]),
        "position_ids": (torch.int64, [[0, 1, 2, 3], [0, 1, 2, 3]]),
        "shift_labels": (torch.int64, [[9, 6, 5]]),
        "radix": {
            "predictor_indices": (torch.int64, [1, 2, 4]),
            "prediction_rows": (torch.int64, [0, 1, 2]),
            "loss_weights": (torch.int64, [1, 1, 1]),
            "label_indices": (torch.int64, [2, 3, 5]),
            "cu_seqlens": (torch.int32, [0, 4, 6]),
        },
    }


LONG = {"input_ids": [1, 2, 4, 5, 6], "labels": [N, N, 4, 5, 6]}
ARMS = {
    "merged": {},
    "listed": {"merge_labels": False},
    "padded": {"dedup": False},
    "rounded": {"pad_to_multiple_of": 8},
}


def batch_of_an_idle_rank(**options: Any) -> dict[str, Any]:
    """One sequence for two ranks."""
    steps = [StepCollator(rank=rank, num_ranks=2, **options)([LONG]) for rank in (0, 1)]
    assert [step.members for step in steps] == [[[0]], [[]]]
    return steps[1].micro_batches[0]


@pytest.mark.parametrize("arm", cases(ARMS, ["merged", "padded"]))
@pytest.mark.parametrize("kind", cases(["Qwen3", "Qwen3.5", "Bamba", "LFM2"], ["Qwen3", "Qwen3.5"]))
def test_loss_and_gradients_are_zero(kind: str, arm: str) -> None:
    """Of every parameter: data parallel waits for the gradient of each."""
    model = tiny_qwen3() if kind == "Qwen3" else tiny_hybrid(kind)
    batch = batch_of_an_idle_rank(**ARMS[arm])
    loss = forward_rows(model if arm == "padded" else share_prefixes(model), batch, plain_head=True).loss_sum()
    loss.backward()
    assert loss.item() == 0
    gradients = {name: weight.grad for name, weight in model.named_parameters()}
    assert [name for name, gradient in gradients.items() if gradient is None or gradient.count_nonzero()] == []
