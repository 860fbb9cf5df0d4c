"""Sequences that differ in length, as a user's own do."""

from typing import Any

import numpy as np
import pytest


@pytest.fixture
def ragged_features() -> list[dict[str, Any]]:
    """Two prompts of 20 and 21 tokens, each with four answers of 3 to 6 tokens that bear the loss; shuffled."""
    rng = np.random.default_rng(1)
    features = []
    for group in range(2):
        prompt = rng.integers(0, 97, 20 + group)
        for branch in range(4):
            ids = np.concatenate([prompt, rng.integers(0, 97, 3 + branch)])
            features.append({"input_ids": ids, "labels": np.where(np.arange(len(ids)) < len(prompt), -100, ids)})
    return [features[index] for index in rng.permutation(len(features))]
