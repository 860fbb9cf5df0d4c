"""The folder of a run: whether it can be used or holds another run, which `overwrite` replaces, and its lock.

A run is what `fit` leaves: `checkpoints/`, `model/`, and metrics of its training in `logs/`. Data files, `report.html`,
predictions and what radixtrain has not written are not part of it, and are never touched.

The lock is POSIX's, on a file that says who holds it. The kernel releases it when the process ends, however it does,
and forked DataLoader workers do not inherit it.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import shutil
import socket
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType

from radixtrain.checkpoints.atomic import PARTIAL, REPLACED, check_replaceable, delete, is_written
from radixtrain.checkpoints.manifest import MANIFEST, SKELETON, committed, is_checkpoint
from radixtrain.checkpoints.resolve import AUTO, LINKS
from radixtrain.errors import UserError, only_warns

logger = logging.getLogger(__name__)

SCHEME = r"([A-Za-z][A-Za-z0-9+.-]+):/"  # of a URL, also after pathlib has joined its two slashes
ASIDE = ".earlier_run"  # in the run's folder: the earlier run, until the new one has a checkpoint
MOVING = ".earlier_run.moving"  # the same while it is set aside or put back; it is put back if that is interrupted
ALWAYS = ("loss.png", "summary.json")  # files of every run
RECORD = "{}.yaml"  # the settings of a command, in the folder of its logs
FIT = RECORD.format("fit")  # is written as training begins
WORDS = ("last", "best", AUTO)  # of `ckpt_path`, for checkpoints of this folder
HOLDER = b"`radixtrain "  # how the text of a lock begins
LOCK, MODEL_LOCK = ".lock", ".{}.lock"  # inside a run's folder; beside a model's, which is replaced as a whole

_held: set[Path] = set()  # by this process: POSIX would grant it a second time, and closing one would release both


def check_output_dir(output_dir: str | os.PathLike[str]) -> Path:
    """Return the folder as a path. Raises UserError if it is not local, is a file, or cannot be written to."""
    text = os.fspath(output_dir)
    if not text.strip():
        raise UserError("output_dir is empty; name a folder")
    if scheme := re.match(SCHEME, text):
        raise UserError(
            f"output_dir {text}: {scheme[1]} is not supported; name a local folder, and copy it when the run has ended"
        )
    if "\0" in text:
        raise UserError(f"output_dir {text!r}: a path cannot hold a null character")
    text = os.path.expanduser(text)  # as Lightning does for its logs
    above = Path(text).absolute()
    while not os.path.lexists(above):
        above = above.parent
    if not above.is_dir():
        raise UserError(f"output_dir {text}: {above} is not a folder; name another one")
    if not os.access(above, os.W_OK | os.X_OK):
        raise UserError(f"output_dir {text}: {above} cannot be written to; name another folder")
    return Path(text)


def is_resumed(output_dir: Path, ckpt_path: str | os.PathLike[str] | None) -> bool:
    """Return whether the run in this folder continues: `ckpt_path` is a word, or lies in it and in no run below it."""
    if ckpt_path is None or str(ckpt_path) in WORDS:
        return ckpt_path is not None
    path, home = Path(ckpt_path).resolve(), output_dir.resolve()
    if not path.is_relative_to(home):
        return False
    inside = path.relative_to(home)
    is_log = inside.parts[:1] == ("logs",)  # `logs/version_N` is not a separate run
    return is_log or not any(_parts_of_run(home / folder) for folder in (inside, *inside.parents) if folder != Path())


def check_new_run(output_dir: Path, ckpt_path: str | os.PathLike[str] | None, overwrite: bool) -> None:
    """Raise UserError if another run is in the folder, and this one neither resumes it nor may replace it.

    Call it under the folder's lock: a run that a killed one had set aside is put back first. It resumes only if one of
    its checkpoints is named, since `last` and the like would mean the run that was to replace it.
    """
    if ckpt_path == AUTO and overwrite:
        raise UserError("ckpt_path auto resumes and never replaces a run: leave out overwrite, or ckpt_path")
    has_come_back, continues = _recover(output_dir), is_resumed(output_dir, ckpt_path)
    for name in ALWAYS:
        check_replaceable(output_dir / name)
    found, parts = committed(output_dir / "checkpoints"), _parts_of_run(output_dir)
    if has_come_back and continues and found and not _is_named(Path(ckpt_path or "")):
        (manifest, path), *_ = found
        since = time.strftime("%Y-%m-%d %H:%M", time.localtime((path / "manifest.json").stat().st_mtime))
        EarlierRun(output_dir).__enter__()  # until a checkpoint of it is named, or it is replaced
        raise UserError(
            f"ckpt_path {ckpt_path}: the run that was to replace the one in {output_dir} was killed before its first "
            f"checkpoint, and only the earlier one is left, of {since}, step {manifest.step:,}; resume that one with "
            f"--ckpt_path {path}, or replace it with --overwrite true"
        )
    if ckpt_path == AUTO and not any(_checkpoints(output_dir)) and "model/" in parts:
        continues = False  # files of a run without checkpoints are not discarded
    if parts and not overwrite and not continues:
        way_out = "resume it with --ckpt_path auto, " if parts != ["model/"] and ckpt_path != AUTO else ""
        raise UserError(
            f"output_dir {output_dir} holds another run ({', '.join(parts)}); {way_out}replace it with "
            f"--overwrite true, or set another output_dir"
        )


def is_set_aside(output_dir: Path) -> bool:
    """Return whether a run was killed while it replaced another one, before its first checkpoint."""
    return (output_dir / MOVING).is_dir() or ((output_dir / ASIDE).is_dir() and not any(_checkpoints(output_dir)))


class EarlierRun:
    """A context around a run that may replace the one in its folder, which is kept until the new one has a checkpoint.

    On entering, what belongs to the earlier run moves into `.earlier_run/`: its checkpoints, model, logs, answers and
    pictures, and no other file of the folder. The first checkpoint deletes it (`forget`), and so does an end without an
    error. An error before that puts it back, over what the new run has written; after `kill -9` `check_new_run` of the
    next start does the same.
    """

    def __init__(self, output_dir: Path):
        self.output_dir = output_dir

    def __enter__(self) -> EarlierRun:
        _recover(self.output_dir)
        moving = self.output_dir / MOVING
        for path in _files_of_run(self.output_dir):
            _move(path, self.output_dir, moving)
        if moving.is_dir():
            moving.rename(self.output_dir / ASIDE)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.forget()
        else:
            _recover(self.output_dir)

    def forget(self, checkpoint: Path | None = None) -> None:
        """Delete the earlier run. checkpoint: the first of the new one."""
        with only_warns(f"the earlier run in {self.output_dir / ASIDE} cannot be deleted"):
            delete(self.output_dir / ASIDE)


@contextmanager
def logs_of_run(folders: Sequence[Path], has_begun: Callable[[], bool]) -> Iterator[None]:
    """Remove the files that loggers wrote during this context if the run in it never begins.

    Files of other names stay: a logger may write into a folder that it shares with another run or a model.

    folders: that loggers write into; Weights & Biases keeps its own files. has_begun: whether training has begun.
    """
    before = {path for folder in folders for path in (folder, *folder.parents, *_of_loggers(folder)) if path.exists()}
    try:
        yield
    finally:
        for folder in () if has_begun() else folders:
            with suppress(OSError):  # do not hide the error that ends the run
                for path in set(_of_loggers(folder)) - before:
                    path.unlink()
                _remove_empty(each for each in (folder, *folder.parents) if each not in before)


@contextmanager
def locked(output_dir: Path, command: str) -> Iterator[None]:
    """Lock a run's folder, which is made, and its `model/` against other commands of radixtrain.

    Raises UserError if another process has the lock; it names the process, its command and when it started. A folder
    that was made and is empty at the end is removed.
    """
    model = output_dir / "model"
    model_lock = output_dir / MODEL_LOCK.format(model.name)
    with _created(output_dir), _lock(output_dir / LOCK, output_dir, command), _lock(model_lock, model, command):
        yield


@contextmanager
def locked_model(folder: Path, command: str) -> Iterator[None]:
    """Lock a model's folder, so that no other command replaces the model as a run would. Otherwise as `locked`."""
    target = folder.resolve()
    with _created(target.parent), _lock(target.parent / MODEL_LOCK.format(target.name), folder, command):
        yield


def _of_loggers(folder: Path) -> list[Path]:
    """List files of this process: TensorBoard writes the process id into their names."""
    names = "metrics.csv", "hparams.yaml", f"events.out.tfevents.*.{os.getpid()}.*"
    return [path for name in names for path in folder.glob(name)]


def _parts_of_run(output_dir: Path) -> list[str]:
    """List the parts of a run that exist, for a message."""
    parts = {
        "checkpoints/": any(_checkpoints(output_dir)),
        "model/": any(output_dir.glob("model/*")),
        "logs/": any(_logs(output_dir)),
    }
    return [name for name, is_there in parts.items() if is_there]


def _checkpoints(output_dir: Path) -> Iterator[Path]:
    """Yield whole checkpoints, whoever chose their names."""
    paths = output_dir.glob("checkpoints/[!.]*")
    return (path for path in paths if all((path / name).is_file() for name in (MANIFEST, SKELETON)))


def _logs(output_dir: Path) -> Iterator[Path]:
    """Yield the folders of logs of `fit`."""
    return (path for path in output_dir.glob("logs/version_*") if is_written(path / FIT))


def _files_of_run(folder: Path, is_aside: bool = False) -> list[Path]:
    """List all files of the run and no others. `model/` was checked before. is_aside: all that is there is its."""
    unfinished = (path for kind in (PARTIAL, REPLACED) for path in folder.glob(f"checkpoints/.*.{kind}"))
    single = (path for name in (*ALWAYS, FIT, "answers/*.csv") for path in folder.glob(name))
    written = (path for path in single if is_aside or is_written(path))
    links = (path for name in LINKS if not (path := folder / "checkpoints" / name).is_dir() or path.is_symlink())
    paths = (*_checkpoints(folder), *unfinished, *_logs(folder), *written, *links, folder / "model")
    return [path for path in dict.fromkeys(paths) if os.path.lexists(path)]


def _is_named(path: Path) -> bool:
    """Return whether the path is a checkpoint itself, not a link to one."""
    return is_checkpoint(path) and not path.is_symlink()


def _recover(output_dir: Path) -> bool:
    """Put back an earlier run that is still aside, and return True; delete it if the new one has a checkpoint."""
    aside, moving = output_dir / ASIDE, output_dir / MOVING
    for path in (aside, moving):
        if path.is_symlink():
            raise UserError(f"{path} is a link, where radixtrain sets an earlier run aside: move it away")
    is_back = is_set_aside(output_dir)
    if aside.is_dir() and any(_checkpoints(output_dir)):
        EarlierRun(output_dir).forget()
    elif aside.is_dir():
        aside.rename(moving)
    for path in _files_of_run(moving, is_aside=True):
        delete(output_dir / path.relative_to(moving))
        _move(path, moving, output_dir)
    if moving.is_dir():
        shutil.rmtree(moving)
    return is_back


def _move(path: Path, source: Path, target: Path) -> None:
    """Move a path from below one folder to the same place below another."""
    moved = target / path.relative_to(source)
    moved.parent.mkdir(parents=True, exist_ok=True)
    path.rename(moved)


@contextmanager
def _lock(path: Path, folder: Path, command: str) -> Iterator[None]:
    path = path.parent.resolve() / path.name
    descriptor = _acquire(path, folder)
    _held.add(path)
    try:
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        holder = f"{HOLDER.decode()}{command}`, process {os.getpid()} on {socket.gethostname()}, since {since}\n"
        os.ftruncate(descriptor, 0)
        os.write(descriptor, holder.encode())
        yield
    finally:
        _held.discard(path)
        with only_warns(f"the lock {path} cannot be deleted"):
            path.unlink(missing_ok=True)
        os.close(descriptor)


def _acquire(path: Path, folder: Path) -> int:
    """Open a file and lock it, making sure that it is still the one of this name."""
    if path in _held:
        raise UserError(_in_use(folder, "this process"))
    while True:
        descriptor = _opened(path)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):  # POSIX allows both
            holder = os.pread(descriptor, 1000, 0).decode(errors="replace").strip()
            os.close(descriptor)
            raise UserError(_in_use(folder, holder or "another process")) from None
        except OSError as error:
            logger.warning("%s cannot be locked here (%s); start no second command in it", folder, error.strerror)
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), path.stat()):
                return descriptor
        os.close(descriptor)  # its previous holder removed it in between


def _opened(path: Path) -> int:
    """Open the file of a lock, made if there is none. Raises UserError if it is a link, or not our lock."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise
        raise UserError(_no_lock(path)) from None
    found = os.fstat(descriptor)
    is_file = stat.S_ISREG(found.st_mode) and found.st_nlink <= 1
    text = os.pread(descriptor, len(HOLDER), 0) if is_file else b"?"
    if not HOLDER.startswith(text):
        os.close(descriptor)
        raise UserError(_no_lock(path))
    return descriptor


def _no_lock(path: Path) -> str:
    return f"{path} is not a lock of radixtrain (but a link, or another program's): move it away"


def _in_use(folder: Path, holder: str) -> str:
    return f"{folder} is in use by {holder}; wait until it ends, or set another output_dir"


@contextmanager
def _created(folder: Path) -> Iterator[None]:
    """Make the folder and those above it; remove those that are empty at the end."""
    new = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    finally:
        _remove_empty(new)


def _remove_empty(folders: Iterable[Path]) -> None:
    """Remove empty folders. folders: the innermost first."""
    with suppress(OSError):  # not empty
        for path in folders:
            path.rmdir()
