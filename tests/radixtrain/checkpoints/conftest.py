"""States and checkpoints to damage."""

import json

import numpy as np
import pytest
import torch

from radixtrain.checkpoints.folder import write_checkpoint


def a_state(step=3, size=4):
    """As of a run: weights, two of them tied, an optimizer, generators, and settings."""
    generator = torch.Generator().manual_seed(step)
    weight = torch.randn(size, size, generator=generator)
    return {
        "global_step": step,
        "state_dict": {"embed": weight, "head": weight, "norm": torch.ones(size, dtype=torch.bfloat16)},
        "optimizer_states": [{"state": {0: {"step": torch.tensor(1.0), "exp_avg": weight / 2}}, "betas": (0.9, 0.999)}],
        "radixtrain": {
            "generators": {"numpy": np.arange(9, dtype="u4"), "torch": torch.full((9,), step, dtype=torch.uint8)}
        },
        "hyper_parameters": {"learning_rate": 1e-3, "kth": float("inf")},
    }


@pytest.fixture
def make_state():
    return a_state


@pytest.fixture
def folder(tmp_path):
    """Of two whole checkpoints: `step=3`, and `step=5`, which is newer."""
    for step in (3, 5):
        write_checkpoint(tmp_path / "checkpoints" / f"step={step}", a_state(step))
    return tmp_path / "checkpoints"


@pytest.fixture
def text_of():
    """A state as text, to compare."""

    def plain(value):
        if isinstance(value, torch.Tensor | np.ndarray):
            return [str(value.dtype), value.tolist()]
        if isinstance(value, dict):
            return [[repr(key), plain(each)] for key, each in value.items()]
        return [type(value).__name__, *map(plain, value)] if isinstance(value, list | tuple) else repr(value)

    return lambda state: json.dumps(plain(state))
