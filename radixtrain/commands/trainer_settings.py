"""Refuses, naming the key, settings that would change a step, and values of the right type that no run can use."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from radixtrain.commands import WITHOUT_TRAINING
from radixtrain.commands.reading import printed
from radixtrain.distributed import ranks
from radixtrain.errors import UserError, first_line
from radixtrain.redaction import check_unmasked
from radixtrain.settings.commands import Run
from radixtrain.settings.trainer import TrainerSettings
from radixtrain.training.optimizer import check_package

if TYPE_CHECKING:
    import lightning as L


logger = logging.getLogger(__name__)

UNREAD = (
    *("callbacks", "min_epochs", "min_steps", "profiler", "plugins", "sync_batchnorm", "model_registry"),
    "reload_dataloaders_every_n_epochs",
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
    check_precision(config.precision)


def check_runnable(config: TrainerSettings) -> None:
    """Raise UserError for keys of Lightning's trainer that the loop of `fit` does not read."""
    plain = TrainerSettings()
    for name in UNREAD:
        if getattr(config, name) != getattr(plain, name):
            raise UserError(
                f"trainer.{name}: no key of radixtrain's loop; leave it out, or train a RadixModule with Lightning's "
                f"own trainer"
            )


def check_precision(precision: object) -> None:
    """Raise UserError for float16. precision: of the configuration, or of the trainer (a plugin may set it)."""
    if str(precision) in ("16", "16-mixed", "16-true"):
        raise UserError(f"trainer.precision {precision}: float16 needs a loss scale; use bf16-mixed or 32-true")


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
    from lightning.pytorch.callbacks import Timer
    from lightning.pytorch.utilities.exceptions import MisconfigurationException

    try:
        Timer(max_time)
    except (MisconfigurationException, ValueError, TypeError, OverflowError) as error:
        raise UserError(
            f"trainer.max_time must be DD:HH:MM:SS, or a mapping such as {{hours: 2}}; got {max_time} "
            f"({first_line(error)})"
        ) from None


def check_interval(trainer: L.Trainer, steps_per_epoch: int) -> None:
    """Raise UserError if `trainer.val_check_interval` is longer than an epoch, or a time with several ranks.

    Lightning has each rank read its own clock, and ranks that do not agree wait for each other until one gives up.
    """
    interval = getattr(trainer, "val_check_interval", None)  # none if it is a time
    if interval is None and ranks().size > 1:
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
