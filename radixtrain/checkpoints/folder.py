"""A checkpoint folder: written so that it is whole or absent, checked to the last byte before it is read."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from radixtrain.checkpoints.legacy import read_legacy, verify_legacy
from radixtrain.checkpoints.manifest import MANIFEST, SKELETON, DamagedCheckpoint, Manifest, committed
from radixtrain.checkpoints.packing import MalformedState, Packed, file_of, pack, unpack
from radixtrain.checkpoints.replacing import standing, writing
from radixtrain.checkpoints.space import check_space, explained
from radixtrain.checkpoints.sums import sum_of, write_bytes
from radixtrain.checkpoints.tensors import read_tensors, write_tensors
from radixtrain.errors import UserError, first_line

__all__ = ["DamagedCheckpoint", "read_checkpoint", "verify_checkpoint", "write_checkpoint"]


def write_checkpoint(path: Path, state: Mapping[str, Any]) -> None:
    """Write a state as a checkpoint folder. It replaces one of that name, which stays whole until then.

    state: what `pack` can hold; its entry `global_step` is the step in the manifest. Nothing of it is copied, but for
    a part of one tensor at a time if that is on another device, or not contiguous.

    Raises UserError if the state has an entry that cannot be held, or if it cannot be written: then the message names
    the disk, the bytes and the last whole checkpoint, and nothing is left of the new one.
    """
    path = Path(path)
    packed = pack(state)
    skeleton = json.dumps(packed.skeleton, separators=(",", ":"), allow_nan=False).encode()
    num_bytes = packed.num_bytes + len(skeleton)
    with explained(path, num_bytes):
        check_space(path, num_bytes)
        with writing(path) as staging:
            sums = {name: write_tensors(staging / name, tensors) for name, tensors in packed.tensors.items()}
            sums[SKELETON] = write_bytes(staging / SKELETON, skeleton)
            sequence = 1 + max((manifest.sequence for manifest, _ in committed(path.parent)), default=0)
            manifest = Manifest(sequence=sequence, step=int(state.get("global_step", 0)), files=sums)
            write_bytes(staging / MANIFEST, manifest.to_bytes())


def read_checkpoint(path: Path, leave_out: Collection[str] = ()) -> dict[str, Any]:
    """The state of a checkpoint folder, or of a `.ckpt` file of an earlier version; its tensors are on the CPU.

    leave_out: entries that are not wanted, such as `optimizer_states`, which takes twice the memory of the weights.

    No code in it is run. Raises DamagedCheckpoint, which names the file, unless every byte is the one that was written.
    """
    path = standing(Path(path))
    if path.is_file():
        return {key: value for key, value in read_legacy(path).items() if key not in leave_out}
    verify_checkpoint(path)
    skeleton = _read(path, SKELETON, lambda file: json.loads(file.read_bytes()))
    if not isinstance(skeleton, dict):
        raise DamagedCheckpoint(path, SKELETON, "is damaged: it holds no dictionary")
    wanted = {key: value for key, value in skeleton.items() if key not in leave_out}
    tensors = {name: _read(path, name, read_tensors) for name in sorted({file_of(key) for key in wanted})}
    return _read(path, SKELETON, lambda _: unpack(Packed(wanted, tensors)))


def verify_checkpoint(path: Path) -> None:
    """The same check without the tensors; it reads every byte. DamagedCheckpoint if one is another."""
    path = standing(Path(path))
    if path.is_file():
        return verify_legacy(path)
    if not path.is_dir():
        raise UserError(f"no such checkpoint: {path}")
    for name, expected in Manifest.read(path).files.items():
        _check_size(path, name, expected.size)
        if _read(path, name, sum_of) != expected:
            raise DamagedCheckpoint(path, name, "is damaged: its checksum is not the one in the manifest")


def _check_size(path: Path, name: str, size: int) -> None:
    if not (path / name).is_file():
        raise DamagedCheckpoint(path, name, "is missing")
    found = (path / name).stat().st_size
    if found != size:
        raise DamagedCheckpoint(path, name, f"is damaged: it has {found:,} bytes, and {size:,} were written")


def _read(path: Path, name: str, read: Any) -> Any:
    try:
        return read(path / name)
    except OSError as error:
        raise DamagedCheckpoint(path, name, f"cannot be read: {error.strerror or error}") from error
    except (SafetensorError, MalformedState, RecursionError, ValueError) as error:
        raise DamagedCheckpoint(path, name, f"is damaged: {first_line(error)}") from error
