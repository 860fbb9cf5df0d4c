"""A JSON document of rows: an array, or an object that holds one array. Errors name the row, or the line and column."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator

from radixtrain.data.files.lines import MAX_ROW_BYTES, content_of, read_jsonl
from radixtrain.data.files.rows import UnreadRow, explain, kind_of, parse
from radixtrain.errors import DataError, UserError

BLANKS = re.compile(r"[ \t\n\r]*")
OF_ONE_ROW = {
    *("messages", "conversations", "prompt", "completion", "text", "input_ids", "tools", "instruction"),
    *("nodes", "branches", "steps", "deltas", "records"),  # of an agent's run, see rows/trajectories.py
}
DECODER = json.JSONDecoder()
HINT = "; a file of one object per line is named .jsonl"


def read_json(path: str, max_row_bytes: int = MAX_ROW_BYTES) -> Iterator[UnreadRow]:
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
    """The rows of the array that has begun. What is wrong with only one of them is found when it is read."""
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
    """A place in a JSON text, and never before blanks."""

    def __init__(self, text: str):
        self.text = text
        self._go_to(0)

    def takes(self, character: str, is_needed: bool = False) -> bool:
        """Whether a character stands here; then the place is after it. JSONDecodeError if it is needed and does not."""
        stands = self.text.startswith(character, self.at)
        if stands:
            self._go_to(self.at + 1)
        elif is_needed:
            raise json.JSONDecodeError(f"Expecting {character!r} delimiter", self.text, self.at)
        return stands

    def items(self, end: str) -> Iterator[None]:
        """Gives way to every item of an array or object, to be taken, and stops after its end."""
        if not self.takes(end):
            yield
            while not self.takes(end):
                self.takes(",", is_needed=True)
                yield

    def value(self) -> str:
        """The text of the value that begins here; then the place is after it."""
        start, (_, end) = self.at, DECODER.raw_decode(self.text, self.at)
        self._go_to(end)
        return self.text[start:end]

    def _go_to(self, at: int) -> None:
        self.at = BLANKS.match(self.text, at).end()  # type: ignore[union-attr]  # matches anywhere
