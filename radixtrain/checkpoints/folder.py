"""A checkpoint folder: written so that it is whole or absent, checked to the last byte before it is read."""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor

from radixtrain.checkpoints.atomic import current_path, set_aside, writing
from radixtrain.checkpoints.tensors import digest_of_file, gathered, read_tensors, write_file, write_tensors
from radixtrain.errors import UserError, first_line
from radixtrain.text_files import MOST_BYTES, check_file

FORMAT = 1
MODEL, OPTIMIZER, RUN, CHECKSUMS = "model.safetensors", "optimizer.safetensors", "run.json", "checksums.txt"
FILES = (MODEL, OPTIMIZER, RUN)
# What `run.json` holds. model, data: the settings. numbers: moments that are no tensors.
SCHEMA: dict[str, Any] = {
    **{"format": int, "sequence": int, "version": str},
    **{"step": int, "num_skipped": int, "position": dict, "rows": dict, "generators": list, "numbers": dict},
    **{"model": dict, "data": dict, "config": dict, "base": str | None, "record": dict, "wandb_run": str},
}


class DamagedCheckpoint(UserError):
    """A checkpoint that is not whole. file: the one at fault. reason: `is missing`, for example."""

    def __init__(self, path: Path, file: str, reason: str):
        super().__init__(f"{path}: {file} {reason}")


@dataclass(frozen=True)
class Checkpoint:
    """The contents of a checkpoint. weights, moments: by name. run: the entries of `SCHEMA`, in the types of JSON."""

    weights: dict[str, Tensor]
    moments: dict[str, Tensor]
    run: dict[str, Any]


def write_checkpoint(path: Path, checkpoint: Checkpoint) -> None:
    """Write a checkpoint folder. It replaces one of that name, which stays whole until then.

    Nothing is copied, but for one tensor at a time if that is on another device, or not contiguous. Sharded weights and
    moments are gathered one at a time: the other ranks call `help_to_write` meanwhile.

    Raises OSError if it cannot be written; then nothing is left of the new one.
    """
    path, wholes = Path(path), gathered(checkpoint.weights, checkpoint.moments)
    try:
        with writing(path) as staging:
            sequence = 1 + max((run["sequence"] for run, _ in committed(path.parent)), default=0)
            run = json.dumps({"format": FORMAT, "sequence": sequence, **checkpoint.run}, default=os.fspath)
            sums = {
                MODEL: write_tensors(staging / MODEL, checkpoint.weights, wholes),
                OPTIMIZER: write_tensors(staging / OPTIMIZER, checkpoint.moments, wholes),
                RUN: write_file(staging / RUN, [run.encode()]),
            }
            write_file(staging / CHECKSUMS, [_lines_of(sums)])
    finally:
        deque(wholes, maxlen=0)  # after an error the other ranks still help


def help_to_write(checkpoint: Checkpoint) -> None:
    """Give the parts of this rank while rank 0 writes the checkpoint."""
    deque(gathered(checkpoint.weights, checkpoint.moments), maxlen=0)


def read_checkpoint(path: Path, with_moments: bool = True, in_memory: bool = True) -> Checkpoint:
    """Read a checkpoint folder; its tensors are on the CPU.

    with_moments: False leaves them out, which take twice the memory of the weights.
    in_memory: False maps weights and moments from their files, for several processes that each take a part of them.
        Copy what is kept, since the files may be removed.

    No code in it is run. Raises DamagedCheckpoint, which names the file, unless every byte is the one that was written.
    """
    path = current_path(Path(path))
    run, read = verify_checkpoint(path), partial(read_tensors, in_memory=in_memory)
    return Checkpoint(_read(path, MODEL, read), _read(path, OPTIMIZER, read) if with_moments else {}, run)


def verify_checkpoint(path: Path) -> dict[str, Any]:
    """Check every byte of a checkpoint without loading its tensors. Returns `read_run` of it.

    Raises DamagedCheckpoint if one differs.
    """
    path = current_path(Path(path))
    if not path.is_dir():
        raise UserError(f"no such checkpoint: {path}")
    run, sums = read_run(path), _read(path, CHECKSUMS, _checksums)
    for name in (MODEL, OPTIMIZER):
        _check(path, name, sums)
    return run


def read_run(path: Path) -> dict[str, Any]:
    """Read `run.json` of a checkpoint. Raises DamagedCheckpoint unless its bytes are those that were written."""
    path = current_path(Path(path))
    _check(path, RUN, _read(path, CHECKSUMS, _checksums))
    return _read(path, RUN, _run)


def _check(path: Path, name: str, sums: Mapping[str, str]) -> None:
    if _read(path, name, digest_of_file).xxh3_128 != sums[name]:
        raise DamagedCheckpoint(path, name, f"is damaged: its checksum is not the one in {CHECKSUMS}")


def _lines_of(sums: Mapping[str, str]) -> bytes:
    return "".join(f"{digest}  {name}\n" for name, digest in sums.items()).encode()


def _checksums(file: Path) -> dict[str, str]:
    check_file(file, MOST_BYTES)
    data = file.read_bytes()
    sums = {name: digest for digest, _, name in (line.partition("  ") for line in data.decode().splitlines())}
    if tuple(sums) != FILES or _lines_of(sums) != data:
        raise ValueError(f"it is not a list of the checksums of {', '.join(FILES)}")
    return sums


def _run(file: Path) -> dict[str, Any]:
    run = json.loads(file.read_bytes())
    if not isinstance(run, dict) or run.get("format") != FORMAT:
        raise ValueError(f"it is not of format {FORMAT}: another version of radixtrain wrote it")
    for key, kind in SCHEMA.items():
        if key not in run or not isinstance(run[key], kind):
            raise ValueError(f"its {key} is not as radixtrain writes it")
    return run


def _read(path: Path, name: str, read: Any) -> Any:
    try:
        check_file(path / name)
        return read(path / name)
    except FileNotFoundError:
        unfinished = ": writing did not finish" if name == CHECKSUMS else ""
        raise DamagedCheckpoint(path, name, f"is missing{unfinished}") from None
    except OSError as error:
        raise DamagedCheckpoint(path, name, f"cannot be read: {error.strerror or error}") from error
    except (SafetensorError, RecursionError, ValueError) as error:
        raise DamagedCheckpoint(path, name, f"is damaged: {first_line(error)}") from error


def is_checkpoint(path: Path) -> bool:
    """Return whether it is a checkpoint folder, damaged or not."""
    return path.is_dir() and any((path / name).is_file() for name in (CHECKSUMS, *FILES))


def checkpoints_in(folder: Path) -> list[Path]:
    """List the checkpoint folders in a folder, damaged or not, without links and folders that are being written."""
    inside = [path for path in folder.iterdir() if not path.is_symlink()] if folder.is_dir() else []
    return [path for path in inside if is_checkpoint(path) and (path.name[0] != "." or set_aside(path))]


def committed(folder: Path) -> list[tuple[dict[str, Any], Path]]:
    """Return the checkpoints whose `run.json` is whole, the newest first. Their tensors are not looked at."""
    checkpoints = []
    for path in checkpoints_in(folder):
        with suppress(DamagedCheckpoint):  # `newest_valid` names it
            checkpoints.append((read_run(path), path))
    return sorted(checkpoints, key=lambda pair: (pair[0]["sequence"], pair[0]["step"], pair[1].name), reverse=True)
