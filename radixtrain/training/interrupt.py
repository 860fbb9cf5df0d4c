"""SIGTERM: a checkpoint between two steps, so that a run that a scheduler takes down can go on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.utilities.exceptions import SIGTERMException

__all__ = ["SaveOnSigterm"]


class SaveOnSigterm(L.Callback):
    """Writes `interrupted.ckpt` behind the step during which SIGTERM arrived; Lightning stops after it.

    Saved where `ModelCheckpoint` saves, since the progress that Lightning stores is meant for that moment. A signal
    during validation finds no step to wait for, and is saved as it is.
    """

    def __init__(self, folder: Path):
        self.path = folder / "interrupted.ckpt"
        self.saved = False

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *_: Any) -> None:
        if trainer.received_sigterm:
            self._save(trainer)

    def on_exception(self, trainer: L.Trainer, module: L.LightningModule, exception: BaseException) -> None:
        if isinstance(exception, SIGTERMException) and trainer.global_step and not self.saved:
            self._save(trainer)

    def _save(self, trainer: L.Trainer) -> None:
        trainer.save_checkpoint(self.path)
        self.saved = True
