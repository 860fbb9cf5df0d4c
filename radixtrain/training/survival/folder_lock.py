"""One command at a time writes into a folder: a lock that the kernel releases when its process ends, however it does.

The lock is POSIX's, on a file that says who holds it. It belongs to one process: DataLoader workers do not inherit it,
so that they do not keep it when the process is killed.
"""

from __future__ import annotations

import fcntl
import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from radixtrain.errors import UserError

__all__ = ["locked", "locked_model"]

logger = logging.getLogger(__name__)

LOCK, MODEL_LOCK = ".lock", ".{}.lock"  # inside of a run's folder; beside a model, which is replaced as a whole
TAKEN = (BlockingIOError, PermissionError)  # POSIX allows both
_held: set[Path] = set()  # by this process: POSIX would grant it a second time, and closing one would release both


@contextmanager
def locked(output_dir: Path, command: str) -> Iterator[None]:
    """Inside, no other command of radixtrain writes into a run's folder, which is made, or into its `model/`.

    Raises UserError if another process has the lock; it names the process, its command and when it started. A folder
    that is made and still empty at the end is removed again.
    """
    model = output_dir / "model"
    model_lock = output_dir / MODEL_LOCK.format(model.name)
    with _made(output_dir), _lock(output_dir / LOCK, output_dir, command), _lock(model_lock, model, command):
        yield


@contextmanager
def locked_model(folder: Path, command: str) -> Iterator[None]:
    """Inside, no other command replaces the model in this folder, as a run would its own. Otherwise as `locked`."""
    target = folder.resolve()
    with _made(target.parent), _lock(target.parent / MODEL_LOCK.format(target.name), folder, command):
        yield


@contextmanager
def _lock(path: Path, folder: Path, command: str) -> Iterator[None]:
    path = path.resolve()
    descriptor = _acquire(path, folder)
    _held.add(path)
    try:
        os.ftruncate(descriptor, 0)
        os.write(descriptor, _holder(command).encode())
        yield
    finally:
        _held.discard(path)
        path.unlink(missing_ok=True)
        os.close(descriptor)


def _acquire(path: Path, folder: Path) -> int:
    """An open file that this process has locked, and that is still the one of this name."""
    if path in _held:
        raise UserError(_taken(folder, "this process"))
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except TAKEN:
            holder = os.pread(descriptor, 1000, 0).decode(errors="replace").strip()
            os.close(descriptor)
            raise UserError(_taken(folder, holder or "another process")) from None
        except OSError as error:
            logger.warning("%s cannot be locked here (%s); start no second command in it", folder, error.strerror)
        if _is_named(descriptor, path):
            return descriptor
        os.close(descriptor)  # its previous holder removed it in between


def _is_named(descriptor: int, path: Path) -> bool:
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(descriptor), path.stat())
    return False


def _holder(command: str) -> str:
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    return f"`radixtrain {command}`, process {os.getpid()} on {socket.gethostname()}, since {since}\n"


def _taken(folder: Path, holder: str) -> str:
    return f"{folder} is in use by {holder}; wait until it ends, or set another output_dir"


@contextmanager
def _made(folder: Path) -> Iterator[None]:
    """Makes the folder and those above it; those that are empty at the end are removed."""
    new = [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    finally:
        with suppress(OSError):  # not empty
            for each in new:
                each.rmdir()
