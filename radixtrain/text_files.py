"""Small text files that a user or a model names: read whole, so devices, pipes and huge files are refused."""

from __future__ import annotations

import os
import stat
from pathlib import Path

MOST_BYTES = 64 << 20


def read_text(path: str | os.PathLike[str], most: int = MOST_BYTES) -> str:
    """Read a text file of at most `most` bytes. Raises OSError if it cannot, and UnicodeDecodeError."""
    check_file(path, most)
    return Path(path).read_text(encoding="utf-8")


def check_file(path: str | os.PathLike[str], most: int | None = None) -> None:
    """Raise OSError, before anything is read, for a device, a pipe or a socket, and for more than `most` bytes."""
    found = os.stat(path)
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(21, "a folder", str(path))
    if not stat.S_ISREG(found.st_mode):
        raise OSError(22, "not a file but a device, a pipe or a socket", str(path))
    if most is not None and found.st_size > most:
        raise OSError(27, f"{found.st_size:,} bytes, and such files have at most {most:,}", str(path))
