"""`.ckpt` files, which earlier versions wrote: a zip archive of torch, whose checksums are those of the archive."""

from __future__ import annotations

import pickle
import zipfile
from pathlib import Path
from typing import Any

import torch

from radixtrain.checkpoints.manifest import DamagedCheckpoint
from radixtrain.errors import first_line

__all__ = ["read_legacy", "verify_legacy"]


def read_legacy(path: Path) -> dict[str, Any]:
    """The state in the file, its tensors on the CPU. DamagedCheckpoint if it is not whole, or would run code."""
    verify_legacy(path)
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:  # torch's own message advises to run it
        raise _damaged(path, "it holds what only code can make, and no code in a checkpoint is run") from error
    except Exception as error:  # torch raises many kinds for what is no checkpoint
        raise _damaged(path, f"it cannot be loaded ({first_line(error)})") from error
    if not isinstance(state, dict):
        raise _damaged(path, "it holds no dictionary")
    return state


def verify_legacy(path: Path) -> None:
    """DamagedCheckpoint unless it is an archive of torch in which every entry has its checksum. Reads all of it."""
    try:
        with zipfile.ZipFile(path) as archive:
            if not any(name.endswith("/data.pkl") for name in archive.namelist()):
                raise _damaged(path, "it is no file of torch")
            changed = archive.testzip()
    except OSError as error:
        raise _damaged(path, f"cannot be read: {error.strerror or error}") from error
    except (zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError, ValueError) as error:
        raise _damaged(path, f"it was not written to its end, or is no checkpoint ({first_line(error)})") from error
    if changed is not None:
        raise _damaged(path, f"the checksum of {changed} is not the one in it")


def _damaged(path: Path, reason: str) -> DamagedCheckpoint:
    return DamagedCheckpoint(path, "the file", f"is damaged: {reason}")
