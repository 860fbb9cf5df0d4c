"""A small shape, and sequences that differ in length, as a user's own do."""

from typing import Any

import numpy as np
import pytest
import torch

from radixtrain.bench.cells import Cell, ModelShape, build_model


@pytest.fixture
def shape() -> ModelShape:
    return ModelShape(num_hidden_layers=2, hidden_size=32, head_dim=8, vocab_size=97)


@pytest.fixture
def flat(shape: ModelShape) -> Cell:
    return Cell(shape, prompt_length=40, suffix_length=6, num_sequences=8)


@pytest.fixture
def model(shape: ModelShape) -> Any:
    return build_model(shape, torch.device("cpu"), torch.float32, "sdpa")


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
