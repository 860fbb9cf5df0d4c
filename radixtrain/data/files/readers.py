"""Each kind of file to rows: JSONL, a JSON document, CSV and TSV; tables, which the `datasets` library reads.

Texts are decompressed if need be. Tables are parquet and Arrow files, what `save_to_disk` wrote, data sets of the hub.
Errors name the file and the line, or the row.
"""

from __future__ import annotations

import codecs
import csv
import glob
import io
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from radixtrain.data.files.rows import UnreadRow, explain, kind_of, parse
from radixtrain.errors import DataError, UserError, first_line

UNCLOSED = "look for a quote or a line that is not closed"
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
MAX_ROW_BYTES = 256 << 20  # of a line of text: a small compressed file can hold one that fills the memory


def read_jsonl(path: str) -> Iterator[UnreadRow]:
    """Read one JSON object a line, not parsed yet, without blank lines.

    Raises UserError if the file cannot be read, and DataError for a longer line.
    """
    for number, line in enumerate(_lines(path), start=1):
        if number == 1:
            line = line.removeprefix(codecs.BOM_UTF8)
        if line := line.strip():
            yield UnreadRow(line, f"{path}:{number}")


def read_csv(path: str, delimiter: str = ",") -> Iterator[UnreadRow]:
    """Read separated values; the first line names the columns. A quoted field may hold line breaks.

    A row is named by the line that it begins at. A row with another number of fields than the header is bad.
    Raises DataError if the header names a column twice.
    """
    csv.field_size_limit(MAX_ROW_BYTES)  # of this process; its default refuses a text of more than 131,072 characters
    reader = csv.reader(_decoded(path), delimiter=delimiter, strict=True)
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


def _decoded(path: str) -> Iterator[str]:
    for number, line in enumerate(_lines(path), start=1):
        try:
            yield line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise DataError(f"{path}:{number}", explain(error)) from None


def _header(values: list[str], where: str) -> list[str]:
    names = [name.strip() or f"column {number}" for number, name in enumerate(values, start=1)]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise DataError(where, f"the header names the column {', '.join(map(repr, twice))} more than once; rename one")
    return names


def _fields(header: list[str], values: list[str], where: str) -> dict[str, Any] | DataError:
    if len(values) != len(header):
        expected = f"expected {len(header)} fields ({', '.join(header)}), found {len(values)}"
        return DataError(where, f"{expected}; put a field that holds a separator or a line break between quotes")
    return dict(zip(header, values, strict=True))


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


def _lines(path: str) -> Iterator[bytes]:
    """Yield the lines of a text file. They end at a line feed only: texts hold other separators."""
    with _opened(path) as stream:
        for number, line in enumerate(iter(lambda: stream.readline(MAX_ROW_BYTES + 1), b""), start=1):
            if len(line) > MAX_ROW_BYTES:
                reason = f"expected a row of at most {MAX_ROW_BYTES:,} bytes, found a longer line; {UNCLOSED}"
                raise DataError(f"{path}:{number}", reason)
            yield line


HINT = "; a file of one object per line is named .jsonl"


def read_json(path: str) -> Iterator[UnreadRow]:
    """Read the rows of an array, or of the only array in an object, such as `{"data": [...]}`, held in memory.

    Also reads a file of one object per line: many are named `.json`.

    Raises UserError if the document is something else, and DataError if it is not valid JSON.
    """
    with _opened(path) as stream:
        content: bytes = stream.read()
    if _is_lines(content):
        yield from read_jsonl(path)
        return
    try:
        document = parse(content.decode("utf-8-sig")) if content.strip() else []
    except (ValueError, RecursionError) as error:
        raise DataError(path, f"{explain(error)}{HINT}") from None
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
    found = document
    if isinstance(document, dict):
        arrays = [value for value in document.values() if isinstance(value, list)]
        is_row = document.keys() & {"messages", "conversations", "prompt", "text", "input_ids", "instruction"}
        found = arrays[0] if len(arrays) == 1 and not is_row else document
    if not isinstance(found, list):
        expected = "expected an array of rows, or an object with one such array"
        shown = f"the keys {', '.join(document)}" if isinstance(document, dict) else kind_of(document)
        raise UserError(f"{path}: {expected}, found {shown}{HINT}")
    return found


# Tables

ROWS_PER_BATCH = 128  # a row of an agent may hold 100,000 tokens
Fields = dict[str, Any]


def read_table(path: str) -> Iterator[UnreadRow]:
    """Read the rows of a parquet or an Arrow file. Columns of images, audio and video are neither decoded nor read."""
    import datasets

    kind = os.path.splitext(path)[1].lower().removeprefix(".")
    options = {"batch_size": ROWS_PER_BATCH} if kind == "parquet" else {}  # or a row group is held in memory
    try:
        dataset = datasets.load_dataset(kind, data_files=glob.escape(path), split="train", streaming=True, **options)
    except Exception as error:  # from a missing magic number to an unknown type
        raise _unreadable(path, error) from error
    yield from read_dataset(path, dataset)


def read_dataset(name: str, dataset: Any) -> Iterator[UnreadRow]:
    """Read the rows of a data set. Media columns as in `read_table`.

    name: for errors, which call a row `name:row 17`.
    """
    try:
        for number, fields in enumerate(_rows(dataset), start=1):
            yield UnreadRow(fields, f"{name}:row {number}")
    except Exception as error:
        raise _unreadable(name, error) from error


def _unreadable(name: str, error: Exception) -> UserError:
    return UserError(f"{name}: cannot be read: {first_line(error)}")


def _rows(dataset: Any) -> Iterator[Fields]:
    """Yield each row, without the nulls that a table adds.

    In a table every object of a column has the keys of all objects, with null for those it lacks; so these nulls are
    left out, as by TRL's `remove_none_values`. What `datasets` keeps as JSON stays as it was written. The value of a
    column of images, audio and so on is a text that says so.
    """
    import datasets

    kinds = {name: _media(feature) for name, feature in dataset.features.items()}
    not_read = {name: f"({kind}, not read)" for name, kind in kinds.items() if kind}
    names = [name for name in kinds if name not in not_read]
    features = datasets.Features({name: _without_decoding(dataset.features[name]) for name in names})
    types = {name: features.arrow_schema.field(name).type for name in names}
    for table in dataset.select_columns(names).with_format("arrow").iter(ROWS_PER_BATCH):
        columns = features.decode_batch(table.to_pydict())
        for number in range(len(table)):
            fields = {name: _without_nulls(columns[name][number], types[name]) for name in names}
            yield fields | not_read


def _without_nulls(value: Any, kind: Any) -> Any:
    """Drop the keys of a value's objects that are null. kind: its Arrow type."""
    import pyarrow

    if isinstance(value, list) and (of_items := getattr(kind, "value_type", None)) and of_items.num_fields:
        return [_without_nulls(item, of_items) for item in value]
    if not isinstance(value, dict) or not pyarrow.types.is_struct(kind):
        return value
    return {name: _without_nulls(inner, kind.field(name).type) for name, inner in value.items() if inner is not None}


def _without_decoding(feature: Any) -> Any:
    """Copy the feature without the decoding of images and the like, which may lie inside of messages."""
    if isinstance(feature, dict):
        return {name: _without_decoding(inner) for name, inner in feature.items()}
    if isinstance(feature, list | tuple):
        return [_without_decoding(feature[0])]
    if hasattr(feature, "feature"):
        return replace(feature, feature=_without_decoding(feature.feature))
    return replace(feature, decode=False) if _media(feature) else feature


def _media(feature: object) -> str:
    """Name the kind of an image, an audio and the like, or a list of these; empty for text, numbers or JSON."""
    if hasattr(feature, "feature"):
        return _media(feature.feature)
    kind = type(feature).__name__
    return kind if hasattr(feature, "decode") and kind != "Json" else ""


def is_saved(path: str) -> bool:
    """Return whether `save_to_disk` wrote the folder: one data set, or several splits."""
    return any(os.path.isfile(os.path.join(path, name)) for name in ("state.json", "dataset_dict.json"))


def load_dataset(path: str, subset: str | None, split: str | None) -> Any:
    """Load a data set that `save_to_disk` wrote, or one of the hub, from the local cache if it is there.

    Raises UserError if it cannot be loaded, holds several splits and none is named, or lacks the one that is.
    """
    import datasets

    try:
        if is_saved(path):
            dataset = datasets.load_from_disk(path)
        else:
            dataset = datasets.load_dataset(path, subset, split=split, trust_remote_code=False)
    except Exception as error:  # no network, no such name, a missing subset, a script that is no longer run
        where = "a data set folder" if is_saved(path) else "a file or folder, and not loaded from the Hugging Face hub"
        raise UserError(f"{path}: not {where}: {first_line(error)}") from error
    if not isinstance(dataset, datasets.DatasetDict):
        if split is not None and is_saved(path):
            raise UserError(f"{path}: holds one data set without splits; remove split: {split}")
        return dataset
    [*names] = [split] if split else dataset
    if len(names) > 1 or names[0] not in dataset:
        found = ", ".join(map(str, dataset))
        raise UserError(
            f"{path}: has the splits {found}; name one, as in {{path: {path}, split: {next(iter(dataset))}}}"
        )
    return dataset[names[0]]
