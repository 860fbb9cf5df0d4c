"""Signed loss weights and clipped policy ratios: every parameter's gradient in float64.

The ordinary arm is a padded loop of Hugging Face's own model, see `padded_policy`.
"""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import radixtrain.collators.radix
from radixtrain.collators.features import packed
from radixtrain.collators.steps import StepCollator
from radixtrain.hf.predicting_rows import forward_rows
from radixtrain.testing import assert_equivalent, labelled_features
from radixtrain.verification.equivalence import verify_step
from tests.support import FULL, padded_policy, tries
from tests.support.padded_policy import BAR, FLOATS, Features, clipped_ratio, log_likelihood, worst_error

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

    def test_a_ratio_that_is_not_clipped(self, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        def unclipped(logprobs: Tensor, advantages: Tensor, weights: Tensor, old: Tensor, *_: float) -> Tensor:
            return -(weights * torch.exp(logprobs - old) * advantages).sum()

        monkeypatch.setattr(padded_policy, "clipped_policy_loss", unclipped)
        assert worst_error(model, branches(), clipped_ratio) > 0.01


@FULL
def test_verify_knows_them(tiny_qwen3: Any) -> None:
    """What `fit` and `verify` compare before they train, in every precision."""
    features = [{name: f[name] for name in ("input_ids", "labels", "loss_weights")} for f in branches()]
    model = tiny_qwen3(vocab_size=8)
    collator = StepCollator(max_tokens=20)
    assert_equivalent(verify_step(model, lambda batch: forward_rows(model, batch, True).loss_sum(), features, collator))
