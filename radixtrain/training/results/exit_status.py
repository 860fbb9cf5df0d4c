"""Why a run ended, in words, and whether anything is left to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lightning.pytorch.callbacks import EarlyStopping

from radixtrain.errors import first_line
from radixtrain.training.fault_tolerance.position import is_out_of_time
from radixtrain.training.optimizer import epoch_length, num_steps_of_run
from radixtrain.training.results.best import StopEarly


@dataclass(frozen=True)
class ExitStatus:
    """reason: max_steps, max_epochs, early_stopping, max_time or callback; the type of an error. text: for people.
    is_complete: nothing is left to do.
    """

    reason: str
    text: str
    is_complete: bool


def status_of_run(trainer: Any, module: Any, first_step: int, has_checkpoint: bool) -> ExitStatus:
    """Of a `fit` that returned.

    module: a `RadixModule`. first_step: optimizer steps that were taken before this process.
    has_checkpoint: whether the run can be resumed.
    """
    step, is_new = trainer.global_step, trainer.global_step > first_step
    total = num_steps_of_run(trainer, module.steps_per_epoch)
    at = f"step {step:,} of {total:,}" if total >= 0 else f"step {step:,}"
    if limit := _limit_reached(trainer, module):
        if is_new:
            text = f"{at}: trainer.{limit} {getattr(trainer, limit)} reached"
        elif not total:
            name = limit if getattr(trainer, limit) == 0 else "limit_train_batches"
            text = f"no step to take: trainer.{name} is {getattr(trainer, name)}"
        else:
            text = f"nothing left to do: {at} was reached before; raise trainer.{limit} to go on"
        return ExitStatus(limit, text, is_complete=True)
    if why := next(filter(None, map(_why_early, trainer.callbacks)), ""):
        text = f"stopped early at {at}: {why}"
        if not is_new:
            text = f"nothing left to do: {text}; raise early_stopping to go on"
        return ExitStatus("early_stopping", text, is_complete=True)
    reason = "max_time" if any(map(is_out_of_time, trainer.callbacks)) else "callback"
    by = "trainer.max_time" if reason == "max_time" else "a callback"
    how = "go on with --ckpt_path last" if has_checkpoint else "no checkpoint was written to go on from"
    return ExitStatus(reason, f"stopped by {by} at {at}; {how}", is_complete=False)


def status_of_error(error: BaseException) -> ExitStatus:
    """Of a `fit` that raised."""
    name = type(error).__name__
    text = first_line(error) if isinstance(error, Exception) else str(error) or name
    return ExitStatus(name, text, is_complete=False)


def _limit_reached(trainer: Any, module: Any) -> str:
    """`max_steps` or `max_epochs`; nothing if the run ended before either."""
    if 0 <= trainer.max_steps <= trainer.global_step:
        return "max_steps"
    length = epoch_length(trainer, module.steps_per_epoch)
    is_endless = length is None or trainer.max_epochs in (None, -1)
    return "" if is_endless or module.position.num_batches < length * trainer.max_epochs else "max_epochs"


def _why_early(callback: Any) -> str:
    """Why a callback has stopped the run early; nothing if it has not."""
    if isinstance(callback, StopEarly):
        return callback.why
    if isinstance(callback, EarlyStopping):
        return (callback.stopping_reason_message or "").removesuffix(" Signaling Trainer to stop.")
    return ""
