"""Errors of the machine in one line with a remedy: memory, a full disk, a worker that ended, a lost rank.

Libraries report these by many types and texts.
"""

from __future__ import annotations

import errno
import os
import re
import resource
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from traceback import walk_tb

import torch
import torch.distributed as dist

from radixtrain.checkpoints.resolve import target_of
from radixtrain.errors import EndedElsewhere, UserError, bytes_text, first_line
from radixtrain.training.devices.launcher_env import PARENT

MOST_FILES = 65_536
# Fewest open files: about 50 for the run, 64 more for each worker, two of whose batches wait.
FILES, FILES_OF_WORKER = 64, 64

NO_ROOM = {
    errno.ENOSPC: "is full",
    errno.EDQUOT: "is full: the quota of this user is used up",
    errno.EFBIG: "does not take a file of this size (`ulimit -f` may set a limit)",
    errno.EROFS: "cannot be written to (read-only file system)",
}
# What a worker's batch travels by: shared memory and open files.
NOT_HANDED_OVER = r"unable to \w.*</torch_|Bus error|Too many open files|received \d+ items of ancdata"
NO_MEMORY = (
    r"can't (allocate memory|start new thread)|not enough memory|Cannot allocate memory|bad_alloc|Unable to allocate"
)
NO_DEVICE_MEMORY = r"CUDA (error: )?out of memory|HIP out of memory|CUBLAS_STATUS_ALLOC_FAILED"
ASKED_FOR = r"allocate ([\d.]+ [KMGT]iB|\d+(?= bytes))"
WORKER = r"DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\) (?:exited unexpectedly|is killed by signal)"
LESS_MEMORY = "set data.max_tokens to a smaller number (and data.max_length, if it is larger), or data.batch_size"
LESS_DATA_MEMORY = "set data.dataloader_num_workers: 0"

LATE = r"(?i)timed out|timeout"
GONE = (
    r"(?i)connection (was )?(likely )?(closed|reset|refused|aborted)|broken pipe|socket (was )?closed|connect failure"
    r"|failed to (recv|send)|remote process|communicator (was|is) aborted"
)
OF_GLOO = r"gloo/transport|Application timeout caused pair closure|ProcessGroupGloo"


def explain(error: BaseException, output_dir: Path | None) -> str | None:
    """Explain an error of a known kind in one line: the cause, what to change, and the last checkpoint; else None.

    output_dir: of a training run; None for other commands, which have no checkpoint to resume from.

    Raises EndedElsewhere if a rank of `fit --trainer.devices N` is gone, since the process that has started it says so.
    """
    if isinstance(error, UserError):
        return None
    for cause in _chain(error):
        text = f"{type(cause).__name__}: {cause}"
        if isinstance(cause, FileNotFoundError) and output_dir is not None and not output_dir.exists():
            way_out = "restore its name, and resume with --ckpt_path auto"
            return f"output_dir {output_dir} is gone, renamed or removed while the run wrote into it: {way_out}"
        reason = _lost_worker(cause, text) or _no_room(cause, text, output_dir) or _no_memory(cause, text)
        reason = reason or lost_rank(cause)
        if reason:
            return f"{reason}{last_checkpoint(output_dir)}"
    return None


@contextmanager
def restoring(path: object) -> Iterator[None]:
    """Turn errors from restoring a checkpoint, which another program may have written or forged, into one line.

    path: of the checkpoint. Errors of the machine stay what they are.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, UserError | EndedElsewhere) or explain(error, None):
            raise
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise UserError(f"ckpt_path {path}: its state does not fit such a run ({reason}); name another one") from error


def raise_file_limit(num_workers: int) -> None:
    """Let this process open as many files as the machine allows, since each tensor of a waiting batch is one.

    num_workers: of the DataLoader. Raises UserError if the limit is lower than any run needs.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    needed = FILES + FILES_OF_WORKER * num_workers
    if most < needed:
        raise UserError(f"too many open files: the limit is {most:,}; raise it (`ulimit -n {needed}`)")


def lost_rank(error: BaseException) -> str | None:
    """Explain an error of gloo, NCCL or torch's store between ranks, and say what to do; None for any other error.

    Raises EndedElsewhere as `explain` does.
    """
    text = str(error)
    if not isinstance(error, dist.DistError) and not (isinstance(error, RuntimeError) and re.search(OF_GLOO, text)):
        return None
    if re.search(LATE, text):
        return (
            "a rank has not answered within ddp_timeout: it hangs, or needs longer for a step or a checkpoint: then "
            "set a larger ddp_timeout"
        )
    if re.search(GONE, text):
        if PARENT in os.environ:
            raise EndedElsewhere from error
        return "another rank is gone: its own message, or its launcher's, says why"
    return None


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield the error and its causes, outermost first."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        yield cause
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)


def _no_room(error: BaseException, text: str, output_dir: Path | None) -> str | None:
    """Recognise a full disk by the number of the error, or by its text from libraries that keep only that."""
    number = getattr(error, "errno", None)
    if number not in NO_ROOM:
        number = next((each for each in NO_ROOM if re.search(rf"(Errno|os error) {each}\b", text, re.I)), None)
    if number is None:
        return None
    name = getattr(error, "filename", None)
    path = Path(os.fsdecode(name)) if isinstance(name, str | bytes) else output_dir or Path(tempfile.gettempdir())
    return (
        f"the disk {mount_point(path)} {NO_ROOM[number]}, where {path} is ({_free(path)} free): make room there, or "
        f"choose another place (output_dir, data.cache_dir or TMPDIR); a smaller save_total_limit needs less"
    )


def _no_memory(error: BaseException, text: str) -> str | None:
    amount = re.search(ASKED_FOR, text)
    size = bytes_text(int(amount[1])) if amount and amount[1].isdecimal() else amount and amount[1]
    asked_for = f" when {size} more were requested" if size else ""
    if isinstance(error, torch.OutOfMemoryError) or re.search(NO_DEVICE_MEMORY, text):
        return f"the device ran out of memory{asked_for}: {LESS_MEMORY}, or model.activation_checkpointing: true"
    if isinstance(error, MemoryError) or re.search(NO_MEMORY, text):
        process = "a DataLoader worker" if "in DataLoader worker" in text else "the machine"
        return f"{process} ran out of memory{asked_for}: {LESS_MEMORY}, or {LESS_DATA_MEMORY}"
    return None


def _lost_worker(error: BaseException, text: str) -> str | None:
    """Recognise a worker that ended, which torch notices as such or only as a broken connection; or its lost batch."""
    match = re.search(WORKER, text)
    frames = (frame.f_code.co_filename for frame, _ in walk_tb(error.__traceback__))
    is_cut_off = isinstance(error, ConnectionError | EOFError | FileNotFoundError) and any(
        file.endswith(os.path.join("utils", "data", "dataloader.py")) for file in frames
    )
    if not (match or is_cut_off or re.search(NOT_HANDED_OVER, text)):
        return None
    process = f" (process {match[1]})" if match else ""
    return (
        f"a DataLoader worker{process} was killed or could not hand its batch over: {LESS_DATA_MEMORY}, or give the "
        f"machine or container more memory, shared memory ({_free(Path('/dev/shm'))} free in /dev/shm; docker: "
        f"--shm-size) or open files (`ulimit -n {MOST_FILES}`)"
    )


def last_checkpoint(output_dir: Path | None) -> str:
    """Say from where a training run resumes, as the end of a message; nothing without its folder."""
    if output_dir is None:
        return ""
    last = output_dir / "checkpoints" / "last"
    if not os.path.lexists(last):
        return ". No checkpoint was written yet; --ckpt_path auto starts again"
    if not last.is_symlink() and not last.is_file():
        return ""
    return f". The last checkpoint is {target_of(last)}; resume with --ckpt_path last"


def _free(path: Path) -> str:
    return bytes_text(shutil.disk_usage(existing(path)).free)


def existing(path: Path) -> Path:
    """Return the path, or the nearest folder above it that exists."""
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path


def mount_point(path: Path) -> Path:
    """Return the root of the disk that holds the path, or will hold it."""
    folder = existing(path).resolve()
    while not os.path.ismount(folder):
        folder = folder.parent
    return folder
