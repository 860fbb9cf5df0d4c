"""Files of one row a line: JSONL, and tables as CSV or TSV."""

from __future__ import annotations

import codecs
import csv
from collections.abc import Iterator

from radixtrain.data.files.rows import UnreadRow
from radixtrain.data.files.streams import MAX_ROW_BYTES, lines_of
from radixtrain.errors import DataError

__all__ = ["read_csv", "read_jsonl", "read_tsv"]

Fields = dict[str, str]
UNCLOSED = "look for a quote that is not closed, or raise max_row_bytes of this source in data.train_file"


def read_jsonl(path: str, max_row_bytes: int = MAX_ROW_BYTES) -> Iterator[UnreadRow]:
    """One JSON object a line, not parsed yet. Blank lines are left out. Raises as `lines_of`."""
    for number, line in enumerate(lines_of(path, max_row_bytes), start=1):
        if number == 1:
            line = line.removeprefix(codecs.BOM_UTF8)
        if line := line.strip():
            yield UnreadRow(line, f"{path}:{number}")


def read_csv(path: str, max_row_bytes: int = MAX_ROW_BYTES) -> Iterator[tuple[Fields, str] | DataError]:
    """Comma-separated values; the first line names the columns. A quoted field may hold line breaks.

    A row is named by the line that it begins at. A row with another number of fields than the header is a DataError.
    Raises DataError if the header names a column twice.
    """
    return _read_table(path, ",", max_row_bytes)


def read_tsv(path: str, max_row_bytes: int = MAX_ROW_BYTES) -> Iterator[tuple[Fields, str] | DataError]:
    """As `read_csv`, with tabs between the fields."""
    return _read_table(path, "\t", max_row_bytes)


def _read_table(path: str, delimiter: str, max_row_bytes: int) -> Iterator[tuple[Fields, str] | DataError]:
    csv.field_size_limit(max_row_bytes)  # of this process; its default refuses a text of more than 131,072 characters
    # A byte that is not UTF-8 becomes half of a surrogate pair, and its row is named: the rows after it can be read.
    found = enumerate(lines_of(path, max_row_bytes))
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
            yield DataError(where, f"cannot be read as a table: {error}; {UNCLOSED}")
            continue
        if not any(values) and len(values) < 2:
            continue
        if header is None:
            header = _header(values, where)
        else:
            yield _fields(header, values, where)


def _header(values: list[str], where: str) -> list[str]:
    _check_utf8(values, where)
    names = [name.strip() or f"column {number}" for number, name in enumerate(values, start=1)]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise DataError(where, f"the header names the column {', '.join(map(repr, twice))} more than once; rename one")
    return names


def _fields(header: list[str], values: list[str], where: str) -> tuple[Fields, str] | DataError:
    if len(values) != len(header):
        expected = f"expected {len(header)} fields ({', '.join(header)}), found {len(values)}"
        return DataError(where, f"{expected}; put a field that holds a separator or a line break between quotes")
    try:
        _check_utf8(values, where)
    except DataError as error:
        return error
    return dict(zip(header, values, strict=True)), where


def _check_utf8(values: list[str], where: str) -> None:
    for value in values:
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            byte = ord(value[error.start]) - 0xDC00
            raise DataError(where, f"not valid UTF-8: byte 0x{byte:02x}; save the file as UTF-8") from None
