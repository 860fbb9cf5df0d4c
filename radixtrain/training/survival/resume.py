"""A run goes on: from the position of a checkpoint, with the settings of now.

A setting that is not what it was is applied, and said, or refused. None is ignored.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from radixtrain.errors import UserError
from radixtrain.training.optimizer import epoch_length, num_steps_of_run, set_hyperparameters
from radixtrain.training.survival.changed_settings import with_effect
from radixtrain.training.survival.position import Position, check_not_beyond
from radixtrain.tree.cost_model import Rates

__all__ = ["apply_settings", "restore_position", "restored_rates"]

logger = logging.getLogger(__name__)


def restored_rates(checkpoint: Mapping[str, Any]) -> Rates | None:
    """The calibration that the run chose by; None if the checkpoint has none."""
    rates = checkpoint.get("radixtrain_rates")
    return None if rates is None else Rates.from_dict(rates)


def restore_position(checkpoint: dict[str, Any], module: Any) -> None:
    """Give the module its position and the count of skipped steps, and Lightning the state of its loops.

    Called before Lightning reads the loops and callbacks of the checkpoint, which are changed here: it forgets the time
    that the run had taken, since `trainer.max_time` is that of each start.

    Raises UserError if the data are others, an epoch has another number of steps than before, or more steps or epochs
    were taken than this run has.
    """
    state, callbacks = checkpoint.get("radixtrain", {}), checkpoint.get("callbacks", {})
    for name in [name for name in callbacks if name.startswith("Timer")]:
        del callbacks[name]
    module.position = Position.of(checkpoint)
    module.guard.load_state_dict(state.get("skipped", module.guard.state_dict()))
    length = epoch_length(module.trainer, module.steps_per_epoch)
    if length:
        _check_same_data(checkpoint, module.trainer.datamodule)
        _check_epoch_length(state.get("epoch_length"), length)
        check_not_beyond(module.trainer, module.position, length)
        checkpoint["loops"]["fit_loop"] = module.position.loops(length)


def apply_settings(checkpoint: Mapping[str, Any], module: Any) -> None:
    """Give optimizer and schedule the settings of this run, and say which are not those of the checkpoint.

    Called when Lightning has restored both. The learning rate is that of the schedule at this step, as if the run had
    had these settings from the beginning.
    """
    trainer = module.trainer
    num_steps = num_steps_of_run(trainer, module.steps_per_epoch)
    optimizer, scheduler = trainer.optimizers[0], trainer.lr_scheduler_configs[0].scheduler
    set_hyperparameters(optimizer, scheduler, module, module.hparams)
    state, step = checkpoint.get("radixtrain", {}), Position.of(checkpoint).num_steps
    data = getattr(trainer.datamodule, "hparams", {})
    changed = [
        *with_effect("model", checkpoint.get("hyper_parameters", {}), module.hparams),
        *with_effect("data", checkpoint.get("datamodule_hyper_parameters", {}), data),
        *with_effect("", state.get("settings", {}), module.run_settings),
    ]
    if state.get("precision", str(trainer.precision)) != str(trainer.precision):
        changed.append(f"trainer.precision was {state['precision']} and is {trainer.precision}")
    if state.get("num_steps") not in (None, num_steps):
        changed.append(f"the run had {_number(state['num_steps'])} steps and has {_number(num_steps)}")
    rate = optimizer.param_groups[0]["lr"]
    logger.info("goes on after step %s, with a learning rate of %.3g", f"{step:,}", rate)
    if changed:
        logger.warning("from step %s on other settings: %s", f"{step:,}", "; ".join(changed))


def _check_same_data(checkpoint: Mapping[str, Any], data: Any) -> None:
    """Lightning does this after the model is restored: too late, since other data have epochs of another length."""
    if (state := checkpoint.get(type(data).__qualname__)) is not None:
        data.load_state_dict(state)


def _check_epoch_length(was: int | None, length: int) -> None:
    if was not in (None, length):
        raise UserError(
            f"ckpt_path: an epoch of the run had {was:,} steps and has {length:,} here; set "
            f"trainer.limit_train_batches and trainer.overfit_batches as they were"
        )


def _number(steps: int) -> str:
    return f"{steps:,}" if steps >= 0 else "endless"
