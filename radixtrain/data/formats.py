"""The entry point to data files: a path or a source to rows. A bad row is named by file and line."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator

from radixtrain.data.files.rows import Row, UnreadRow
from radixtrain.data.files.sources import Source, as_sources, found_in
from radixtrain.errors import DataError, UserError


def read_rows(
    path: str | os.PathLike[str] | Source, on_error: Callable[[DataError], None] | None = None
) -> Iterator[Row]:
    """Yield the rows of a source in their order, one at a time.

    path: a file, a folder, a glob or a hub name, as in `Source`; or a `Source`.
    on_error: receives the error of a bad row, and reading continues with the next one. Without it the first bad row
        raises.

    Raises UserError at the call if there is no such file or its kind is unknown, and while reading if the source holds
    no rows or a file is not of the kind that its name says. Raises DataError if a row is not a JSON object, holds a key
    twice, is not UTF-8, holds half of a surrogate pair, or has another number of fields than the header of its table.
    If a `.json` document stops being JSON it raises DataError even with `on_error`, since no row can follow.
    """
    return _read(open_rows(path), on_error)


def open_rows(source: str | os.PathLike[str] | Source) -> Iterator[UnreadRow]:
    """Read rows as `read_rows` does, but parse no lines of JSON yet: a bad row raises when it is read.

    Other processes can then parse: an `UnreadRow` can be pickled, and its `read()` returns the row or raises DataError.
    """
    [opened] = as_sources(source)
    return _rows(opened, found_in(opened))


def _rows(source: Source, found: Iterable[UnreadRow]) -> Iterator[UnreadRow]:
    is_empty = True
    for row in found:
        is_empty = False
        yield row._replace(columns=source.columns)
    if is_empty:
        raise UserError(f"no rows in {source.path}; expected at least one")


def _read(rows: Iterable[UnreadRow], on_error: Callable[[DataError], None] | None) -> Iterator[Row]:
    for unread in rows:
        try:
            row = unread.read()
        except DataError as error:
            if on_error is None:
                raise
            on_error(error)
        else:
            yield row
