"""Why a run ended, and whether anything of it is left."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lightning.pytorch.callbacks import EarlyStopping

from radixtrain.errors import first_line
from radixtrain.training.fault_tolerance.position import is_out_of_time
from radixtrain.training.optimizer import epoch_length, num_steps_of_run
from radixtrain.training.results.best import StopEarly

__all__ = ["Ending", "ending_by_error", "ending_of"]


@dataclass(frozen=True)
class Ending:
    """reason: max_steps, max_epochs, early_stopping, max_time or callback; the type of an error. text: for people.
    is_complete: nothing is left to do.
    """

    reason: str
    text: str
    is_complete: bool


def ending_of(trainer: Any, module: Any, first_step: int, has_checkpoint: bool) -> Ending:
    """Of a `fit` that returned.

    module: a `RadixModule`. first_step: optimizer steps that were taken before this process.
    has_checkpoint: whether the run can go on from one.
    """
    step, is_new = trainer.global_step, trainer.global_step > first_step
    total = num_steps_of_run(trainer, module.steps_per_epoch)
    place = f"step {step:,} of {total:,}" if total >= 0 else f"step {step:,}"
    limit = _limit_reached(trainer, module)
    if limit and is_new:
        return Ending(limit, f"{place}: trainer.{limit} {getattr(trainer, limit)} reached", is_complete=True)
    if limit and not total:
        return Ending(limit, f"no step to take: {_why_none(trainer, limit)}", is_complete=True)
    if limit:
        text = f"nothing left to do: {place} was reached before; raise trainer.{limit} to go on"
        return Ending(limit, text, is_complete=True)
    if why := next(filter(None, map(_why_early, trainer.callbacks)), ""):
        text = f"stopped early at {place}: {why}"
        if not is_new:
            text = f"nothing left to do: {text}; raise early_stopping to go on"
        return Ending("early_stopping", text, is_complete=True)
    reason = "max_time" if any(map(is_out_of_time, trainer.callbacks)) else "callback"
    by = "trainer.max_time" if reason == "max_time" else "a callback"
    how = "go on with --ckpt_path last" if has_checkpoint else "no checkpoint was written to go on from"
    return Ending(reason, f"stopped by {by} at {place}; {how}", is_complete=False)


def ending_by_error(error: BaseException) -> Ending:
    """Of a `fit` that raised: a signal, a request to stop, or anything else."""
    name = type(error).__name__
    text = first_line(error) if isinstance(error, Exception) else str(error) or name
    return Ending(name, text, is_complete=False)


def _limit_reached(trainer: Any, module: Any) -> str:
    """`max_steps` or `max_epochs`; nothing if the run ended before either."""
    if 0 <= trainer.max_steps <= trainer.global_step:
        return "max_steps"
    length = epoch_length(trainer, module.steps_per_epoch)
    is_endless = length is None or trainer.max_epochs in (None, -1)
    return "" if is_endless or module.position.num_batches < length * trainer.max_epochs else "max_epochs"


def _why_none(trainer: Any, limit: str) -> str:
    """Why a run has no steps at all. limit: the one that it reaches with none."""
    name = limit if getattr(trainer, limit) == 0 else "limit_train_batches"
    return f"trainer.{name} is {getattr(trainer, name)}"


def _why_early(callback: Any) -> str:
    """Why a callback has stopped the run early; nothing if it has not."""
    if isinstance(callback, StopEarly):
        return callback.why
    if isinstance(callback, EarlyStopping):
        return (callback.stopping_reason_message or "").removesuffix(" Signaling Trainer to stop.")
    return ""
