"""Checkpoints to damage."""

import pytest
import torch

from radixtrain.checkpoints.folder import Checkpoint, write_checkpoint
from tests.support.runs import a_run


def a_checkpoint(step=3, size=4):
    """As of a run: weights, moments and numbers of an optimizer, and settings."""
    weight = torch.randn(size, size, generator=torch.Generator().manual_seed(step))
    weights = {"embed": weight, "norm": torch.ones(size, dtype=torch.bfloat16)}
    moments = {"embed.exp_avg": weight / 2, "embed.step": torch.tensor(1.0)}
    return Checkpoint(weights, moments, a_run(step, numbers={"norm.step": 7}, model={"kth": float("inf")}))


@pytest.fixture
def made():
    return a_checkpoint


@pytest.fixture
def folder(tmp_path):
    """Of two whole checkpoints: `step=3`, and `step=5`, which is newer."""
    for step in (3, 5):
        write_checkpoint(tmp_path / "checkpoints" / f"step={step}", a_checkpoint(step))
    return tmp_path / "checkpoints"
