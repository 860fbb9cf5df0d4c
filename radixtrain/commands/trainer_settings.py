"""Refuses, naming the key, settings that would change a step, and values of the right type that no run can use."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

from radixtrain.commands import WITHOUT_TRAINING
from radixtrain.commands.reading import printed
from radixtrain.distributed import ranks
from radixtrain.errors import UserError, first_line
from radixtrain.redaction import check_unmasked
from radixtrain.settings.commands import Run
from radixtrain.settings.trainer import TrainerSettings
from radixtrain.training.optimizer import check_package

logger = logging.getLogger(__name__)

SHARES = (
    *("limit_train_batches", "limit_val_batches", "limit_test_batches", "limit_predict_batches"),
    "overfit_batches",
)
UNREAD = (
    *("callbacks", "min_epochs", "min_steps", "profiler", "plugins", "sync_batchnorm", "model_registry"),
    *("reload_dataloaders_every_n_epochs", "enable_model_summary", "inference_mode", "enable_autolog_hparams"),
)
FOR_ALL_WEIGHTS = 2e-5  # the default learning rate, and that of configs/sft.yaml
MOST_DEVICES = 1_000


def check_trainer_settings(config: TrainerSettings) -> None:
    """Refuse Lightning's settings that would change a step; each error names the key that does it here."""
    if config.accumulate_grad_batches != 1:
        raise UserError(
            "trainer.accumulate_grad_batches: a step is cut by data.max_tokens; set data.batch_size instead"
        )
    if config.gradient_clip_val is not None:
        raise UserError("trainer.gradient_clip_val: set model.max_grad_norm instead")
    if config.barebones:
        raise UserError("trainer.barebones: a run logs its steps and saves them; leave it out")
    if str(config.precision) in ("16", "16-mixed", "16-true"):
        raise UserError(f"trainer.precision {config.precision}: float16 needs a loss scale; use bf16-mixed or 32-true")
    for name in SHARES:
        value = getattr(config, name) or 0
        if value < 0 or (isinstance(value, float) and value > 1):
            raise UserError(f"trainer.{name} {value}: a number of steps, or a share from 0.0 to 1.0")
    for name in ("max_epochs", "max_steps", "num_sanity_val_steps"):
        if (getattr(config, name) or 0) < -1:
            raise UserError(f"trainer.{name} {getattr(config, name)}: a number, or -1")
    if isinstance(config.val_check_interval, float) and config.val_check_interval > 1:
        raise UserError(f"trainer.val_check_interval {config.val_check_interval}: a number of steps, or a share of 1.0")
    plain = TrainerSettings()
    for name in UNREAD:
        if getattr(config, name) != getattr(plain, name):
            raise UserError(
                f"trainer.{name}: no key of radixtrain's loop; leave it out, or train a RadixModule with Lightning's "
                f"own trainer"
            )


def check_settings(settings: Run, command: str) -> None:
    """Raise UserError for a value that no run can use. settings: of the command, its classes described and not made."""
    for key, value in _parts("trainer", printed(settings.trainer)):
        check_unmasked(key, value)
    _check_devices(settings.trainer.devices)
    if command in WITHOUT_TRAINING:
        return
    from radixtrain.commands.export import check_hub  # here, since they bring Lightning
    from radixtrain.commands.loggers import TRACKING, check_loggers

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


def _parts(key: str, value: object) -> Iterator[tuple[str, Any]]:
    """Yield a value and all that it holds, with dotted keys; a class is named in the key of what it takes."""
    yield key, value
    if isinstance(value, Mapping):
        for name, part in value.items():
            yield from _parts(f"{key}.{name}", part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _parts(key, part)


def _check_devices(devices: object) -> None:
    """Refuse a large number before Lightning makes a list of that length, which would take all memory."""
    number = int(devices) if isinstance(devices, str) and devices.isdecimal() else devices
    if isinstance(number, int) and number > MOST_DEVICES:
        raise UserError(f"trainer.devices {number:,}: at most {MOST_DEVICES:,} on a machine")


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
    """Raise UserError if `trainer.val_check_interval` is longer than an epoch, or a time with several ranks."""
    interval = trainer.settings.val_check_interval
    if isinstance(interval, str | Mapping) and ranks().size > 1:
        raise UserError(
            "trainer.val_check_interval: a time works on one device only, since the clocks of several differ; set a "
            "number of steps"
        )
    if trainer.check_val_every_n_epoch is None or isinstance(interval, float) or not isinstance(interval, int):
        return
    limit = trainer.limit_train_batches
    length = min(steps_per_epoch, limit) if isinstance(limit, int) else int(steps_per_epoch * limit)
    if interval > length > 0:
        raise UserError(
            f"trainer.val_check_interval {interval}: an epoch has {length} steps; set a smaller one, or "
            f"trainer.check_val_every_n_epoch: null to count on over the epochs"
        )
