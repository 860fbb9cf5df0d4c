"""The position of a run between two optimizer steps, and how Lightning's loops are set to resume there.

Lightning keeps a dozen counters. They are right for a resume only if a checkpoint is written in one of a few hooks, and
not after every kind of stop. Here a checkpoint keeps three numbers, and the counters are made from them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Timer

from radixtrain.distributed import ranks
from radixtrain.errors import UserError


@dataclass(frozen=True)
class Position:
    """A position between two optimizer steps.

    num_batches: DataLoader items that were trained on, over all epochs.
    num_steps: optimizer steps among them; a step that was skipped is an item without one.
    validation_pending: whether a validation was due here and has not been finished.
    """

    num_batches: int
    num_steps: int
    validation_pending: bool = False

    def __post_init__(self) -> None:
        if min(self.num_steps, self.num_batches) < 0:
            raise UserError(f"ckpt_path: {self.num_steps} steps after {self.num_batches} batches, as no run has taken")

    def loops(self, epoch_length: int) -> dict[str, Any]:
        """Return the state of Lightning's (2.6.6) fit loop at this position. epoch_length: batches in an epoch.

        Inside an epoch it is the state in `on_train_batch_end`, from which Lightning continues with the next
        batch; at the end of an epoch it is the state before the next one begins.
        """
        epoch, inside = divmod(self.num_batches, epoch_length)
        is_inside = int(inside > 0)
        steps = {"ready": self.num_steps, "completed": self.num_steps}
        epochs = {**_counts(epoch + is_inside), "processed": epoch, "completed": epoch}
        return {
            "state_dict": {"combined_loader": [{"handed_out": inside}]},
            "epoch_progress": {"total": dict(epochs), "current": dict(epochs)},
            "epoch_loop.state_dict": {"_batches_that_stepped": self.num_batches - is_inside},
            "epoch_loop.batch_progress": {
                "total": {**_counts(self.num_batches), "completed": self.num_batches - is_inside},
                "current": {**_counts(inside), "completed": inside - is_inside},
                "is_last_batch": False,
            },
            "epoch_loop.manual_optimization.optim_step_progress": {"total": dict(steps), "current": dict(steps)},
        }


def check_not_beyond(trainer: L.Trainer, position: Position, epoch_length: int) -> None:
    """Raise UserError if more steps or epochs were taken than this run has."""
    epochs = -(-position.num_batches // epoch_length)
    for name, taken, limit in (
        ("max_steps", position.num_steps, trainer.max_steps),
        ("max_epochs", epochs, trainer.max_epochs),
    ):
        if limit not in (None, -1) and taken > limit:
            what = name.removeprefix("max_")
            raise UserError(
                f"ckpt_path: {taken:,} {what} were begun, and trainer.{name} is {limit:,}; raise it to continue"
            )


def sync_loop_counters(trainer: L.Trainer) -> None:
    """Mark the epoch as not restarted when training starts, after Lightning has restored its loops.

    Otherwise a run with `max_steps` spends its first loop iteration on finding that out, and logs it as a step.
    """
    loop = trainer.fit_loop.epoch_loop
    if loop.batch_progress.current.ready == 0:
        loop.restarting = False


def run_pending_validation(module: Any) -> None:
    """Run the validation that was due when the checkpoint was written, as the epoch loop would have run it.

    module: a `RadixModule`, in whose position it is pending.
    """
    trainer = module.trainer
    if not isinstance(trainer, L.Trainer):
        trainer.validate_pending()
        return
    loop = trainer.fit_loop.epoch_loop
    loop.val_loop.restarting = False
    trainer.validating = True
    loop.val_loop.run()
    trainer.training = True
    module.position = replace(module.position, validation_pending=False)


def _counts(number: int) -> dict[str, int]:
    return {"ready": number, "started": number, "processed": number, "completed": number}


def leave_out_added_validation(trainer: Any) -> None:
    """Drop the validation that Lightning's timer adds. Call it after a step, when the timer has looked at the clock.

    All ranks follow the clock of rank 0.
    """
    if not isinstance(trainer, L.Trainer):
        return
    if not trainer.should_stop or not ranks().any(ranks().is_first and any(map(is_out_of_time, trainer.callbacks))):
        return
    loop = trainer.fit_loop
    trainer.should_stop = False
    is_due = loop.epoch_loop._should_check_val_fx(loop._data_fetcher)
    trainer.should_stop = True
    loop.epoch_loop._skip_next_val = not is_due


def is_out_of_time(callback: object) -> bool:
    """Return whether a callback is a timer, such as that of `trainer.max_time`, whose time has passed."""
    left = callback.time_remaining() if isinstance(callback, Timer) else None
    return left is not None and left <= 0
