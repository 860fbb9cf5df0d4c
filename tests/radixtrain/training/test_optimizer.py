"""How many steps a run has, and what AdamW and the schedule make of its settings."""

from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
from torch import nn

from radixtrain.training.optimizer import adamw, num_steps_of_run, schedule


def settings(**changes: Any) -> SimpleNamespace:
    adam = {"learning_rate": 1.0, "weight_decay": 0.1, "adam_beta1": 0.5, "adam_beta2": 0.6, "adam_epsilon": 1e-3}
    return SimpleNamespace(**{**adam, "warmup_steps": 0.0, "lr_scheduler_type": "linear", **changes})


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        pytest.param({"max_epochs": 3}, 30, id="epochs"),
        pytest.param({"max_epochs": 3, "max_steps": 7}, 7, id="steps end it first"),
        pytest.param({"max_epochs": 3, "max_steps": 70}, 30, id="epochs end it first"),
        pytest.param({"max_epochs": -1, "max_steps": 70}, 70, id="steps only"),
        pytest.param({"max_epochs": 3, "limit_train_batches": 4}, 12, id="fewer steps an epoch"),
        pytest.param({"max_epochs": 3, "limit_train_batches": 0.55}, 15, id="a share of an epoch"),
    ],
)
def test_steps_of_a_run(limits: dict[str, Any], expected: int) -> None:
    trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, **limits)
    assert num_steps_of_run(trainer, 10) == expected


def test_only_matrices_decay_and_only_what_is_trained() -> None:
    module = nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3), nn.Linear(3, 1).requires_grad_(False))
    optimizer = adamw(module, settings())
    assert [(len(group["params"]), group["weight_decay"]) for group in optimizer.param_groups] == [(1, 0.1), (3, 0.0)]
    assert {(group["lr"], group["betas"], group["eps"]) for group in optimizer.param_groups} == {
        (1.0, (0.5, 0.6), 1e-3)
    }


@pytest.mark.parametrize("warmup_steps", [2, 0.2])
def test_warm_up_in_steps_or_as_a_share(warmup_steps: float) -> None:
    optimizer = adamw(nn.Linear(1, 1), settings())
    scheduler = schedule(optimizer, settings(warmup_steps=warmup_steps), 10)
    rates = []
    for _ in range(10):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    expected = [0, 0.5, *(step / 8 for step in range(8, 0, -1))]
    assert rates == pytest.approx(expected, rel=1e-12)
