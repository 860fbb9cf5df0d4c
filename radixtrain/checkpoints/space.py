"""A checkpoint that cannot be written, in the user's words: which disk, what it needs, what is free, the way out."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from radixtrain.checkpoints.manifest import committed
from radixtrain.errors import UserError

MARGIN = 1 << 20  # bytes, for the skeleton, the manifest and the names
FULL = (errno.ENOSPC, errno.EDQUOT)


def check_space(target: Path, num_bytes: int) -> None:
    """UserError if the disk of `target` has less room than that. Another checkpoint of that name stays meanwhile."""
    if _free(target) < num_bytes + MARGIN:
        raise _no_room(target, num_bytes)


@contextmanager
def explained(target: Path, num_bytes: int) -> Iterator[None]:
    """An OSError inside, while a checkpoint of that size is written, becomes a UserError."""
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            raise _no_room(target, num_bytes) from error
        reason = error.strerror or str(error)
        if error.errno == errno.EFBIG:
            reason = f"it needs {_bytes_text(num_bytes)}, and files may not become that large (ulimit -f)"
        message = f"the checkpoint {target} cannot be written: {reason}; {_way_out(target, 'fix that')}"
        raise UserError(message) from error


def _no_room(target: Path, num_bytes: int) -> UserError:
    return UserError(
        f"no room for the checkpoint {target}: it needs {_bytes_text(num_bytes)}, and the disk at "
        f"{mount_point(target.parent)} has {_bytes_text(_free(target))} free; "
        f"{_way_out(target, 'free some space there')}"
    )


def _free(target: Path) -> int:
    return shutil.disk_usage(existing(target.parent)).free


def _way_out(target: Path, advice: str) -> str:
    whole = [path for manifest, path in committed(target.parent) if manifest.has_its_sizes(path)]
    if not whole:
        return f"{advice} or set another output_dir, then start again: there is no earlier checkpoint"
    return f"{advice}, then resume with --ckpt_path {whole[0]}, the last whole one"


def existing(path: Path) -> Path:
    """The path, or the nearest folder above it that exists."""
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path


def mount_point(path: Path) -> Path:
    """The root of the disk that holds the path, or will hold it."""
    folder = existing(path).resolve()
    while not os.path.ismount(folder):
        folder = folder.parent
    return folder


def _bytes_text(number: int) -> str:
    return f"{number / 2**30:,.2f} GiB" if number >= 2**30 else f"{number / 2**20:,.1f} MiB"
