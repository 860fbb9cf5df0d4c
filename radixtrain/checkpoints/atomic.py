"""Replaces a folder by another one, so that a kill at any moment leaves the old one or the new one, whole.

Beside the folder `X` there may be, for as long as a process is at work, or after it was killed:

    .X.partial     being written, or about to be deleted: never looked at
    .X.replaced    the previous `X`, on disks where two folders cannot be exchanged in one step; while `X` is absent it
                   counts as `X`

A file is replaced only if radixtrain has written it: `.radixtrain_files` lists those of its folder.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from radixtrain.errors import UserError, only_warns
from radixtrain.text_files import read_text

WRITTEN = ".radixtrain_files"
PARTIAL, REPLACED = "partial", "replaced"
AT_FDCWD, EXCHANGE = -100, 2  # of linux/fcntl.h and linux/fs.h
NOT_EXCHANGED = {errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EPERM}  # the system or disk cannot exchange


@contextmanager
def writing(target: Path) -> Iterator[Path]:
    """Yield an empty folder beside `target`, which replaces it at the end of the context; if that fails, it is removed.

    Everything in it is on the disk before that. Raises OSError if the disk is full, or anything else is wrong.
    """
    staging = _beside(target, PARTIAL)
    recover(target)
    delete(staging)
    staging.mkdir(parents=True)
    try:
        yield staging
        _sync_all(staging)
        _publish(staging, target)
    except BaseException:
        delete(staging)
        raise
    with only_warns(f"the previous {target} cannot be deleted"):
        delete(staging)  # the previous target, if they were exchanged
        delete(_beside(target, REPLACED))


@contextmanager
def writing_file(target: Path) -> Iterator[Path]:
    """Yield an empty file beside one that can be made again, to fill: nothing waits for the disk.

    Raises UserError as `check_replaceable` does.
    """
    check_replaceable(target)
    staging = new_file(_beside(target, PARTIAL))
    try:
        yield staging
        place(staging, target)
    finally:
        staging.unlink(missing_ok=True)


def check_replaceable(target: Path) -> None:
    """Raise UserError if something of this name is there that radixtrain has not written."""
    if os.path.lexists(target) and not is_written(target):
        raise UserError(f"{target} is there and radixtrain did not write it: move it away, or choose another folder")


def is_written(target: Path) -> bool:
    """Return whether radixtrain has written a file of this name in its folder."""
    try:
        return target.name in read_text(target.with_name(WRITTEN)).splitlines()
    except (OSError, ValueError):
        return False


def place(staging: Path, target: Path) -> None:
    """Give a finished file its name, and note in its folder that radixtrain has written it."""
    if not is_written(target):
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK
        with suppress(OSError), open(os.open(target.with_name(WRITTEN), flags, 0o666), "a", encoding="utf-8") as file:
            file.write(f"{target.name}\n")
    os.replace(staging, target)


def new_file(path: Path) -> Path:
    """Make an empty file at the path. Others may write to the folder: no link of theirs is followed."""
    path.unlink(missing_ok=True)
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
    return path


def remove(target: Path) -> None:
    """Delete a folder, a file or a link, so that no part of it is ever found under its name."""
    doomed = _beside(target, PARTIAL)
    delete(doomed)
    if os.path.lexists(target):
        target.rename(doomed)
    delete(doomed)
    delete(_beside(target, REPLACED))


def current_path(target: Path) -> Path:
    """Return where the folder is: under another name if a process was killed while it replaced it."""
    if not target.name:  # `.` and `/` cannot be replaced
        return target
    replaced = _beside(target, REPLACED)
    return replaced if replaced.exists() and not target.exists() else target


def set_aside(path: Path) -> bool:
    """Return whether it is the `.X.replaced` of an `X` that is absent."""
    return path.suffix == f".{REPLACED}" and current_path(_shown(path)) == path


def recover(target: Path) -> None:
    """Put the folder back that a killed process was replacing. Only one process may do so at a time."""
    if current_path(target) != target:
        current_path(target).rename(target)


def tidy_leftovers(folder: Path) -> None:
    """Remove what killed writes left in a folder, put back what they were replacing. Requires the lock."""
    for path in list(folder.glob(".*")):
        if path.suffix == f".{REPLACED}":
            recover(_shown(path))
        if path.suffix in (f".{REPLACED}", f".{PARTIAL}"):
            with only_warns(f"leftovers of a killed run in {folder} cannot be deleted"):
                delete(path)


def sync_folder(folder: Path) -> None:
    """Wait until the disk has the names in a folder, if the disk supports that."""
    try:
        _sync(folder)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise


def _sync_all(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_dir():
            sync_folder(path)
        else:
            _sync(path)
    sync_folder(folder)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _publish(staging: Path, target: Path) -> None:
    if not os.path.lexists(target):
        staging.rename(target)
    elif not _exchange(staging, target):
        replaced = _beside(target, REPLACED)
        delete(replaced)
        target.rename(replaced)
        staging.rename(target)
    sync_folder(target.parent)


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two names in one step if Linux and the disk can; return whether they could."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    if rename(AT_FDCWD, os.fsencode(one), AT_FDCWD, os.fsencode(other), EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in NOT_EXCHANGED:
        return False
    raise OSError(number, os.strerror(number), str(other))


def _beside(target: Path, what: str) -> Path:
    return target.with_name(f".{target.name}.{what}")


def _shown(path: Path) -> Path:
    """Map `.X.replaced` to `X`."""
    return path.with_name(path.stem.removeprefix("."))


def delete(path: Path) -> None:
    """Delete a folder, a file or a link, if it is there. A kill may leave a part of a folder; see `remove`."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
