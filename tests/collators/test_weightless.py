"""A micro-batch of weight zero reaches every parameter, and changes none."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tiers import cases

from radixtrain import prepare_model
from radixtrain.collators.features import all_feature_arrays
from radixtrain.collators.steps import StepCollator, dummy_features
from radixtrain.hf.predictions import predict
from radixtrain.loss import clipped_policy_loss
from radixtrain.verification.oracle import float64_throughout

N = -100
SHORT = {"input_ids": [1, 2, 3], "labels": [N, 2, 3]}
LONG = {"input_ids": [1, 2, 4, 5, 6], "labels": [N, N, 4, 5, 6]}
ARMS = {
    "merged": {},
    "listed": {"merge_labels": False},
    "padded": {"dedup": False},
    "rounded": {"pad_to_multiple_of": 8},
}


def listed(feature: Any) -> dict[str, Any]:
    values = feature._asdict()
    return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in values.items()}


def test_it_begins_as_the_shortest_sequence_that_bears_loss():
    unlabelled = {"input_ids": [9], "labels": [9]}
    feature = dummy_features(all_feature_arrays([LONG, unlabelled, SHORT]), has_weights=True)
    others = {"position_ids": None, "num_left_padding": 0, "old_logprobs": None, "advantages": None}
    assert listed(feature) == {"input_ids": [1, 2], "labels": [1, 2], "loss_weights": [0, 0], **others}


def test_without_weights_it_has_no_label():
    feature = dummy_features(all_feature_arrays([LONG, SHORT]), has_weights=False)
    assert feature.labels.tolist() == [N, N]
    assert feature.loss_weights is None


def test_a_beginning_has_the_positions_and_floats_of_its_sequence():
    policy = {"position_ids": [4, 5, 6], "advantages": 0.5, "old_logprobs": [0, -1, -2], "loss_weights": [0, 3, 3]}
    feature = dummy_features(all_feature_arrays([{**SHORT, **policy}]), has_weights=True)
    assert feature.position_ids.tolist() == [4, 5]
    assert feature.advantages.tolist() == [0, 0.5]
    assert feature.old_logprobs.tolist() == [0, -1]
    assert feature.loss_weights.tolist() == [0, 0]


def batch_of_an_idle_rank(**options: Any) -> dict[str, Any]:
    """One sequence for two ranks."""
    steps = [StepCollator(rank=rank, num_ranks=2, **options)([LONG]) for rank in (0, 1)]
    assert [step.members for step in steps] == [[[0]], [[]]]
    return steps[1].micro_batches[0]


@pytest.mark.parametrize("arm", cases(ARMS, ["merged", "padded"]))
@pytest.mark.parametrize("kind", cases(["Qwen3", "Qwen3.5", "Bamba", "LFM2"], ["Qwen3", "Qwen3.5"]))
def test_loss_and_gradients_are_zero(kind: str, arm: str, tiny_qwen3: Any, tiny_hybrid: Any) -> None:
    """Of every parameter: data parallel waits for the gradient of each."""
    model = tiny_qwen3() if kind == "Qwen3" else tiny_hybrid(kind)
    batch = batch_of_an_idle_rank(**ARMS[arm])
    loss = predict(model if arm == "padded" else prepare_model(model), batch, plain_head=True).loss_sum()
    loss.backward()
    assert loss.item() == 0
    gradients = {name: weight.grad for name, weight in model.named_parameters()}
    assert [name for name, gradient in gradients.items() if gradient is None or gradient.count_nonzero()] == []


@pytest.mark.parametrize("arm", ["merged", "padded"])
def test_a_policy_loss_is_zero_too(arm: str, tiny_qwen3: Any) -> None:
    policy = {"advantages": 2.0, "old_logprobs": [0, 0, -1, -2, -3]}
    step = StepCollator(rank=1, num_ranks=2, **ARMS[arm])([{**LONG, **policy}])
    (batch,), model = step.micro_batches, tiny_qwen3()
    logprobs = predict(model if arm == "padded" else prepare_model(model), batch, plain_head=True).logprobs()
    others = (batch[f"radix_{name}"] for name in ("advantages", "loss_weights", "old_logprobs"))
    loss = clipped_policy_loss(logprobs, *others)
    loss.backward()
    assert loss.item() == 0
    assert not any(weight.grad.count_nonzero() for weight in model.parameters())


@pytest.mark.parametrize("arm", ["merged", "padded"])
def test_the_gradients_of_the_ranks_add_up_to_those_of_one(arm: str, tiny_qwen3: Any) -> None:
    """In float64, with unequal label counts, and of five ranks one without a sequence."""
    features = [
        SHORT,
        LONG,
        {"input_ids": [1, 2, 4, 7], "labels": [N, N, N, 7]},
        {"input_ids": [8, 9], "labels": [8, 9]},
    ]
    model = tiny_qwen3() if arm == "padded" else prepare_model(tiny_qwen3())
    one = StepCollator(max_tokens=6, **ARMS[arm])

    def gradients(collators: list[StepCollator]) -> list[torch.Tensor]:
        model.zero_grad()
        for step in (collator(features) for collator in collators):
            for batch in step.micro_batches:
                (predict(model, batch, plain_head=True).loss_sum() / step.num_labels).backward()
        return [weight.grad for weight in model.parameters()]

    with float64_throughout(model):
        expected = gradients([one])
        largest = max(gradient.norm() for gradient in expected)
        for num_ranks in (2, 3, 5):
            found = gradients([replace(one, rank=rank, num_ranks=num_ranks) for rank in range(num_ranks)])
            for ours, theirs in zip(found, expected, strict=True):
                assert (ours - theirs).norm() <= 1e-12 * theirs.norm() + 1e-15 * largest
