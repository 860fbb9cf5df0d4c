"""A JSON document of rows: an array, or an object that holds one array. Errors name the row, or the line and column."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Generator, Iterator
from typing import Any

from radixtrain.data.files.lines import MAX_ROW_BYTES, content_of, read_jsonl
from radixtrain.data.files.rows import DECODER, UnreadRow, check_text, explain, kind_of, parse
from radixtrain.errors import DataError, UserError

FileRow = tuple[dict[str, Any], str] | DataError  # fields and where, or what is wrong

BLANKS = re.compile(r"[ \t\n\r]*")
OF_ONE_ROW = {"messages", "conversations", "prompt", "completion", "text", "input_ids", "tools", "instruction"}
HINT = "; a file of one object per line is named .jsonl"


def read_json(path: str, max_row_bytes: int = MAX_ROW_BYTES) -> Iterator[FileRow | UnreadRow]:
    """The rows of an array, or of the only array in an object, such as `{"data": [...]}`.

    Also a file of one object per line: many are named `.json`. The file is held in memory while it is read.

    Raises UserError if the document is something else, and DataError if it stops being JSON: no row can follow.
    """
    content = content_of(path)
    return read_jsonl(path, max_row_bytes) if _is_lines(content) else _read_document(path, content)


def _is_lines(content: bytes) -> bool:
    """Whether the first line is a whole object, and another line follows it."""
    first, _, rest = content.removeprefix(codecs.BOM_UTF8).strip().partition(b"\n")
    try:
        return bool(rest) and isinstance(parse(first.decode("utf-8")), dict)
    except (ValueError, RecursionError):
        return False


def _read_document(path: str, content: bytes) -> Iterator[FileRow]:
    try:
        text = content.decode("utf-8").removeprefix("\ufeff")
        at = _skip_blanks(text, 0)
        if text.startswith("[", at):
            at = yield from _rows(path, text, at)
        elif text.startswith("{", at):
            at = yield from _rows_of_object(path, text, at)
        elif at < len(text):
            value, _ = DECODER.raw_decode(text, at)
            raise UserError(f"{path}: expected an array of rows, found {kind_of(value)}{HINT}")
        if at < len(text):
            raise json.JSONDecodeError("Extra data", text, at)
    except UnicodeDecodeError as error:
        position = f"byte 0x{content[error.start]:02x} at offset {error.start}"
        raise DataError(path, f"not valid UTF-8: {position}; save the file as UTF-8") from None
    except json.JSONDecodeError as error:
        reason = f"not valid JSON: {error.msg} at line {error.lineno}, column {error.colno}{HINT}"
        raise DataError(path, reason) from None
    except UserError:
        raise
    except (ValueError, RecursionError) as error:
        raise DataError(path, explain(error)) from None


def _rows(path: str, text: str, at: int) -> Generator[FileRow, None, int]:
    """The rows of the array that begins at a position. Returns the position after it."""
    at = _skip_blanks(text, at + 1)
    number = 0
    while not text.startswith("]", at):
        if number:
            at = _take(",", text, at)
        number += 1
        row, at = _row(text, at, f"{path}:row {number}")
        yield row
        at = _skip_blanks(text, at)
    return _skip_blanks(text, at + 1)


def _row(text: str, at: int, where: str) -> tuple[FileRow, int]:
    """The row that begins at a position, or what is wrong with only this one; and the position after it."""
    try:
        value, end = DECODER.raw_decode(text, at)
        if not isinstance(value, dict):
            return DataError(where, f"expected a JSON object, found {kind_of(value)}"), end
        check_text(text[at:end], value, where)
        return (value, where), end
    except json.JSONDecodeError:
        raise
    except (ValueError, RecursionError) as error:  # JSON, and yet refused, such as an object with a key twice
        problem = error if isinstance(error, DataError) else DataError(where, explain(error))
        return problem, json.JSONDecoder().raw_decode(text, at)[1]


def _rows_of_object(path: str, text: str, at: int) -> Generator[FileRow, None, int]:
    at = _skip_blanks(text, at + 1)
    arrays: list[str] = []
    is_first = True
    while not text.startswith("}", at):
        if not is_first:
            at = _take(",", text, at)
        is_first = False
        name, at = DECODER.raw_decode(text, at)
        at = _take(":", text, _skip_blanks(text, at))
        if name in OF_ONE_ROW:
            raise UserError(f"{path}: holds one row and not an array of rows; put it between [ and ]")
        if not text.startswith("[", at):
            at = _skip_blanks(text, DECODER.raw_decode(text, at)[1])
            continue
        arrays.append(name)
        if len(arrays) > 1:
            expected = f"expected one array of rows, found {', '.join(map(repr, arrays))}"
            raise UserError(f"{path}: {expected}; save the rows as an array in a file of their own")
        at = yield from _rows(path, text, at)
    if not arrays:
        raise UserError(f"{path}: expected an array of rows, found an object without one{HINT}")
    return _skip_blanks(text, at + 1)


def _skip_blanks(text: str, at: int) -> int:
    return BLANKS.match(text, at).end()  # type: ignore[union-attr]  # matches anywhere


def _take(character: str, text: str, at: int) -> int:
    """The position after a character that has to stand here, and the blanks that follow it."""
    if not text.startswith(character, at):
        raise json.JSONDecodeError(f"Expecting {character!r} delimiter", text, at)
    return _skip_blanks(text, at + 1)
