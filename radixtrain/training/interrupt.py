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

    Saved where `ModelCheckpoint` saves, since the progress that Lightning stores is meant for that moment. A signal
    that arrives at the end of an epoch is saved as if it had come in its last step. A signal during validation finds no
    step to wait for, and is saved as it is.
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
    """Of an epoch that is over: Lightning's progress as `on_train_batch_end` saw it in the last step.

    Lightning (2.6.6) raises after it has counted the epoch as completed, while `ModelCheckpoint` may write for longer
    than a step takes. Resumed from these counts, a run that is limited by steps trains on other batches than one that
    was not interrupted.
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
