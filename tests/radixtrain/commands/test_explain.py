"""How `report` makes the model that it times."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from radixtrain.commands.explain import run_setup
from radixtrain.settings.sections import ModelSettings, TrainerSettings


@pytest.mark.parametrize(
    ("share", "period", "recomputing"), [(False, 1, 0), (True, 1, 1), (0.75, 4, 3), (0.5, 2, 1), (0.3, 10, 3)]
)
def test_layers_recompute_as_in_training(
    tmp_path: Path, tiny_qwen3: Callable[..., Any], share: bool | float, period: int, recomputing: int
) -> None:
    """In each of the models that are timed, the same share: an integer number of layers."""
    tiny_qwen3(num_hidden_layers=40).config.save_pretrained(tmp_path)
    settings = ModelSettings(model_name_or_path=str(tmp_path), activation_checkpointing=share)
    setup = run_setup(settings, TrainerSettings(accelerator="cpu"))
    assert (setup.num_layers, setup.period) == (40, period)
    for times in (1, 3):
        layers = setup.build(times * period, torch.device("meta")).model.layers
        assert sum(layer.gradient_checkpointing for layer in layers) == times * recomputing
