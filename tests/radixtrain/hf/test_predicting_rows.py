"""Loss and log-probabilities are Hugging Face's, whatever the kind of batch and whoever computes the logits."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from radixtrain import RadixCollator, share_prefixes
from radixtrain.collators.steps import PaddedCollator
from radixtrain.hf.predicting_rows import forward_rows
from radixtrain.testing import relative_error
from radixtrain.verification.oracle import float64_arithmetic

N = -100
FEATURES = [
    {"input_ids": [7, 8, 9, 5], "labels": [7, N, 9, 5]},
    {"input_ids": [7, 8, 9, 4], "labels": [7, N, 9, 4]},
    {"input_ids": [7, 8], "labels": [N, N]},
    {"input_ids": [3, 2, 1], "labels": [3, 2, N]},
]
LABELS = [(0, 9), (0, 5), (1, 9), (1, 4), (3, 2)]  # sequence and label, in the order of the tokens
COLLATORS = {"merged": RadixCollator(merge_labels=True), "listed": RadixCollator(), "padded": PaddedCollator()}


@pytest.fixture(autouse=True)
def in_float64() -> Iterator[None]:
    with float64_arithmetic():
        yield


def logprobs_of_hugging_face(model: Any) -> list[float]:
    """Of the labelled tokens, by `log_softmax` of the model's own logits for each sequence."""
    found = []
    for feature in FEATURES:
        logprobs = model(torch.tensor([feature["input_ids"]])).logits[0].log_softmax(-1)
        labels = list(enumerate(feature["labels"]))[1:]
        found += [logprobs[place - 1, label].item() for place, label in labels if label != N]
    return found


def model_for(name: str, model: Any) -> Any:
    return model if name == "padded" else share_prefixes(model)


@pytest.mark.parametrize("plain_head", [True, False])
@pytest.mark.parametrize("name", COLLATORS)
def test_the_loss_is_the_sum_over_labelled_tokens(name: str, plain_head: bool, tiny_qwen3: Any) -> None:
    expected = -sum(logprobs_of_hugging_face(tiny_qwen3().double()))
    model = model_for(name, tiny_qwen3().double())
    predictions = forward_rows(model, COLLATORS[name](FEATURES), plain_head)
    assert predictions.rows.shape[1] == (32 if plain_head else 50)
    assert (predictions.head is model.lm_head) == plain_head
    assert predictions.loss_sum().item() == pytest.approx(expected, rel=1e-12)
    assert predictions.targets.weights.sum() == len(LABELS)


def test_a_bias_of_the_head_counts(tiny_qwen3: Any) -> None:
    model = tiny_qwen3(tie_word_embeddings=False).double()
    model.lm_head.bias = torch.nn.Parameter(torch.linspace(-1, 1, 50, dtype=torch.float64))
    fused, own = (forward_rows(model, PaddedCollator()(FEATURES), plain_head) for plain_head in (True, False))
    assert fused.loss_sum().item() == pytest.approx(own.loss_sum().item(), rel=1e-12)
    assert fused.logprobs().tolist() == pytest.approx(own.logprobs().tolist(), rel=1e-12)


@pytest.mark.usefixtures("hooks_that_may_stay")
@pytest.mark.parametrize("name", ["merged", "padded"])
def test_floats_of_the_features(name: str, tiny_qwen3: Any) -> None:
    """The weighted loss, and the gradient through log-probabilities is the same; no float reaches the model."""
    weights = [[0.0, 5.0, -0.5, 2.0], [0.0, 0.0, 0.5, 3.0], [0.0, 0.0], [0.0, 0.25, 0.0]]
    features = [{**f, "loss_weights": w} for f, w in zip(FEATURES, weights, strict=True)]
    model = model_for(name, tiny_qwen3().double())
    batch = COLLATORS[name](features)
    weight = {(0, 9): -0.5, (0, 5): 2.0, (1, 9): 0.5, (1, 4): 3.0, (3, 2): 0.25}
    logprobs = logprobs_of_hugging_face(tiny_qwen3().double())
    expected = -sum(weight[label] * logprob for label, logprob in zip(LABELS, logprobs, strict=True))
    seen: list[str] = []
    model.model.register_forward_pre_hook(lambda _, args, kwargs: seen.extend(kwargs), with_kwargs=True)
    for plain_head in (True, False):
        predictions = forward_rows(model, batch, plain_head)
        by_logprobs = -(predictions.targets.weights * predictions.logprobs()).sum()
        by_loss = forward_rows(model, batch, plain_head).loss_sum()
        assert by_loss.item() == pytest.approx(expected, rel=1e-12) == by_logprobs.item()
        gradients = [torch.autograd.grad(loss, list(model.parameters())) for loss in (by_loss, by_logprobs)]
        assert all(relative_error(x, y) <= 1e-12 for x, y in zip(*gradients, strict=True))
    assert seen and not {*seen} & {"labels", "shift_labels"}
