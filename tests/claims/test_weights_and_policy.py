"""Signed loss weights, and a clipped policy ratio on `label_indices`: every parameter's gradient in float64.

The ordinary arm is a padded loop of Hugging Face's own model, written from the definitions: it reads the features and
nothing of radixtrain's collators or losses.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import radixtrain.collators.radix
from radixtrain import restore_model, share_prefixes
from radixtrain.collators.features import packed
from radixtrain.collators.steps import Step, StepCollator
from radixtrain.hf.predicting_rows import forward_rows
from radixtrain.testing import assert_equivalent, labelled_features
from radixtrain.verification.equivalence import verify_step
from radixtrain.verification.oracle import float64_throughout, gradients_of
from tests.pages import blocks_in, read
from tests.support import FULL, tries

BAR = 1e-12  # of a gradient's norm; the worst of 150 generated steps was 2.4e-14
N = -100
EPSILON, EPSILON_HIGH = 0.2, 0.3
FLOATS = ("loss_weights", "old_logprobs", "advantages")
Features = list[dict[str, Any]]
Loss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # log-probabilities, weights, old ones, advantages -> a sum


def log_likelihood(logprobs: Tensor, weights: Tensor, old: Tensor, advantages: Tensor) -> Tensor:
    return (weights * logprobs).sum()


def clipped_ratio(logprobs: Tensor, weights: Tensor, old: Tensor, advantages: Tensor) -> Tensor:
    ratio = torch.exp(logprobs - old)
    bounded = torch.clamp(ratio, 1 - EPSILON, 1 + EPSILON_HIGH)
    return (weights * torch.where(ratio * advantages < bounded * advantages, ratio, bounded) * advantages).sum()


def ordinary(model: Any, features: Features, loss: Loss) -> Iterator[Tensor]:
    """Minus the loss of one right-padded batch, divided by the number of labelled tokens."""
    counted = [{**f, "position_ids": f.get("position_ids", list(range(len(f["input_ids"]))))} for f in features]
    longest = max(len(feature["input_ids"]) for feature in features)

    def padded(name: str, fill: float = 0) -> Tensor:
        """(B, L)."""
        rows = [np.asarray(f[name]) for f in counted]
        return torch.tensor(np.stack([np.pad(row, (0, longest - len(row)), constant_values=fill) for row in rows]))

    lengths = torch.tensor([len(feature["input_ids"]) for feature in features])
    inputs = {name: padded(name) for name in ("input_ids", "position_ids")}
    seen = (torch.arange(longest) < lengths[:, None]).long()
    logits = model(**inputs, attention_mask=seen, use_cache=False).logits
    labels = padded("labels", N)[:, 1:]
    bears_loss = labels != N
    logprobs = logits[:, :-1].log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0][bears_loss]
    weights, old, advantages = (padded(name)[:, 1:][bears_loss].double() for name in FLOATS)
    yield -loss(logprobs, weights, old, advantages) / len(labels[bears_loss])


def shared(model: Any, step: Step, features: Features, is_policy: bool) -> Iterator[Tensor]:
    """The same loss of a shared model, a term for each micro-batch."""
    for batch, members in zip(step.micro_batches, step.members, strict=True):
        predictions, radix = forward_rows(model, batch, plain_head=True), batch["radix"]
        if is_policy:
            old, advantages = (
                torch.tensor(np.concatenate([features[member][name] for member in members]))[radix.label_indices]
                for name in ("old_logprobs", "advantages")
            )
            yield -clipped_ratio(predictions.logprobs(), radix.loss_weights, old, advantages) / step.num_labels
        else:
            yield predictions.loss_sum() / step.num_labels


def worst_error(
    model: Any, features: Features, loss: Loss, max_tokens: int | None = None, shared: Any = shared
) -> float:
    """The largest relative error of a gradient; of one below a thousandth of the largest, relative to that."""
    read = [{name: x for name, x in each.items() if name not in FLOATS[1:]} for each in features]
    step = StepCollator(max_tokens=max_tokens)(read)
    with float64_throughout(model):
        expected = gradients_of(model, lambda: ordinary(model, features, loss)).tensors
        share_prefixes(model)
        try:
            found = gradients_of(model, lambda: shared(model, step, features, loss is clipped_ratio)).tensors
        finally:
            restore_model(model)
    floor = max(float(tensor.norm()) for tensor in expected.values()) / 1000
    return max(float((found[n] - x).norm()) / max(float(x.norm()), floor, 1e-300) for n, x in expected.items())


@pytest.fixture(scope="module")
def model(tiny_qwen3: Any) -> Any:
    return tiny_qwen3(vocab_size=8)


@st.composite
def weighted(draw: Any) -> Features:
    """Nested ragged features, each token with floats of its own. Some copies cancel, some are alike."""
    features = [dict(feature) for feature in draw(labelled_features(max_sequences=6, max_length=8))]
    draws = np.random.default_rng(draw(st.integers(0, 2**16)))
    for feature in features:
        size = len(feature["input_ids"])
        drawn = {
            "loss_weights": draws.choice([-1.0, -0.3, 0.0, 0.1, 1.0, 2.0], size),
            "old_logprobs": draws.normal(-2, 0.7, size),
            "advantages": draws.choice([-1.5, -0.2, 0.7, 1.0], size),
        }
        feature |= {name: drawn[name].astype(np.float32) for name in FLOATS}
    return features


@pytest.mark.parametrize("loss", [log_likelihood, clipped_ratio])
@settings(max_examples=tries(15, most=500), deadline=None)
@given(weighted(), st.sampled_from([None, 12]))
def test_the_gradient_is_the_ordinary_one(model: Any, loss: Loss, features: Features, max_tokens: int | None) -> None:
    assert worst_error(model, features, loss, max_tokens) <= BAR


def branches() -> Features:
    """Eight branches of one run, nested, each token with numbers of its own."""
    draws, features = np.random.default_rng(0), []
    for branch in range(8):
        ids = [1, 5, 2, 6, *([3, 4] if branch < 4 else [7]), branch % 2, 3, branch % 4, 6]
        floats = {name: draws.normal(size=len(ids)).astype(np.float32) for name in FLOATS}
        floats["old_logprobs"] = floats["old_logprobs"] - np.float32(2.5)
        features.append({"input_ids": ids, "labels": [N, N, *ids[2:]], **floats})
    return features


def test_the_loop_of_the_page(model: Any) -> None:
    """Of docs/dpo-grpo.md: numbers of a token, found after collating."""
    names: dict[str, Any] = {}
    exec(blocks_in(read("docs/dpo-grpo.md"))[-1], names)
    features = [{**each, "loss_weights": np.ones(len(each["labels"]))} for each in branches()]

    def by_the_page(model: Any, step: Step, features: Features, is_policy: bool) -> Iterator[Tensor]:
        yield names["policy_loss"](model, names["collate"](features))

    assert worst_error(model, features, clipped_ratio, shared=by_the_page) <= BAR


@FULL
def test_weights_of_the_token_before_are_seen(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def moved(arrays: Any) -> Any:
        together = packed(arrays)
        return together._replace(loss_weights=np.roll(together.loss_weights, 1))

    assert worst_error(model, branches(), clipped_ratio) <= BAR
    monkeypatch.setattr(radixtrain.collators.radix, "packed", moved)
    assert worst_error(model, branches(), clipped_ratio) > 0.01


@FULL
def test_verify_knows_them(tiny_qwen3: Any) -> None:
    """What `fit` and `verify` compare before they train, in every precision."""
    features = [{name: f[name] for name in ("input_ids", "labels", "loss_weights")} for f in branches()]
    model = tiny_qwen3(vocab_size=8)
    collator = StepCollator(max_tokens=20)
    assert_equivalent(verify_step(model, lambda batch: forward_rows(model, batch, True).loss_sum(), features, collator))
