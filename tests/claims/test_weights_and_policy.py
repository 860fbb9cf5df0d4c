"""Signed loss weights, targets that count once, and clipped policy ratios: every parameter's gradient in float64.

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
import radixtrain.collators.steps
from radixtrain import RadixCollator, restore_model, share_prefixes
from radixtrain.collators.features import packed
from radixtrain.collators.steps import Step, StepCollator
from radixtrain.collators.targets import keep_once
from radixtrain.hf.predicting_rows import forward_rows
from radixtrain.loss import clipped_policy_loss
from radixtrain.testing import assert_equivalent, labelled_features
from radixtrain.verification.equivalence import verify_step
from radixtrain.verification.oracle import float64_throughout, gradients_of
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


def ordinary(model: Any, features: Features, loss: Loss, once: bool = False) -> Iterator[Tensor]:
    """Minus the loss of one right-padded batch, divided by the number of labelled tokens, or of distinct ones."""
    counted = [{**f, "position_ids": f.get("position_ids", list(range(len(f["input_ids"]))))} for f in features]
    longest = max(len(feature["input_ids"]) for feature in features)

    def padded(name: str, fill: float = 0) -> Tensor:
        """(B, L). Fill also stands for an entry that is not there."""
        rows = [np.asarray(f.get(name, np.full(len(f["input_ids"]), fill))) for f in counted]
        return torch.tensor(np.stack([np.pad(row, (0, longest - len(row)), constant_values=fill) for row in rows]))

    lengths = torch.tensor([len(feature["input_ids"]) for feature in features])
    seen = (torch.arange(longest) < lengths[:, None]).long()
    logits = model(
        padded("input_ids"), attention_mask=seen, position_ids=padded("position_ids"), use_cache=False
    ).logits
    labels = padded("labels", N)[:, 1:]
    bears_loss = labels != N
    logprobs = logits[:, :-1].log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0][bears_loss]
    weights, old, advantages = (padded(name)[:, 1:][bears_loss].double() for name in FLOATS)
    count = len(labels[bears_loss])
    if once:
        copies = copies_of(counted)
        weights, count = mean_of_copies(weights, copies), len(set(copies))
    yield -loss(logprobs, weights, old, advantages) / count


def copies_of(features: Features) -> list[tuple[Any, ...]]:
    """For each labelled token what its copies have in common: history, positions and label."""
    return [
        (*f["input_ids"][:n], "at", *f["position_ids"][:n], f["labels"][n])
        for f in features
        for n in range(1, len(f["input_ids"]))
        if f["labels"][n] != N
    ]


def mean_of_copies(weights: Tensor, copies: list[tuple[Any, ...]]) -> Tensor:
    """The mean at the first copy, in float32 as all weights are, and nothing at the others."""
    means = torch.zeros_like(weights)
    for place, copy in enumerate(copies):
        if copy not in copies[:place]:
            same = [weight for weight, other in zip(weights.tolist(), copies, strict=True) if other == copy]
            means[place] = float(np.float32(sum(same) / len(same)))
    return means


def shared(model: Any, step: Step, is_policy: bool) -> Iterator[Tensor]:
    """The same loss of a prepared model, a term for each micro-batch."""
    for batch in step.micro_batches:
        predictions = forward_rows(model, batch, plain_head=True)
        if is_policy:
            numbers = (getattr(batch["radix"], name) for name in ("advantages", "loss_weights", "old_logprobs"))
            yield clipped_policy_loss(predictions.logprobs(), *numbers, EPSILON, EPSILON_HIGH) / step.num_labels
        else:
            yield predictions.loss_sum() / step.num_labels


def worst_error(
    model: Any, features: Features, loss: Loss, once: bool = False, rows: Features | None = None, **options: Any
) -> float:
    """The largest relative error of a gradient; of one below a thousandth of the largest, relative to that.

    rows: of the ordinary arm, if not the same.
    """
    step = StepCollator(**options)(features)
    with float64_throughout(model):
        expected = gradients_of(model, lambda: ordinary(model, features if rows is None else rows, loss, once)).tensors
        share_prefixes(model)
        try:
            found = gradients_of(model, lambda: shared(model, step, loss is clipped_ratio)).tensors
        finally:
            restore_model(model)
    floor = max(float(tensor.norm()) for tensor in expected.values()) / 1000
    return max(float((found[n] - x).norm()) / max(float(x.norm()), floor, 1e-300) for n, x in expected.items())


N = -100


@pytest.fixture(scope="module")
def model(tiny_qwen3: Any) -> Any:
    return tiny_qwen3(vocab_size=8)


@st.composite
def weighted(draw: Any, names: tuple[str, ...] = FLOATS) -> Features:
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
        feature |= {name: drawn[name].astype(np.float32) for name in names}
    return features


BUDGETS = st.sampled_from([None, 12])
EXAMPLES = settings(max_examples=tries(15, most=500), deadline=None)


@FULL
@EXAMPLES
@given(weighted(("loss_weights",)), BUDGETS)
def test_a_weighted_log_likelihood(model: Any, features: Features, max_tokens: int | None) -> None:
    assert worst_error(model, features, log_likelihood, max_tokens=max_tokens) <= BAR


@EXAMPLES
@given(weighted(), BUDGETS)
def test_a_clipped_policy_ratio(model: Any, features: Features, max_tokens: int | None) -> None:
    assert worst_error(model, features, clipped_ratio, max_tokens=max_tokens) <= BAR


@FULL
@EXAMPLES
@given(weighted(("loss_weights",)), BUDGETS)
def test_targets_that_count_once(model: Any, features: Features, max_tokens: int | None) -> None:
    options = {"max_tokens": max_tokens, "shared_targets": "once"}
    assert worst_error(model, features, log_likelihood, once=True, **options) <= BAR


def branches() -> Features:
    """Eight branches of one run, nested, each token with numbers of its own."""
    draws, features = np.random.default_rng(0), []
    for branch in range(8):
        ids = [1, 5, 2, 6, *([3, 4] if branch < 4 else [7]), branch % 2, 3, branch % 4, 6]
        floats = {name: draws.normal(size=len(ids)).astype(np.float32) for name in FLOATS}
        floats["old_logprobs"] = floats["old_logprobs"] - np.float32(2.5)
        features.append({"input_ids": ids, "labels": [N, N, *ids[2:]], **floats})
    return features


@FULL
class TestTheChecks:
    """Each mistake is seen, in a batch of branches that passes without it."""

    def test_they_pass_what_is_right(self, model: Any) -> None:
        for loss in (log_likelihood, clipped_ratio):
            assert worst_error(model, branches(), loss) <= BAR

    @pytest.mark.parametrize("name", FLOATS)
    def test_numbers_of_the_token_before(self, model: Any, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        def moved(arrays: Any) -> Any:
            together = packed(arrays)
            return together._replace(floats={**together.floats, name: np.roll(together.floats[name], 1)})

        monkeypatch.setattr(radixtrain.collators.radix, "packed", moved)
        assert worst_error(model, branches(), clipped_ratio) > 0.01

    def test_once_of_each_micro_batch(self, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """Copies that the cut parts count once in each part."""
        features = [{name: f[name] for name in ("input_ids", "labels", "loss_weights")} for f in branches()]
        options = {"max_tokens": 14, "shared_targets": "once"}
        assert worst_error(model, features, log_likelihood, once=True, **options) <= BAR
        collate = RadixCollator.collate
        monkeypatch.setattr(radixtrain.collators.steps, "keep_once", lambda arrays: arrays)
        monkeypatch.setattr(
            RadixCollator, "collate", lambda self, arrays, *budget: collate(self, keep_once(arrays), *budget)
        )
        assert worst_error(model, features, log_likelihood, once=True, **options) > 0.01

    def test_a_ratio_that_is_not_clipped(self, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        def unclipped(logprobs: Tensor, advantages: Tensor, weights: Tensor, old: Tensor, *_: float) -> Tensor:
            return -(weights * torch.exp(logprobs - old) * advantages).sum()

        monkeypatch.setitem(globals(), "clipped_policy_loss", unclipped)
        assert worst_error(model, branches(), clipped_ratio) > 0.01


@FULL
@pytest.mark.parametrize("shared_targets", ["every", "once"])
def test_verify_knows_them(tiny_qwen3: Any, shared_targets: Any) -> None:
    """What `fit` and `verify` compare before they train, in every precision."""
    features = [{name: f[name] for name in ("input_ids", "labels", "loss_weights")} for f in branches()]
    model = tiny_qwen3(vocab_size=8)
    collator = StepCollator(max_tokens=20, shared_targets=shared_targets)
    assert_equivalent(verify_step(model, lambda batch: forward_rows(model, batch, True).loss_sum(), features, collator))
