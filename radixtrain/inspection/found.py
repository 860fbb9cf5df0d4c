"""One row of the data files, by its number or by `file:line`, as it was read."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

from radixtrain.data.datamodule import SFTData
from radixtrain.data.files.sources import as_sources
from radixtrain.data.formats import Row, UnreadRow, open_rows
from radixtrain.errors import DataError, UserError

__all__ = ["FoundRow", "find_row"]

SPLITS = ("train", "validation", "test", "predict")


class FoundRow(NamedTuple):
    """A row of a split. number: counted from 1 over all of the split's sources; bad rows count too."""

    split: str
    number: int
    content: Row | UnreadRow | DataError

    @property
    def where(self) -> str:
        return self.content.where


def find_row(data: SFTData, row: int | str) -> FoundRow:
    """The row, whether or not it can be used. The files are read up to it.

    row: N for the N-th row of `train_file`; or `file:line` or `file:row N` as errors name it, with or without the
        folders, of any file of the configuration.

    Raises UserError if there is no such row, and as `open_rows`.
    """
    if not data.hparams.train_file:
        raise UserError("data.train_file is missing: name the file that the row is in")
    if isinstance(row, str) and not row.isdigit():
        return _find_named(data, row)
    number, rows = int(row), _rows_of(data, "train")
    found = next(islice(rows, number - 1, None), None) if number >= 1 else None
    if found is None:
        num_rows = sum(1 for _ in _rows_of(data, "train"))
        raise UserError(f"row: data.train_file has the rows 1 to {num_rows}, got {number}")
    return FoundRow("train", number, found)


def _find_named(data: SFTData, row: str) -> FoundRow:
    for split in SPLITS:
        for number, content in enumerate(_rows_of(data, split), start=1):
            if content.where == row or content.where.endswith(f"{os.sep}{row}"):
                return FoundRow(split, number, content)
    raise UserError(f"row: no row {row!r} in the files of the configuration; expected a number or file:line")


def _rows_of(data: SFTData, split: str) -> Iterator[Row | UnreadRow | DataError]:
    files = data.hparams[f"{split}_file"]
    for source in as_sources(files, data.hparams.columns) if files else ():
        yield from open_rows(source)
