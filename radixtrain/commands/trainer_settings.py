"""Settings that would change a step, and values of the right type that no run can use: refused by the key's name."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterator, Mapping
from pkgutil import resolve_name
from typing import Any

from jsonargparse import Namespace
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.callbacks import Callback, Timer
from lightning.pytorch.callbacks.finetuning import multiplicative
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins import CheckpointIO, ClusterEnvironment, LayerSync, Precision
from lightning.pytorch.profilers import Profiler
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from radixtrain.commands.hub import check_hub
from radixtrain.commands.keys import keys_of, trainer_keys
from radixtrain.commands.loggers import TRACKING, check_loggers
from radixtrain.distributed import ranks
from radixtrain.errors import UsageError, UserError, first_line
from radixtrain.redaction import check_unmasked
from radixtrain.training.optimizer import check_package
from radixtrain.yaml_text import PACKAGES

logger = logging.getLogger(__name__)

# What Lightning raises for settings that it refuses: in turn for `devices: 0`, `strategy: nonsense`, `devices: -1` on a
# CPU, and `strategy: xla` without torch_xla. Nothing of ours runs while it makes the trainer.
REFUSED_BY_LIGHTNING = (MisconfigurationException, ValueError, TypeError, ModuleNotFoundError, OverflowError)
# The least value of integers. All but those in NEVER_NULL may be null, which turns off what the key says.
LEAST = {
    "save_every_steps": 1,
    "save_total_limit": 1,
    "early_stopping": 1,
    "sp_size": 1,
    "ddp_timeout": 1,
    "trainer.check_val_every_n_epoch": 1,
    "trainer.log_every_n_steps": 0,
    "trainer.reload_dataloaders_every_n_epochs": 0,
}
# A configuration makes objects of these classes only, and hands no function over: any other could run code, as
# `torch.hub.load` and `transformers.pipeline` do. The one function is the default of a callback.
CLASSES = (Callback, Logger, Profiler, Strategy, Accelerator, Precision, CheckpointIO, ClusterEnvironment, LayerSync)
FUNCTIONS = (multiplicative,)
FOR_ALL_WEIGHTS = 2e-5  # the default learning rate, and that of configs/sft.yaml
MOST_DEVICES = 1_000
MOST_SECONDS = 2_000_000  # gloo counts milliseconds in 32 bits
NEVER_NULL = ("save_total_limit", "sp_size", "ddp_timeout")
ABOVE_ZERO = ("save_every_minutes", "trainer.val_check_interval")


def check_trainer_settings(config: Any) -> None:
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


def check_settings(settings: Any, command: str) -> None:
    """UserError for a value that no run can use. settings: of the command, as they were parsed, nothing made yet."""
    for key, value in _parts("", settings):
        _check_object(key, value)
        check_unmasked(key, value)
    check_seed(settings.seed_everything)
    check_limits(settings)
    _check_weights_only(settings)
    if command in TRACKING:
        check_loggers(settings)
    if command == "fit":
        check_package(settings.model.optimizer)
        check_hub(settings.push_to_hub, settings.hub_model_id)
    if command == "fit" and settings.model.use_peft and settings.model.learning_rate == FOR_ALL_WEIGHTS:
        logger.warning(
            "model.learning_rate is %g, as for training all weights; LoRA wants 1e-4 to 2e-4", FOR_ALL_WEIGHTS
        )


def _parts(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    """A value and all that it holds, with dotted keys; a class is named in the key of what it takes."""
    yield key, value
    if isinstance(value, Namespace | Mapping):
        parts = vars(value) if isinstance(value, Namespace) else value
        for name, part in parts.items():
            yield from _parts(f"{key}.{name}".lstrip("."), part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _parts(key, part)


def _check_object(key: str, value: Any) -> None:
    """UsageError for a class that is no part of a trainer, and for a function."""
    if callable(value) and value not in FUNCTIONS and not isinstance(value, (*CLASSES, os.PathLike)):
        name = f"{value.__module__}.{value.__qualname__}" if hasattr(value, "__qualname__") else str(value)
        raise UsageError(f"{key}: {name} is a function or a class, which a configuration cannot hand over")
    path = value.get("class_path") if isinstance(value, Namespace) else None
    if path is None:
        return
    kind = resolve_name(str(path)) if str(path).partition(".")[0] in PACKAGES else None
    if not (isinstance(kind, type) and issubclass(kind, CLASSES)):
        raise UsageError(
            f"{key}: class_path {path!r} is not made: expected a subclass of "
            f"{' or '.join(each.__name__ for each in CLASSES)}; for anything else, call radixtrain from your own script"
        )


def check_seed(seed: Any) -> None:
    if isinstance(seed, int) and not isinstance(seed, bool) and not 0 <= seed < 2**32:
        raise UserError(f"seed_everything must be from 0 to {2**32 - 1}, got {seed}")


def _check_weights_only(config: Any) -> None:
    """Lightning's key of this name lets a checkpoint run code. config: of the command."""
    if config.get("weights_only") is False:
        raise UserError("weights_only: false would run code from a checkpoint; radixtrain always reads it as data")


def data_seed(seed: Any) -> int:
    """Of the order of the rows. `seed_everything` may be true or false."""
    return seed if isinstance(seed, int) and not isinstance(seed, bool) else 42


def check_limits(config: Any) -> None:
    """UserError for a null that a key does not take, and for a number that is too small or not finite.

    config: of a command of Lightning.
    """
    _check_nulls(config)
    for key, least in LEAST.items():
        value = config.get(key)
        if value not in (None, "auto") and value < least:
            also = ", or auto" if key == "sp_size" else "" if key in NEVER_NULL else ", or null"
            raise UserError(f"{key} must be at least {least}{also}; got {value}")
    if (config.get("ddp_timeout") or 0) > MOST_SECONDS:
        raise UserError(f"ddp_timeout must be at most {MOST_SECONDS:,} seconds; got {config.ddp_timeout}")
    for key in ABOVE_ZERO:
        value = config.get(key)
        if isinstance(value, int | float) and not (0 < value < math.inf):
            raise UserError(f"{key} must be above 0, or null; got {value}")
    _check_devices(config.get("trainer.devices"))
    _check_max_time(config.get("trainer.max_time"))


def _check_nulls(config: Any) -> None:
    """jsonargparse takes null for every key, whatever its type."""
    for key in (*keys_of("fit"), *trainer_keys()):
        takes_null = key.default in (None, "", "null") or "null" in key.kind or "Optional" in key.kind
        if not takes_null and key.name in config and config[key.name] is None:
            raise UserError(f"{key.name}: expected {key.kind}, got null; without the key it is {key.default}")


def _check_devices(devices: Any) -> None:
    """Before Lightning makes a list of them, for which a large number takes all memory."""
    number = int(devices) if isinstance(devices, str) and devices.isdecimal() else devices
    if isinstance(number, int) and number > MOST_DEVICES:
        raise UserError(f"trainer.devices {number:,}: at most {MOST_DEVICES:,} on a machine")


def _check_max_time(max_time: Any) -> None:
    try:
        Timer(max_time)
    except (MisconfigurationException, ValueError, TypeError, OverflowError) as error:
        raise UserError(
            f"trainer.max_time must be DD:HH:MM:SS, or a mapping such as {{hours: 2}}; got {max_time} "
            f"({first_line(error)})"
        ) from None


def check_interval(trainer: Any, steps_per_epoch: int) -> None:
    """UserError if `trainer.val_check_interval` is longer than an epoch that ends its count, or several ranks' time.

    Lightning has each rank ask its own clock, and ranks that do not agree wait for each other until one gives up.
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
