"""A checkpoint folder: written so that it is whole or absent, checked to the last byte before it is read."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from radixtrain.checkpoints.atomic import current_path, writing
from radixtrain.checkpoints.manifest import MANIFEST, SKELETON, DamagedCheckpoint, Manifest, committed
from radixtrain.checkpoints.packing import MODEL, OPTIMIZER, STATE, MalformedState, Packed, file_of, pack, unpack
from radixtrain.checkpoints.sharded import Gathering
from radixtrain.checkpoints.tensors import digest_of_file, in_order, read_tensors, write_file, write_tensors
from radixtrain.errors import UserError, bytes_text, first_line
from radixtrain.text_files import check_file

SHARDED = (MODEL, OPTIMIZER)  # files whose tensors may be sharded, as they are written
MARGIN = 1 << 20  # bytes, for the skeleton, the manifest and the names
FULL = (errno.ENOSPC, errno.EDQUOT)


def write_checkpoint(path: Path, state: Mapping[str, Any]) -> None:
    """Write a state as a checkpoint folder. It replaces one of that name, which stays whole until then.

    state: what `pack` can hold; its entry `global_step` is the step in the manifest. Nothing of it is copied, but for
        a part of one tensor at a time if that is on another device, or not contiguous. Sharded weights and moments are
        gathered one at a time: the other ranks call `gathering_of(state).finish()` meanwhile.

    Raises UserError if the state has an entry that cannot be held, or if it cannot be written: then the message names
    the disk, the bytes and the last whole checkpoint, and nothing is left of the new one.
    """
    gathering = gathering_of(state)
    try:
        _write(Path(path), state, gathering)
    finally:
        gathering.finish()


def gathering_of(state: Mapping[str, Any]) -> Gathering:
    """Return the sharded tensors of a state, in the order in which `write_checkpoint` needs them."""
    packed = pack({key: value for key, value in state.items() if file_of(key) in SHARDED})
    return Gathering(tensor for file in SHARDED for tensor in in_order(packed.tensors[file]).values())


def _write(path: Path, state: Mapping[str, Any], gathering: Gathering) -> None:
    packed = pack(state)
    skeleton = json.dumps(packed.skeleton, separators=(",", ":"), allow_nan=False).encode()
    num_bytes = packed.num_bytes + len(skeleton)
    with _explained(path, num_bytes):
        _check_space(path, num_bytes)
        with writing(path) as staging:
            sums = {
                name: write_tensors(staging / name, tensors, gathering.whole)
                for name, tensors in packed.tensors.items()
            }
            sums[SKELETON] = write_file(staging / SKELETON, [skeleton])
            sequence = 1 + max((manifest.sequence for manifest, _ in committed(path.parent)), default=0)
            manifest = Manifest(sequence=sequence, step=int(state.get("global_step", 0)), files=sums)
            write_file(staging / MANIFEST, [manifest.to_bytes()])


def read_checkpoint(path: Path, leave_out: Collection[str] = (), in_memory: bool = True) -> dict[str, Any]:
    """Read the state of a checkpoint folder; its tensors are on the CPU.

    leave_out: entries that are not wanted, such as `optimizer_states`, which takes twice the memory of the weights.
    in_memory: False maps weights and moments from their files, for several processes that each take a part of them.
        Copy what is kept, since the files may be removed.

    No code in it is run. Raises DamagedCheckpoint, which names the file, unless every byte is the one that was written.
    """
    path = current_path(Path(path))
    verify_checkpoint(path)
    skeleton = _skeleton(path)
    wanted = {key: value for key, value in skeleton.items() if key not in leave_out}
    files = sorted({file_of(key) for key in wanted})
    tensors = {name: _read(path, name, partial(read_tensors, in_memory=in_memory or name == STATE)) for name in files}
    return _read(path, SKELETON, lambda _: unpack(Packed(wanted, tensors)))


def read_settings(path: Path) -> dict[str, Any]:
    """Read the settings of the run that wrote a checkpoint, under the keys of `read_checkpoint`, and no other file."""
    skeleton = _skeleton(path)
    found = {key: skeleton.get(key, {}) for key in ("hyper_parameters", "datamodule_hyper_parameters", "radixtrain")}
    for key, value in found.items():
        if not isinstance(value, dict):
            raise DamagedCheckpoint(path, SKELETON, f"holds no settings of a run: {key} is not a dictionary")
    found["radixtrain"] = {"wandb_run": found["radixtrain"].get("wandb_run", "")}
    return _read(path, SKELETON, lambda _: unpack(Packed(found, {})))


def verify_checkpoint(path: Path) -> None:
    """Check every byte of a checkpoint without loading its tensors. Raises DamagedCheckpoint if one differs."""
    path = current_path(Path(path))
    if not path.is_dir():
        raise UserError(f"no such checkpoint: {path}")
    for name, expected in Manifest.read(path).files.items():
        _check_size(path, name, expected.size)
        if _read(path, name, digest_of_file) != expected:
            raise DamagedCheckpoint(path, name, "is damaged: its checksum is not the one in the manifest")


def _skeleton(path: Path) -> dict[str, Any]:
    skeleton = _read(path, SKELETON, lambda file: json.loads(file.read_bytes()))
    if not isinstance(skeleton, dict):
        raise DamagedCheckpoint(path, SKELETON, "is damaged: it does not hold a dictionary")
    return skeleton


def _check_size(path: Path, name: str, size: int) -> None:
    if not (path / name).is_file():
        raise DamagedCheckpoint(path, name, "is missing")
    found = (path / name).stat().st_size
    if found != size:
        raise DamagedCheckpoint(path, name, f"is damaged: it has {found:,} bytes, and {size:,} were written")


def _read(path: Path, name: str, read: Any) -> Any:
    try:
        check_file(path / name)
        return read(path / name)
    except OSError as error:
        raise DamagedCheckpoint(path, name, f"cannot be read: {error.strerror or error}") from error
    except (SafetensorError, MalformedState, RecursionError, ValueError) as error:
        raise DamagedCheckpoint(path, name, f"is damaged: {first_line(error)}") from error


def _check_space(target: Path, num_bytes: int) -> None:
    """Raise UserError if the disk of `target` has less room than that. Another checkpoint of that name stays."""
    if _free(target) < num_bytes + MARGIN:
        raise _no_room(target, num_bytes)


@contextmanager
def _explained(target: Path, num_bytes: int) -> Iterator[None]:
    """Turn an OSError while a checkpoint of that size is written into a UserError."""
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            raise _no_room(target, num_bytes) from error
        reason = error.strerror or str(error)
        if error.errno == errno.EFBIG:
            reason = f"it needs {bytes_text(num_bytes)}, and files may not become that large (ulimit -f)"
        message = f"the checkpoint {target} cannot be written: {reason}; {_way_out(target, 'fix that')}"
        raise UserError(message) from error


def _no_room(target: Path, num_bytes: int) -> UserError:
    return UserError(
        f"no room for the checkpoint {target}: it needs {bytes_text(num_bytes)}, and the disk at "
        f"{mount_point(target.parent)} has {bytes_text(_free(target))} free; "
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
