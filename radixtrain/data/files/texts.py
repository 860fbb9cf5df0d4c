"""Files of text to rows: JSONL, a JSON document, tables as CSV or TSV; and their bytes, decompressed if need be.

Errors name the file and the line, or the row of a document.
"""

from __future__ import annotations

import codecs
import csv
import io
import json
import math
import os
import re
from collections.abc import Iterator
from typing import Any

from radixtrain.data.files.rows import UnreadRow, explain, kind_of, parse
from radixtrain.errors import DataError, UserError, first_line

UNCLOSED = "look for a quote that is not closed, or raise max_row_bytes of this source in data.train_file"
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
CHUNK = 1 << 20
MAX_ROW_BYTES = 256 << 20  # of a line of text: a small compressed file can hold one that fills the memory
MAX_UNPACKED_BYTES = 4 << 30  # of a compressed file that has to be unpacked as a whole, for the same reason
MAGIC = {
    b"\xff\xfe": "UTF-16 text; save it as UTF-8",
    b"\xfe\xff": "UTF-16 text; save it as UTF-8",
    b"\x1f\x8b": "gzip; add .gz to its name",
    b"\x28\xb5\x2f\xfd": "Zstandard; add .zst to its name",
    b"PK\x03\x04": "a zip archive, as those of Excel are; save it as CSV, or unpack it",
    b"PAR1": "parquet; name it .parquet",
    b"ARROW1": "Arrow; name it .arrow",
}


def read_jsonl(path: str, max_row_bytes: int = MAX_ROW_BYTES) -> Iterator[UnreadRow]:
    """Read one JSON object a line, not parsed yet, without blank lines.

    Raises UserError if the file cannot be read, or begins as a file of another kind, and DataError for a longer line.
    """
    for number, line in enumerate(_lines(path, max_row_bytes), start=1):
        if number == 1:
            line = line.removeprefix(codecs.BOM_UTF8)
        if line := line.strip():
            yield UnreadRow(line, f"{path}:{number}")


def read_csv(path: str, max_row_bytes: int = MAX_ROW_BYTES, delimiter: str = ",") -> Iterator[UnreadRow]:
    """Read separated values; the first line names the columns. A quoted field may hold line breaks.

    A row is named by the line that it begins at. A row with another number of fields than the header is bad.
    Raises DataError if the header names a column twice.
    """
    csv.field_size_limit(max_row_bytes)  # of this process; its default refuses a text of more than 131,072 characters
    # A byte that is not UTF-8 becomes half of a surrogate pair, and its row is named: the rows after it can be read.
    found = enumerate(_lines(path, max_row_bytes))
    lines = (line.decode("utf-8-sig" if not n else "utf-8", "surrogateescape") for n, line in found)
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    header: list[str] | None = None
    while True:
        where = f"{path}:{reader.line_num + 1}"
        try:
            values = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            if header is None:
                raise DataError(where, f"cannot be read as a table: {error}") from None
            yield UnreadRow(DataError(where, f"cannot be read as a table: {error}; {UNCLOSED}"), where)
            continue
        if not any(values) and len(values) < 2:
            continue
        if header is None:
            header = _header(values, where)
        else:
            yield UnreadRow(_fields(header, values, where), where)


def _header(values: list[str], where: str) -> list[str]:
    _check_utf8(values, where)
    names = [name.strip() or f"column {number}" for number, name in enumerate(values, start=1)]
    if len(names) == 1 and (mark := next((each for each in ";|\t" if each in names[0]), "")):
        fix = "write it with commas, or with tabs as .tsv"
        raise DataError(where, f"the file separates its columns by {mark!r}: {fix}")
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise DataError(where, f"the header names the column {', '.join(map(repr, twice))} more than once; rename one")
    return names


def _fields(header: list[str], values: list[str], where: str) -> dict[str, Any] | DataError:
    if len(values) != len(header):
        expected = f"expected {len(header)} fields ({', '.join(header)}), found {len(values)}"
        return DataError(where, f"{expected}; put a field that holds a separator or a line break between quotes")
    try:
        _check_utf8(values, where)
    except DataError as error:
        return error
    return dict(zip(header, values, strict=True))


def _check_utf8(values: list[str], where: str) -> None:
    for value in values:
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            byte = ord(value[error.start]) - 0xDC00
            raise DataError(where, f"not valid UTF-8: byte 0x{byte:02x}; save the file as UTF-8") from None


def open_bytes(path: str) -> Any:
    """Open a file as a buffered stream of bytes, decompressed. Raises UserError if it cannot be read."""
    compression = COMPRESSIONS.get(os.path.splitext(path)[1].lower())
    try:
        if compression is None:
            return open(path, "rb")
        import pyarrow  # which also notices a stream that was cut off

        return io.BufferedReader(pyarrow.input_stream(path, compression=compression), CHUNK)
    except OSError as error:
        raise _unreadable(path, error) from error


def _lines(path: str, max_row_bytes: int) -> Iterator[bytes]:
    """Yield the lines of a text file. They end at a line feed only: texts hold other separators."""
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
    """Read a text file. Raises as `unpacked`, and UserError if it begins as a file of another kind."""
    content = b"".join(unpacked(path))
    _check_text(path, content)
    return content


def unpacked(path: str) -> Iterator[bytes]:
    """Yield the content of a file, decompressed. Raises UserError if it cannot be read or is too large unpacked."""
    left = MAX_UNPACKED_BYTES if os.path.splitext(path)[1].lower() in COMPRESSIONS else math.inf
    with open_bytes(path) as stream:
        try:
            for chunk in iter(lambda: stream.read(CHUNK), b""):
                left -= len(chunk)
                if left < 0:
                    raise UserError(
                        f"{path}: expected at most {MAX_UNPACKED_BYTES:,} bytes unpacked; unpack it by hand"
                    )
                yield chunk
        except OSError as error:
            raise _unreadable(path, error) from error


def _check_text(path: str, start: bytes) -> None:
    for magic, what in MAGIC.items():
        if start.startswith(magic):
            raise UserError(f"{path}: expected text, but the file begins as {what}")


def _unreadable(path: str, error: OSError) -> UserError:
    if error.strerror and error.errno:
        return UserError(f"cannot read {path}: {os.strerror(error.errno)}")
    return UserError(f"{path}: cannot be decompressed: {first_line(error)}; the file is damaged or was cut off")


BLANKS = re.compile(r"[ \t\n\r]*")
OF_ONE_ROW = {"messages", "conversations", "prompt", "completion", "text", "input_ids", "tools", "instruction"}
DECODER = json.JSONDecoder()
HINT = "; a file of one object per line is named .jsonl"


def read_json(path: str, max_row_bytes: int = MAX_ROW_BYTES) -> Iterator[UnreadRow]:
    """Read the rows of an array, or of the only array in an object, such as `{"data": [...]}`.

    Also reads a file of one object per line: many are named `.json`. The file is held in memory while it is read.

    Raises UserError if the document is something else, and DataError if it stops being JSON: no row can follow.
    """
    content = content_of(path)
    return read_jsonl(path, max_row_bytes) if _is_lines(content) else _read_document(path, content)


def _is_lines(content: bytes) -> bool:
    """Return whether the first line is a whole object, and another line follows it."""
    first, _, rest = content.removeprefix(codecs.BOM_UTF8).strip().partition(b"\n")
    try:
        return bool(rest) and isinstance(parse(first.decode("utf-8")), dict)
    except (ValueError, RecursionError):
        return False


def _read_document(path: str, content: bytes) -> Iterator[UnreadRow]:
    try:
        here = _Place(content.decode("utf-8").removeprefix("\ufeff"))
        if here.takes("["):
            yield from _rows(path, here)
        elif here.takes("{"):
            yield from _rows_of_object(path, here)
        elif here.at < len(here.text):
            found = kind_of(json.loads(here.value()))
            raise UserError(f"{path}: expected an array of rows, found {found}{HINT}")
        if here.at < len(here.text):
            raise json.JSONDecodeError("Extra data", here.text, here.at)
    except UserError:
        raise
    except (ValueError, RecursionError) as error:
        hint = HINT if isinstance(error, json.JSONDecodeError) else ""
        raise DataError(path, f"{explain(error)}{hint}") from None


def _rows(path: str, here: _Place) -> Iterator[UnreadRow]:
    """Yield the rows of the array that has begun. A fault in only one of them is found when that row is read."""
    for number, _ in enumerate(here.items("]"), start=1):
        yield UnreadRow(here.value().encode(), f"{path}:row {number}")


def _rows_of_object(path: str, here: _Place) -> Iterator[UnreadRow]:
    arrays: list[str] = []
    for _ in here.items("}"):
        name = here.value().strip('"')
        here.takes(":", is_needed=True)
        if name in OF_ONE_ROW:
            raise UserError(f"{path}: holds one row and not an array of rows; put it between [ and ]")
        if not here.takes("["):
            here.value()
            continue
        arrays.append(name)
        if len(arrays) > 1:
            expected = f"expected one array of rows, found {', '.join(map(repr, arrays))}"
            raise UserError(f"{path}: {expected}; save the rows as an array in a file of their own")
        yield from _rows(path, here)
    if not arrays:
        raise UserError(f"{path}: expected an array of rows, found an object without one{HINT}")


class _Place:
    """A position in a JSON text, never before blanks."""

    def __init__(self, text: str):
        self.text = text
        self._go_to(0)

    def takes(self, character: str, is_needed: bool = False) -> bool:
        """Return whether a character is here, and pass it. Raises JSONDecodeError if it is needed and is not here."""
        stands = self.text.startswith(character, self.at)
        if stands:
            self._go_to(self.at + 1)
        elif is_needed:
            raise json.JSONDecodeError(f"Expecting {character!r} delimiter", self.text, self.at)
        return stands

    def items(self, end: str) -> Iterator[None]:
        """Yield at every item of an array or object, which the caller takes, and stop after the end."""
        if not self.takes(end):
            yield
            while not self.takes(end):
                self.takes(",", is_needed=True)
                yield

    def value(self) -> str:
        """Return the text of the value that begins here, and pass it."""
        start, (_, end) = self.at, DECODER.raw_decode(self.text, self.at)
        self._go_to(end)
        return self.text[start:end]

    def _go_to(self, at: int) -> None:
        self.at = BLANKS.match(self.text, at).end()  # type: ignore[union-attr]  # matches anywhere
