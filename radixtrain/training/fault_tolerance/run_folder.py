"""The folder of a run: whether it can be used or holds another run, which `overwrite` renames, and its lock.

A folder holds a run if it has a checkpoint, damaged or not, or a `model/`. `overwrite` renames it as a whole, to
`NAME.1` or the next free number, and nothing of it is ever deleted. A folder without them has nothing to resume: a run
begins in it, beside whatever else is there.

The lock is POSIX's, on a file that says who holds it. The kernel releases it when the process ends, however it does,
and forked DataLoader workers do not inherit it.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import socket
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

from radixtrain.checkpoints.atomic import check_replaceable
from radixtrain.checkpoints.folder import checkpoints_in
from radixtrain.checkpoints.resolve import AUTO
from radixtrain.errors import UserError, only_warns

logger = logging.getLogger(__name__)

SCHEME = r"([A-Za-z][A-Za-z0-9+.-]+):/"  # of a URL, also after pathlib has joined its two slashes
ALWAYS = ("loss.png", "summary.json")  # files of every run
RECORD = "{}.yaml"  # the settings of a command, in the folder of its logs
IN_THIS_FOLDER = ("last", "best", AUTO)  # of `ckpt_path`, for checkpoints of this folder
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
    if ckpt_path is None or str(ckpt_path) in IN_THIS_FOLDER:
        return ckpt_path is not None
    path, home = Path(ckpt_path).resolve(), output_dir.resolve()
    if not path.is_relative_to(home):
        return False
    inside = path.relative_to(home)
    is_log = inside.parts[:1] == ("logs",)  # `logs/version_N` is not a separate run
    return is_log or not any(_parts_of_run(home / folder) for folder in (inside, *inside.parents) if folder != Path())


def check_new_run(output_dir: Path, ckpt_path: str | os.PathLike[str] | None, overwrite: bool) -> None:
    """Raise UserError if another run is in the folder, and this one neither resumes it nor may replace it."""
    continues, parts = is_resumed(output_dir, ckpt_path), _parts_of_run(output_dir)
    if continues and overwrite:
        raise UserError(
            f"ckpt_path {ckpt_path} resumes the run in {output_dir}, and overwrite begins another one: leave one out"
        )
    if not (parts and overwrite):  # or they are renamed with the folder
        for name in ALWAYS:
            check_replaceable(output_dir / name)
    if ckpt_path == AUTO and parts == ["model/"]:
        continues = False  # files of a run without checkpoints are not discarded
    if parts and not overwrite and not continues:
        way_out = "resume it with --ckpt_path auto, " if "checkpoints/" in parts and ckpt_path != AUTO else ""
        raise UserError(
            f"output_dir {output_dir} holds another run ({', '.join(parts)}); {way_out}keep it under another name with "
            f"--overwrite true, or set another output_dir"
        )


def check_outside(output_dir: Path, paths: Mapping[str, object]) -> None:
    """Raise UserError if `overwrite` would rename what this run reads. paths: settings that may name files, by key."""
    home = output_dir.resolve()
    if not _parts_of_run(home):
        return
    named = ((key, text) for key, value in paths.items() for text in (value if isinstance(value, list) else [value]))
    reads = {key: text for key, text in named if isinstance(text, str) and "\0" not in text}
    for key, text in {"the working directory": os.curdir, **reads}.items():
        if Path(os.path.realpath(os.path.expanduser(text))).is_relative_to(home):
            raise UserError(
                f"{key} {text} is inside of output_dir {output_dir}, which overwrite renames: move it out, or set "
                f"another output_dir"
            )


def rename_earlier_run(output_dir: Path) -> Path | None:
    """Rename a folder that holds a run, and make it anew. Returns the new name; None if there is no run in it.

    Call it under the folder's lock, which stays with the name. If the process is killed here, the next start finds the
    run under one of the two names, whole.

    Raises UserError if the folder cannot be renamed, as when a disk is mounted there.
    """
    home = output_dir.resolve()
    if not _parts_of_run(home):
        return None
    names = (home.with_name(f"{home.name}.{number}") for number in count(1))
    earlier = next(path for path in names if not os.path.lexists(path))
    try:
        home.rename(earlier)
        home.mkdir()
    except OSError as error:
        raise UserError(
            f"output_dir {output_dir} cannot be renamed to {earlier.name}, as overwrite does with the run in it "
            f"({error.strerror}); set another output_dir"
        ) from None
    for name in (LOCK, MODEL_LOCK.format("model")):
        (earlier / name).rename(home / name)
    return earlier


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


def _parts_of_run(output_dir: Path) -> list[str]:
    """List the parts of a run that exist, for a message."""
    parts = {
        "checkpoints/": any(checkpoints_in(output_dir / "checkpoints")),
        "model/": any(output_dir.glob("model/*")),
    }
    return [name for name, is_there in parts.items() if is_there]


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
        with suppress(OSError):  # not empty
            for path in new:
                path.rmdir()
