"""The size and the checksum of a file: taken while it is written, compared when it is read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import xxhash

CHUNK = 4 << 20  # bytes


@dataclass(frozen=True)
class FileDigest:
    """size: in bytes. xxh3_128: 32 hexadecimal digits."""

    size: int
    xxh3_128: str


class DigestedFile:
    """A new file, whose bytes are summed as they are written."""

    def __init__(self, path: Path):
        self._file = path.open("xb")
        self._hash = xxhash.xxh3_128()
        self._size = 0

    def write(self, data: bytes | memoryview) -> None:
        self._file.write(data)
        self._hash.update(data)
        self._size += len(data)

    @property
    def sum(self) -> FileDigest:
        return FileDigest(self._size, self._hash.hexdigest())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self._file.close()


def write_bytes(path: Path, data: bytes) -> FileDigest:
    """Write a new file."""
    with DigestedFile(path) as file:
        file.write(data)
    return file.sum


def digest_of_file(path: Path) -> FileDigest:
    """Reads the whole file. OSError if that fails."""
    hashed, size = xxhash.xxh3_128(), 0
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(CHUNK):
            hashed.update(chunk)
            size += len(chunk)
    return FileDigest(size, hashed.hexdigest())
