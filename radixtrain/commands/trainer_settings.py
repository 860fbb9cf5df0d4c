"""Refuses, naming the key, values of the right type that no run can use."""

from __future__ import annotations

import logging
from typing import Any

from radixtrain.commands.export import check_hub
from radixtrain.commands.loggers import TRACKING, check_loggers
from radixtrain.errors import UserError, first_line
from radixtrain.settings.commands import RunSettings
from radixtrain.training.optimizer import check_package

logger = logging.getLogger(__name__)

FOR_ALL_WEIGHTS = 2e-5  # the default learning rate, and that of configs/sft.yaml


def check_settings(settings: RunSettings, command: str) -> None:
    """Raise UserError for a value that no run can use."""
    _check_max_time(settings.trainer.max_time)
    if getattr(settings, "weights_only", None) is False:  # of Lightning
        raise UserError("weights_only: false would run code from a checkpoint; radixtrain always reads it as data")
    if command in TRACKING:
        check_loggers(settings.trainer)
    if command == "fit":
        check_package(settings.model.optimizer)
        check_hub(settings.push_to_hub, settings.hub_model_id)
    if command == "fit" and settings.model.use_peft and settings.model.learning_rate == FOR_ALL_WEIGHTS:
        logger.warning(
            "model.learning_rate is %g, as for training all weights; LoRA usually needs 1e-4 to 2e-4", FOR_ALL_WEIGHTS
        )


def _check_max_time(max_time: Any) -> None:
    from radixtrain.training.loop import seconds_of

    try:
        seconds_of(max_time)
    except (ValueError, TypeError, OverflowError) as error:
        raise UserError(
            f"trainer.max_time must be DD:HH:MM:SS, or a mapping such as {{hours: 2}}; got {max_time} "
            f"({first_line(error)})"
        ) from None


def check_interval(trainer: Any, steps_per_epoch: int) -> None:
    """Raise UserError if `trainer.val_check_interval` is longer than an epoch."""
    interval = trainer.val_check_interval
    if trainer.check_val_every_n_epoch is not None and isinstance(interval, int) and interval > steps_per_epoch > 0:
        raise UserError(
            f"trainer.val_check_interval {interval}: an epoch has {steps_per_epoch} steps; set a smaller one, or "
            f"trainer.check_val_every_n_epoch: null to count on over the epochs"
        )
