"""Lightning's checkpoints as the folders of `radixtrain/checkpoints`, whoever asks for one: our saver or a callback."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.fabric.plugins import CheckpointIO

from radixtrain.checkpoints.folder import read_checkpoint, write_checkpoint
from radixtrain.checkpoints.replacing import remove
from radixtrain.errors import UserError

__all__ = ["FolderCheckpointIO"]


class FolderCheckpointIO(CheckpointIO):
    """Writes a folder whatever its name is, such as `x.ckpt`; reads one, or a `.ckpt` file of an earlier version."""

    def save_checkpoint(
        self, checkpoint: Mapping[str, Any], path: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """UserError if it cannot be written; the one that was there is whole then."""
        if storage_options is not None:
            raise UserError("storage_options: a checkpoint is written to a local disk")
        write_checkpoint(_local(path), checkpoint)

    def load_checkpoint(
        self, path: str | os.PathLike[str], map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """The state, on the CPU. No code in it is run, whatever `weights_only` says.

        Raises UserError if there is none, DamagedCheckpoint if it is not whole.
        """
        return read_checkpoint(_local(path))

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Delete it so that no part of it is ever found under its name."""
        remove(_local(path))


def _local(path: str | os.PathLike[str]) -> Path:
    if "://" in str(path):
        raise UserError(f"{path}: checkpoints are written to a local disk; name a folder")
    return Path(path)
