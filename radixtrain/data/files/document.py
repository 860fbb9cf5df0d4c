"""A JSON document of rows, read piece by piece: an array, or an object that holds one array."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from typing import Any

from radixtrain.data.files.lines import read_jsonl
from radixtrain.data.files.rows import DECODER, UnreadRow, check_text, explain, kind_of, parse
from radixtrain.data.files.streams import bytes_of
from radixtrain.errors import DataError, UserError

__all__ = ["read_json"]

LONGEST_FIRST_LINE = 1 << 22
NEAR_THE_END = 16  # characters: a literal or an escape that the end of a piece cuts
BLANKS = " \t\n\r"
OF_ONE_ROW = {"messages", "conversations", "prompt", "completion", "text", "input_ids", "tools", "instruction"}
HINT = "; a file of one object per line is named .jsonl"


def read_json(path: str) -> Iterator[tuple[dict[str, Any], str] | UnreadRow | DataError]:
    """The rows of an array, or of the only array in an object, such as `{"data": [...]}`.

    Also a file of one object per line: many are named `.json`.

    Raises UserError if the document is something else, and DataError if it stops being JSON: no row can follow.
    """
    if _is_lines(path):
        return read_jsonl(path)
    return _read_document(path)


def _is_lines(path: str) -> bool:
    """Whether the first line is a whole object, and another line follows it."""
    start = b""
    for piece in bytes_of(path):
        start += piece
        if len(start) >= LONGEST_FIRST_LINE:
            break
    first, _, rest = start.removeprefix(codecs.BOM_UTF8).strip().partition(b"\n")
    try:
        return bool(rest) and isinstance(parse(first.decode("utf-8")), dict)
    except (ValueError, RecursionError):
        return False


def _read_document(path: str) -> Iterator[tuple[dict[str, Any], str] | DataError]:
    document = _Document(path)
    first = document.peek()
    if first == "[":
        yield from _rows(document)
    elif first == "{":
        yield from _rows_of_object(document)
    elif first:
        found = kind_of(document.value())
        raise UserError(f"{path}: expected an array of rows, found {found}; one object per line is named .jsonl")
    if document.peek():
        raise document.error("Extra data")


def _rows(document: _Document) -> Iterator[tuple[dict[str, Any], str] | DataError]:
    document.take("[")
    number = 0
    while document.peek() != "]":
        if number:
            document.take(",")
        number += 1
        where = f"{document.path}:row {number}"
        try:
            fields = document.row(where)
        except DataError as error:
            if error.where != where:
                raise
            yield error
        else:
            yield fields, where
    document.take("]")


def _rows_of_object(document: _Document) -> Iterator[tuple[dict[str, Any], str] | DataError]:
    document.take("{")
    arrays: list[str] = []
    number = 0
    while document.peek() != "}":
        if number:
            document.take(",")
        number += 1
        name = _key(document)
        if document.peek() != "[":
            document.value()
            continue
        arrays.append(name)
        if len(arrays) > 1:
            found = f"expected one array of rows, found {', '.join(map(repr, arrays))}"
            raise UserError(f"{document.path}: {found}; save the rows as an array in a file of their own")
        yield from _rows(document)
    document.take("}")
    if not arrays:
        raise UserError(
            f"{document.path}: expected an array of rows, found an object without one; one object per line is named "
            f".jsonl"
        )


def _key(document: _Document) -> Any:
    """The key that begins here, and the colon after it. UserError if the object is a row itself."""
    name = document.value()
    document.take(":")
    if name in OF_ONE_ROW:
        raise UserError(f"{document.path}: holds one row and not an array of rows; put it between [ and ]")
    return name


class _Document:
    """A JSON text of which only a piece is in memory, and a place in it."""

    def __init__(self, path: str):
        self.path = path
        self.pieces = bytes_of(path)
        self.decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self.num_bytes = 0
        self.is_whole = False
        self.text = ""
        self.at = 0
        self.line = 1
        self.column = 1  # of text[0]

    def peek(self) -> str:
        """The next character that is not blank; empty at the end."""
        while True:
            while self.at < len(self.text) and self.text[self.at] in BLANKS:
                self.at += 1
            if self.at < len(self.text) or self.is_whole:
                return self.text[self.at : self.at + 1]
            self._read_on()

    def take(self, character: str) -> None:
        """Goes past a character, which has to come next."""
        if self.peek() != character:
            raise self.error(f"Expecting {character!r} delimiter")
        self.at += 1

    def value(self) -> Any:
        """The value that begins here."""
        return self._value()[0]

    def row(self, where: str) -> dict[str, Any]:
        """The object that begins here. A DataError at `where` concerns only this one: the place is after it."""
        value, text = self._value(where)
        if not isinstance(value, dict):
            raise DataError(where, f"expected a JSON object, found {kind_of(value)}")
        check_text(text, value, where)
        return value

    def _value(self, where: str | None = None) -> tuple[Any, str]:
        self.peek()
        while True:
            try:
                value, end = DECODER.raw_decode(self.text, self.at)
            except json.JSONDecodeError as error:
                is_cut = error.msg.startswith("Unterminated") or error.pos > len(self.text) - NEAR_THE_END
                if self.is_whole or not is_cut:
                    raise self.error(error.msg, error.pos) from None
            except (ValueError, RecursionError) as error:
                self._skip(where, explain(error))
            else:
                if end < len(self.text) or self.is_whole:  # otherwise a number may go on
                    text, self.at = self.text[self.at : end], end
                    return value, text
            self._read_on(len(self.text) - self.at)

    def _skip(self, where: str | None, reason: str) -> None:
        """Goes past a value that is JSON and yet refused, such as an object with a key twice."""
        try:
            _, self.at = json.JSONDecoder().raw_decode(self.text, self.at)
        except (ValueError, RecursionError):
            where = None
        raise DataError(where or self.path, reason)

    def _read_on(self, at_least: int = 1) -> None:
        """Forgets what has been read, and adds at least so many characters: doubling makes a long value cheap."""
        self._forget()
        added = 0
        while added < at_least and not self.is_whole:
            piece = next(self.pieces, b"")
            self.is_whole = not piece
            try:
                text = self.decoder.decode(piece, final=self.is_whole)
            except UnicodeDecodeError as error:
                offset = self.num_bytes + len(piece) - len(error.object) + error.start
                position = f"byte 0x{error.object[error.start]:02x} at offset {offset}"
                raise DataError(self.path, f"not valid UTF-8: {position}; save the file as UTF-8") from None
            self.num_bytes += len(piece)
            self.text += text
            added += len(text)

    def _forget(self) -> None:
        read = self.text[: self.at]
        breaks = read.count("\n")
        self.line += breaks
        self.column = len(read) - read.rfind("\n") if breaks else self.column + len(read)
        self.text, self.at = self.text[self.at :], 0

    def error(self, message: str, position: int | None = None) -> DataError:
        """With the line and the column of the position, or of the place."""
        self.at = self.at if position is None else position
        self._forget()
        return DataError(self.path, f"not valid JSON: {message} at line {self.line}, column {self.column}{HINT}")
