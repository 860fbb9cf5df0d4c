"""Arrow tables, read batch by batch: parquet and Arrow files, what `save_to_disk` wrote, data sets of the hub."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from radixtrain.data.files.rows import UnreadRow
from radixtrain.data.files.texts import COMPRESSIONS, open_bytes, unpacked
from radixtrain.errors import UserError, first_line

ROWS_PER_BATCH = 128  # a row of an agent may hold 100,000 tokens
OF_TOOLS = ("tools", "functions", "function", "arguments", "parameters")  # what is in these is rendered as it stands
BUFFER = 1 << 20  # bytes of a column; without it a file of one row group is read whole: RSS 354 and not 148 MB for 223
Fields = dict[str, Any]
Read = tuple[Fields, bool]  # a row, and whether nulls were left out of its tools or arguments


def read_parquet(path: str) -> Iterator[UnreadRow]:
    """Read the rows of a parquet file. Columns of images, audio and video are neither decoded nor read."""
    return _read(path, "parquet", _parquet_batches(path))


def read_arrow(path: str) -> Iterator[UnreadRow]:
    """Read the rows of an Arrow file, of the kind for streams or for files. Media columns as in `read_parquet`."""
    return _read(path, "Arrow", _arrow_batches(path))


def read_dataset(name: str, dataset: object) -> Iterator[UnreadRow]:
    """Read the rows of a `datasets.Dataset`. Media columns as in `read_parquet`.

    name: for errors, which call a row `name:row 17`.
    """
    return _read(name, "a data set", _dataset_batches(dataset))


def _parquet_batches(path: str) -> Iterator[list[Read]]:
    import pyarrow.parquet

    with _seekable(path) as source:
        file = pyarrow.parquet.ParquetFile(source, buffer_size=BUFFER, pre_buffer=False)
        decoder = _Decoder(file.schema_arrow)
        for batch in file.iter_batches(ROWS_PER_BATCH, columns=decoder.names):
            yield decoder.rows(batch)


def _arrow_batches(path: str) -> Iterator[list[Read]]:
    import pyarrow

    with _seekable(path) as source:
        is_file = source.read(6) == b"ARROW1"
        source.seek(0)
        reader = pyarrow.ipc.open_file(source) if is_file else pyarrow.ipc.open_stream(source)
        batches = map(reader.get_batch, range(reader.num_record_batches)) if is_file else iter(reader)
        decoder = _Decoder(reader.schema)
        for batch in batches:
            for start in range(0, len(batch), ROWS_PER_BATCH):
                yield decoder.rows(batch.slice(start, ROWS_PER_BATCH))


def _dataset_batches(dataset: Any) -> Iterator[list[Read]]:
    decoder = _Decoder(dataset.features.arrow_schema)
    for table in dataset.select_columns(decoder.names).with_format("arrow").iter(ROWS_PER_BATCH):
        yield decoder.rows(table)


def _read(name: str, kind: str, batches: Iterator[list[Read]]) -> Iterator[UnreadRow]:
    """Number the rows. name: what rows are named after. kind: for the error."""
    try:
        rows = (row for batch in batches for row in batch)
        for number, (fields, filled) in enumerate(rows, start=1):
            yield UnreadRow(fields, f"{name}:row {number}", filled=filled)
    except UserError:
        raise
    except Exception as error:  # from a missing magic number to a page that cannot be decompressed
        raise UserError(f"{name}: cannot be read as {kind}: {first_line(error)}") from error


def _seekable(path: str) -> Any:
    """Open a file, decompressed into a temporary one if need be: its index is at its end."""
    if os.path.splitext(path)[1].lower() not in COMPRESSIONS:
        return open_bytes(path)
    file = tempfile.TemporaryFile()  # noqa: SIM115 (the caller closes it)
    file.writelines(unpacked(path))
    file.seek(0)
    return file


class _Decoder:
    """Batches of a table to rows.

    In a table every object of a column has the keys of all objects, with null for those it lacks; so these nulls are
    left out, as by TRL's `remove_none_values`. What `datasets` keeps as JSON stays as it was written.

    names: columns that are read. Those of images, audio and so on are not: their value is a text that says so.
    """

    def __init__(self, schema: Any):
        if twice := sorted({name for name in schema.names if schema.names.count(name) > 1}):
            raise ValueError(f"it holds the column {', '.join(map(repr, twice))} more than once")
        self.features = _features(schema)
        kinds = {name: _media(feature) for name, feature in (self.features or {}).items()}
        self.not_read = {name: f"({kind}, not read)" for name, kind in kinds.items() if kind}
        self.names = [name for name in schema.names if name not in self.not_read]
        self.kinds = {name: schema.field(name).type for name in self.names}

    def rows(self, batch: Any) -> list[Read]:
        columns = batch.select(self.names).to_pydict()
        if self.features is not None:
            columns = self.features.decode_batch(columns)
        return [self._row({name: values[number] for name, values in columns.items()}) for number in range(len(batch))]

    def _row(self, columns: Fields) -> Read:
        left_out: set[str] = set()
        fields = {name: _given(value, self.kinds[name], (name,), left_out) for name, value in columns.items()}
        return fields | self.not_read, bool(left_out)


def _given(value: Any, kind: Any, path: tuple[str, ...], left_out: set[str]) -> Any:
    """Drop the keys of a value's objects that are null.

    kind: its Arrow type. path: the keys above it. left_out: receives the keys of tools and arguments.
    """
    import pyarrow

    if isinstance(value, list) and (of_items := getattr(kind, "value_type", None)) and of_items.num_fields:
        return [_given(item, of_items, path, left_out) for item in value]
    if not isinstance(value, dict) or not pyarrow.types.is_struct(kind):
        return value
    absent = {name for name, inner in value.items() if inner is None}
    left_out.update(absent if not {*path}.isdisjoint(OF_TOOLS) else ())
    return {
        name: _given(inner, kind.field(name).type, (*path, name), left_out)
        for name, inner in value.items()
        if name not in absent
    }


def _features(schema: Any) -> Any:
    """Return the columns as the `datasets` library wrote them; None for a table of another program."""
    if b"huggingface" not in (schema.metadata or {}):
        return None
    import datasets

    written = datasets.Features.from_arrow_schema(schema)
    return datasets.Features({name: _undecoded(feature) for name, feature in written.items()})


def _undecoded(feature: Any) -> Any:
    """Copy the feature without the decoding of images and the like, which may lie inside of messages."""
    if isinstance(feature, dict):
        return {name: _undecoded(inner) for name, inner in feature.items()}
    if isinstance(feature, list | tuple):
        return [_undecoded(feature[0])]
    if hasattr(feature, "feature"):
        return replace(feature, feature=_undecoded(feature.feature))
    return replace(feature, decode=False) if _media(feature) else feature


def _media(feature: object) -> str:
    """Name the kind of an image, an audio and the like, or a list of these; empty for text, numbers or JSON."""
    if hasattr(feature, "feature"):
        return _media(feature.feature)
    kind = type(feature).__name__
    return kind if hasattr(feature, "decode") and kind != "Json" else ""


def saved_dataset(path: str, split: str | None) -> tuple[str, Any]:
    """Load a data set that `save_to_disk` wrote, and the path that its rows are named after.

    split: one of a folder with several.

    Raises UserError if it cannot be read, holds several splits and none is named, or lacks the one that is.
    """
    import datasets

    try:
        dataset = datasets.load_from_disk(path)
    except Exception as error:
        raise UserError(
            f"{path}: not a data set folder ({first_line(error)}); expected one written by datasets' save_to_disk, "
            "or the path of a file"
        ) from error
    if not isinstance(dataset, datasets.DatasetDict):
        if split is not None:
            raise UserError(f"{path}: holds one data set without splits; remove split: {split}")
        return path, dataset
    if split is None and len(dataset) > 1:
        splits = ", ".join(os.path.join(path, str(name)) for name in dataset)
        raise UserError(f"{path}: holds several splits; name one of them: {splits}")
    name = split or str(next(iter(dataset)))
    if name not in dataset:
        raise UserError(f"{path}: has no split {split!r}; it has {', '.join(map(str, dataset))}")
    return os.path.join(path, name), dataset[name]


def hub_dataset(name: str, subset: str | None, split: str | None) -> Any:
    """Load a data set of the hub, from the local cache if it is there.

    Raises UserError if it cannot be loaded, or has several splits and none is named.
    """
    import datasets

    try:
        dataset = datasets.load_dataset(name, subset, split=split, trust_remote_code=False)
    except Exception as error:  # no network, no such name, a missing subset, a script that is no longer run
        reason = f"no such file or folder, and not loaded from the Hugging Face hub: {first_line(error)}"
        raise UserError(f"{name}: {reason}") from error
    if not isinstance(dataset, datasets.DatasetDict):
        return dataset
    if len(dataset) == 1:
        return next(iter(dataset.values()))
    splits = ", ".join(map(str, dataset))
    raise UserError(f"{name}: has the splits {splits}; name one, as in {{path: {name}, split: {next(iter(dataset))}}}")
