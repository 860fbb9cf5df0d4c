"""The manifest of a checkpoint: its files and their checksums. Written last: without it a folder is no checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash

from radixtrain.checkpoints.atomic import set_aside
from radixtrain.checkpoints.packing import MODEL, OPTIMIZER, STATE
from radixtrain.checkpoints.tensors import FileDigest
from radixtrain.errors import UserError, first_line
from radixtrain.text_files import read_text

FORMAT = 1
MANIFEST, SKELETON = "manifest.json", "state.json"
FILES = (MODEL, OPTIMIZER, STATE, SKELETON)


class DamagedCheckpoint(UserError):
    """A checkpoint that is not whole. path: of the checkpoint. file: the one of its files that is at fault."""

    def __init__(self, path: Path, file: str, reason: str):
        super().__init__(f"{path}: {file} {reason}")
        self.path, self.file, self.reason = path, file, reason


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """A checkpoint's files. sequence: 1 for the first in its folder. step: optimizer steps. files: `FILES`, by name."""

    sequence: int
    step: int
    files: Mapping[str, FileDigest]

    def to_bytes(self) -> bytes:
        """Write JSON in one way only, so that every byte of a manifest can be compared."""
        files = {name: asdict(self.files[name]) for name in sorted(self.files)}
        body = {"format": FORMAT, "sequence": self.sequence, "step": self.step, "files": files}
        checksum = xxhash.xxh3_128_hexdigest(json.dumps(body).encode())
        return (json.dumps({**body, "checksum": checksum}, indent=1) + "\n").encode()

    def has_its_sizes(self, checkpoint: Path) -> bool:
        """Return whether the files are there with their sizes: a quick check."""
        paths = {name: checkpoint / name for name in self.files}
        return all(path.is_file() and path.stat().st_size == self.files[name].size for name, path in paths.items())

    @classmethod
    def read(cls, checkpoint: Path) -> Manifest:
        """Read the manifest of a checkpoint. Raises DamagedCheckpoint if there is none, or it was changed."""
        try:
            data = read_text(checkpoint / MANIFEST).encode()
            manifest = cls._from_json(json.loads(data))
        except FileNotFoundError:
            raise DamagedCheckpoint(checkpoint, MANIFEST, "is missing: writing did not finish") from None
        except OSError as error:
            raise DamagedCheckpoint(checkpoint, MANIFEST, f"cannot be read: {error.strerror}") from None
        except (ArithmeticError, LookupError, RecursionError, TypeError, ValueError) as error:
            reason = f"is damaged, or of another version than format {FORMAT}: {first_line(error)}"
            raise DamagedCheckpoint(checkpoint, MANIFEST, reason) from error
        if manifest.to_bytes() != data:
            raise DamagedCheckpoint(checkpoint, MANIFEST, "was changed after it was written")
        return manifest

    @classmethod
    def _from_json(cls, body: Any) -> Manifest:
        files = {
            name: FileDigest(int(each["size"]), str(each["xxh3_128"])) for name, each in dict(body["files"]).items()
        }
        if body["format"] != FORMAT or sorted(files) != sorted(FILES):
            raise ValueError(f"format {body['format']}, files {sorted(files)}")
        return cls(sequence=int(body["sequence"]), step=int(body["step"]), files=files)


def is_checkpoint(path: Path) -> bool:
    """Return whether it is a checkpoint folder, damaged or not."""
    return path.is_dir() and any((path / name).is_file() for name in (MANIFEST, *FILES))


def checkpoints_in(folder: Path) -> list[Path]:
    """List the checkpoint folders in a folder, damaged or not, without links and folders that are being written."""
    inside = [path for path in folder.iterdir() if not path.is_symlink()] if folder.is_dir() else []
    return [path for path in inside if is_checkpoint(path) and (path.name[0] != "." or set_aside(path))]


def committed(folder: Path) -> list[tuple[Manifest, Path]]:
    """Return the checkpoints whose manifest can be read, the newest first. Their other files are not looked at."""
    checkpoints = []
    for path in checkpoints_in(folder):
        with suppress(DamagedCheckpoint):  # `newest_valid` names it
            checkpoints.append((Manifest.read(path), path))
    return sorted(checkpoints, key=lambda pair: (pair[0].sequence, pair[0].step, pair[1].name), reverse=True)
