"""A run that `trainer.max_time` ends: without the validation that Lightning adds at such an end.

An uninterrupted run has no validation there. It would count for `save_best` and `early_stopping`, so that a run that
was stopped and goes on would end with other weights; and it takes time that the run does not have.
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch.callbacks import Timer

from radixtrain.distributed import ranks

__all__ = ["is_out_of_time", "leave_out_added_validation"]


def leave_out_added_validation(trainer: Any) -> None:
    """Call it after a step, when Lightning's timer has looked at the clock. A validation that is due here takes place.

    All ranks do the same, by the clock of rank 0.
    """
    if not trainer.should_stop or not ranks().any(ranks().is_first and any(map(is_out_of_time, trainer.callbacks))):
        return
    loop = trainer.fit_loop
    trainer.should_stop = False
    is_due = loop.epoch_loop._should_check_val_fx(loop._data_fetcher)
    trainer.should_stop = True
    loop.epoch_loop._skip_next_val = not is_due


def is_out_of_time(callback: Any) -> bool:
    """Whether it is a timer, such as that of `trainer.max_time`, and its time has passed."""
    left = callback.time_remaining() if isinstance(callback, Timer) else None
    return left is not None and left <= 0
