"""SIGTERM: a checkpoint between two steps, so that a run that a scheduler takes down can go on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.utilities.exceptions import SIGTERMException

__all__ = ["SaveOnSigterm"]


class SaveOnSigterm(L.Callback):
    """Writes `interrupted.ckpt` after the step during which SIGTERM arrived; Lightning stops after it.

    It is saved when `ModelCheckpoint` saves, since the progress that Lightning stores is meant for that moment. After a
    signal at the end of an epoch, the checkpoint is what it would be after a signal in the last step. A signal during
    validation has no step to wait for, and the state is saved as it is.
    """

    def __init__(self, folder: Path):
        self.path = folder / "interrupted.ckpt"
        self.saved = False

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *_: Any) -> None:
        if trainer.received_sigterm:
            self._save(trainer)

    def on_exception(self, trainer: L.Trainer, module: L.LightningModule, exception: BaseException) -> None:
        if isinstance(exception, SIGTERMException) and trainer.global_step and not self.saved:
            with _progress_at_last_step(trainer):
                self._save(trainer)

    def _save(self, trainer: L.Trainer) -> None:
        trainer.save_checkpoint(self.path)
        self.saved = True


@contextmanager
def _progress_at_last_step(trainer: L.Trainer) -> Iterator[None]:
    """Inside, if an epoch is over, Lightning's progress is what `on_train_batch_end` saw in its last step.

    A signal can arrive while `ModelCheckpoint` writes at the end of an epoch. Lightning (2.6.6) then raises after it
    has counted the epoch as completed. A run with `max_steps` that is resumed from these counts trains on other batches
    than one that was not interrupted.
    """
    loop = trainer.fit_loop.epoch_loop
    epochs: Any = trainer.fit_loop.epoch_progress
    is_over = 0 < epochs.current.started == epochs.current.completed
    counts: list[tuple[Any, str]] = [
        *((progress, name) for progress in (epochs.current, epochs.total) for name in ("processed", "completed")),
        *((progress, "completed") for progress in (loop.batch_progress.current, loop.batch_progress.total)),
        (loop, "_batches_that_stepped"),
    ]
    for place, name in counts:
        setattr(place, name, getattr(place, name) - is_over)
    try:
        yield
    finally:
        for place, name in counts:
            setattr(place, name, getattr(place, name) + is_over)
