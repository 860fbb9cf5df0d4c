"""What the machine refuses in the middle of a run, in words: memory, shared memory, room on a disk, a killed worker.

Libraries report these by many types and texts. Each becomes one line that says what to change.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from traceback import walk_tb

import torch
import torch.distributed as dist

from radixtrain.checkpoints.space import existing, mount_point
from radixtrain.data.tokenized.cache import cache_folder
from radixtrain.errors import UserError
from radixtrain.report.formatting import bytes_text

__all__ = ["explain", "lost_rank"]

NO_ROOM = {
    errno.ENOSPC: "is full",
    errno.EDQUOT: "is full: the quota of this user is used up",
    errno.EFBIG: "does not take a file of this size (`ulimit -f` may set a limit)",
    errno.EROFS: "cannot be written to (read-only file system)",
}
SHARED_MEMORY = r"unable to \w.*</torch_|Bus error|out of shared memory"
OPEN_FILES = r"Too many open files|received \d+ items of ancdata"
NO_MEMORY = r"can't allocate memory|not enough memory|Cannot allocate memory|bad_alloc|Unable to allocate"
NO_DEVICE_MEMORY = r"CUDA (error: )?out of memory|HIP out of memory|CUBLAS_STATUS_ALLOC_FAILED"
NOT_VALIDATED = r"Early stopping conditioned on metric `(eval_\w+)` which is not available"
WORKER = r"DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\) (?:exited unexpectedly|is killed by signal: (.*?)\.)"
LESS_MEMORY = "set data.max_tokens to a smaller number, or data.batch_size"
LESS_DATA_MEMORY = "set data.dataloader_num_workers: 0"


def explain(error: BaseException, output_dir: Path | None, gone: Callable[[], str] = str) -> str | None:
    """One line: what happened, what to change, and the last checkpoint. None for an error of another kind.

    output_dir: of a training run; None for other commands, which have no checkpoint to go on from.
    gone: see `lost_rank`.
    """
    if isinstance(error, UserError):
        return None
    for each in _chain(error):
        text = f"{type(each).__name__}: {each}"
        reason = _not_shared(text) or _no_room(each, text, output_dir) or _no_memory(each, text)
        reason = reason or _killed_worker(each, text) or lost_rank(each, gone) or _not_validated(text)
        if reason:
            return f"{reason}{_last_checkpoint(output_dir)}"
    return None


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error and what it was raised from, outermost first."""
    seen: set[int] = set()
    found: BaseException | None = error
    while found is not None and id(found) not in seen:
        seen.add(id(found))
        yield found
        found = found.__cause__ or (None if found.__suppress_context__ else found.__context__)


def _not_shared(text: str) -> str | None:
    if re.search(OPEN_FILES, text):
        return f"too many open files: raise the limit (`ulimit -n 65536`), or {LESS_DATA_MEMORY}"
    if not re.search(SHARED_MEMORY, text) or "No such file" in text:
        return None
    return (
        f"DataLoader workers ran out of shared memory ({_free(Path('/dev/shm'))} free in /dev/shm): give the machine "
        f"or container more (docker: --shm-size), or {LESS_DATA_MEMORY}"
    )


def _no_room(error: BaseException, text: str, output_dir: Path | None) -> str | None:
    """The disk of the file if the error names one, else the fullest of those that a run writes to."""
    number = next((each for each in NO_ROOM if _is_number(error, text, each)), None)
    if number is None:
        return None
    name = getattr(error, "filename", None) if isinstance(error, OSError) else None
    written = [Path(os.fsdecode(name))] if isinstance(name, str | bytes) else _written(output_dir)
    path = min(written, key=lambda each: shutil.disk_usage(existing(each)).free)
    disk = mount_point(path)
    return (
        f"the disk {disk} {NO_ROOM[number]}, where {path} is ({_free(disk)} free): make room there, or choose another "
        f"place ({_place(path, output_dir)})"
    )


def _is_number(error: BaseException, text: str, number: int) -> bool:
    """By the number, or by the words of libraries that keep only these."""
    return getattr(error, "errno", None) == number or re.search(rf"(Errno|os error) {number}\b", text, re.I) is not None


def _written(output_dir: Path | None) -> list[Path]:
    return [*([] if output_dir is None else [output_dir]), cache_folder(), Path(tempfile.gettempdir())]


def _place(path: Path, output_dir: Path | None) -> str:
    """What says where this is."""
    if output_dir is not None and path.absolute().is_relative_to(output_dir.absolute()):
        return "output_dir; a smaller save_total_limit needs less"
    if path.absolute().is_relative_to(cache_folder().absolute()):
        return "data.cache_dir or the variable RADIXTRAIN_CACHE"
    return "TMPDIR" if path.absolute().is_relative_to(tempfile.gettempdir()) else "output_dir"


def _no_memory(error: BaseException, text: str) -> str | None:
    if isinstance(error, torch.OutOfMemoryError) or re.search(NO_DEVICE_MEMORY, text):
        return f"the device ran out of memory{_asked_for(text)}: {LESS_MEMORY}, or model.activation_checkpointing: true"
    if isinstance(error, MemoryError) or re.search(NO_MEMORY, text):
        where = "a DataLoader worker" if "in DataLoader worker" in text else "the machine"
        return f"{where} ran out of memory{_asked_for(text)}: {LESS_MEMORY}, or {LESS_DATA_MEMORY}"
    return None


def _asked_for(text: str) -> str:
    """` when 3.00 GiB were asked for`, if the library says how much."""
    if found := re.search(r"(?:allocate|Unable to allocate) ([\d.]+ [KMGT]iB)", text):
        return f" when {found[1]} more were asked for"
    if found := re.search(r"allocate (\d+) bytes", text):
        return f" when {bytes_text(int(found[1]))} more were asked for"
    return ""


def _killed_worker(error: BaseException, text: str) -> str | None:
    """torch notices a dead worker by itself, or only that the connection to it broke."""
    found = re.search(WORKER, text)
    lost = isinstance(error, ConnectionError | EOFError | FileNotFoundError) and _comes_from_loader(error)
    if not found and not lost:
        return None
    worker = f"a DataLoader worker (process {found[1]})" if found else "a DataLoader worker"
    how = f"was killed by signal {found[2]}" if found and found[2] else "was killed"
    return (
        f"{worker} {how}, which is what a machine does that runs out of memory: {LESS_DATA_MEMORY}, or set "
        f"data.max_tokens to a smaller number"
    )


def _not_validated(text: str) -> str | None:
    if found := re.search(NOT_VALIDATED, text):
        return (
            f"trainer.callbacks: EarlyStopping watches {found[1]}, and the run ended before its first validation: set "
            f"strict: false in its init_args, or early_stopping in its place"
        )
    return None


def _comes_from_loader(error: BaseException) -> bool:
    files = (frame.f_code.co_filename for frame, _ in walk_tb(error.__traceback__))
    return any(file.endswith(os.path.join("utils", "data", "dataloader.py")) for file in files)


def _last_checkpoint(output_dir: Path | None) -> str:
    if output_dir is None:
        return ""
    last = output_dir / "checkpoints" / "last"
    if not os.path.lexists(last):
        return ". No checkpoint was written yet"
    name = os.readlink(last) if last.is_symlink() else last.read_text(encoding="utf-8").strip()
    return f". The last checkpoint is {last.parent / name}; go on with --ckpt_path last"


def _free(path: Path) -> str:
    return bytes_text(shutil.disk_usage(existing(path)).free)


LATE = r"(?i)timed out|timeout"
GONE = (
    r"(?i)connection (was )?(likely )?(closed|reset|refused|aborted)|broken pipe|socket (was )?closed|connect failure"
    r"|failed to (recv|send)|remote process|communicator (was|is) aborted"
)
OF_GLOO = r"gloo/transport|Application timeout caused pair closure|ProcessGroupGloo"


def lost_rank(error: BaseException, known: Callable[[], str]) -> str | None:
    """What an error of a connection between ranks means, and what to do; None for any other error.

    known: returns what is known of a rank that has ended, such as `rank 1 was killed by SIGKILL`, or nothing.
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
        return known() or "another rank is gone: its own message, or that of what started it, says why"
    return None
