"""The bytes of a file, decompressed if its name ends in .gz or .zst, and refused if they are not what the name says."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from typing import Any

from radixtrain.errors import DataError, UserError, first_line

__all__ = ["COMPRESSIONS", "MAX_ROW_BYTES", "content_of", "lines_of", "open_bytes"]

COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
CHUNK = 1 << 20
MAX_ROW_BYTES = 256 << 20  # of a line of text: a small compressed file can hold one that fills the memory
MAGIC = {
    b"\xff\xfe": "UTF-16 text; save it as UTF-8",
    b"\xfe\xff": "UTF-16 text; save it as UTF-8",
    b"\x1f\x8b": "gzip; add .gz to its name",
    b"\x28\xb5\x2f\xfd": "Zstandard; add .zst to its name",
    b"PK\x03\x04": "a zip archive, as those of Excel are; save it as CSV, or unpack it",
    b"PAR1": "parquet; name it .parquet",
    b"ARROW1": "Arrow; name it .arrow",
}


def open_bytes(path: str) -> Any:
    """The file as a buffered stream of bytes, decompressed. Raises UserError if it cannot be read."""
    compression = COMPRESSIONS.get(os.path.splitext(path)[1].lower())
    try:
        if compression is None:
            return open(path, "rb")
        import pyarrow  # which also notices a stream that was cut off

        return io.BufferedReader(pyarrow.input_stream(path, compression=compression), CHUNK)
    except OSError as error:
        raise _unreadable(path, error) from error


def lines_of(path: str, max_row_bytes: int) -> Iterator[bytes]:
    """The lines of a text file. They end at a line feed only: texts hold other separators.

    Raises UserError if the file cannot be read, or begins as a file of another kind, and DataError for a longer line.
    """
    with open_bytes(path) as stream:
        try:
            for number, line in enumerate(iter(lambda: stream.readline(max_row_bytes + 1), b""), start=1):
                if number == 1:
                    _check_text(path, line)
                if len(line) > max_row_bytes:
                    reason = f"expected a row of at most {max_row_bytes:,} bytes, found a longer line"
                    fix = "break the line, or raise max_row_bytes of this source in data.train_file"
                    raise DataError(f"{path}:{number}", f"{reason}; {fix}")
                yield line
        except OSError as error:
            raise _unreadable(path, error) from error


def content_of(path: str) -> bytes:
    """The content of a text file. Raises as `lines_of`."""
    with open_bytes(path) as stream:
        try:
            content: bytes = stream.read()
        except OSError as error:
            raise _unreadable(path, error) from error
    _check_text(path, content)
    return content


def _check_text(path: str, start: bytes) -> None:
    for magic, what in MAGIC.items():
        if start.startswith(magic):
            raise UserError(f"{path}: expected text, but the file begins as {what}")


def _unreadable(path: str, error: OSError) -> UserError:
    if error.strerror and error.errno:
        return UserError(f"cannot read {path}: {os.strerror(error.errno)}")
    return UserError(f"{path}: cannot be decompressed: {first_line(error)}; the file is damaged or was cut off")
