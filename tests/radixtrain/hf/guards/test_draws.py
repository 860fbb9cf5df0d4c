"""Turning off for a while what draws at random. What is refused is in `test_batch.py`."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from radixtrain.hf.guards.draws import DROPOUTS, evaluating, without_dropout


@pytest.fixture
def model(tiny_qwen3: Callable[..., Any]) -> Any:
    """In training mode but for one layer, with a dropout module."""
    model = tiny_qwen3().train()
    model.model.layers[0].eval()
    model.model.layers[1].mlp.dropout = nn.Dropout(0.5)
    return model


def modes(model: Any) -> list[bool]:
    return [module.training for module in model.modules()]


def test_every_dropout_of_torch_is_known() -> None:
    assert {kind.__name__ for kind in DROPOUTS} == set(torch.nn.modules.dropout.__all__)


@pytest.mark.parametrize("off", [evaluating, lambda model: without_dropout(model, ["dropout"])])
def test_modes_come_back(model: Any, off: Any) -> None:
    """After an error too."""
    before = modes(model)
    with pytest.raises(KeyError), off(model):
        assert not model.model.layers[1].mlp.dropout.training
        assert sum(modes(model)) == (0 if off is evaluating else sum(before) - 1)
        raise KeyError
    assert modes(model) == before
