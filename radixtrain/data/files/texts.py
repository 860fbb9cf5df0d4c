"""Files of text to rows: JSONL, a JSON document, tables as CSV or TSV; and their bytes, decompressed if need be.

Errors name the file and the line, or the row of a document.
"""

from __future__ import annotations

import codecs
import csv
import io
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from radixtrain.data.files.rows import UnreadRow, explain, kind_of, parse
from radixtrain.errors import DataError, UserError, first_line

UNCLOSED = "look for a quote that is not closed, or raise max_row_bytes of this source in data.train_file"
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
MAX_ROW_BYTES = 256 << 20  # of a line of text: a small compressed file can hold one that fills the memory


def read_jsonl(path: str, max_row_bytes: int = MAX_ROW_BYTES) -> Iterator[UnreadRow]:
    """Read one JSON object a line, not parsed yet, without blank lines.

    Raises UserError if the file cannot be read, and DataError for a longer line.
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


@contextmanager
def _opened(path: str) -> Iterator[Any]:
    """Open a file as a buffered stream of bytes, decompressed. Raises UserError if it cannot be read."""
    compression = COMPRESSIONS.get(os.path.splitext(path)[1].lower())
    try:
        if compression is None:
            stream: Any = open(path, "rb")  # noqa: SIM115 (closed below)
        else:
            import pyarrow  # which also notices a stream that was cut off

            stream = io.BufferedReader(pyarrow.input_stream(path, compression=compression))
        with stream:
            yield stream
    except OSError as error:
        if error.strerror and error.errno:
            raise UserError(f"cannot read {path}: {os.strerror(error.errno)}") from error
        reason = f"{first_line(error)}; the file is damaged or was cut off"
        raise UserError(f"{path}: cannot be decompressed: {reason}") from error


def _lines(path: str, max_row_bytes: int) -> Iterator[bytes]:
    """Yield the lines of a text file. They end at a line feed only: texts hold other separators."""
    with _opened(path) as stream:
        for number, line in enumerate(iter(lambda: stream.readline(max_row_bytes + 1), b""), start=1):
            if len(line) > max_row_bytes:
                reason = f"expected a row of at most {max_row_bytes:,} bytes, found a longer line"
                fix = "break the line, or raise max_row_bytes of this source in data.train_file"
                raise DataError(f"{path}:{number}", f"{reason}; {fix}")
            yield line


OF_ONE_ROW = {"messages", "conversations", "prompt", "completion", "text", "input_ids", "tools", "instruction"}
HINT = "; a file of one object per line is named .jsonl"


def read_json(path: str, max_row_bytes: int = MAX_ROW_BYTES) -> Iterator[UnreadRow]:
    """Read the rows of an array, or of the only array in an object, such as `{"data": [...]}`, held in memory.

    Also reads a file of one object per line: many are named `.json`.

    Raises UserError if the document is something else, and DataError if it is not valid JSON.
    """
    with _opened(path) as stream:
        content: bytes = stream.read()
    if _is_lines(content):
        yield from read_jsonl(path, max_row_bytes)
        return
    try:
        document = parse(content.decode("utf-8-sig")) if content.strip() else []
    except (ValueError, RecursionError) as error:
        hint = HINT if isinstance(error, json.JSONDecodeError) else ""
        raise DataError(path, f"{explain(error)}{hint}") from None
    for number, row in enumerate(_rows_of(document, path), start=1):
        yield UnreadRow(json.dumps(row).encode(), f"{path}:row {number}")


def _is_lines(content: bytes) -> bool:
    """Return whether the first line is a whole object, and another line follows it."""
    first, _, rest = content.removeprefix(codecs.BOM_UTF8).strip().partition(b"\n")
    try:
        return bool(rest) and isinstance(parse(first.decode("utf-8")), dict)
    except (ValueError, RecursionError):
        return False


def _rows_of(document: object, path: str) -> list[Any]:
    """Return the array of a document. Raises UserError if there is none or several."""
    if isinstance(document, dict):
        if OF_ONE_ROW & document.keys():
            raise UserError(f"{path}: holds one row and not an array of rows; put it between [ and ]")
        arrays = [name for name, value in document.items() if isinstance(value, list)]
        if len(arrays) > 1:
            expected = f"expected one array of rows, found {', '.join(map(repr, arrays))}"
            raise UserError(f"{path}: {expected}; save the rows as an array in a file of their own")
        if not arrays:
            raise UserError(f"{path}: expected an array of rows, found an object without one{HINT}")
        document = document[arrays[0]]
    if not isinstance(document, list):
        raise UserError(f"{path}: expected an array of rows, found {kind_of(document)}{HINT}")
    return document
