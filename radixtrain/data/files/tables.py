"""Tables, read by the `datasets` library: parquet and Arrow files, what `save_to_disk` wrote, data sets of the hub."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from radixtrain.data.files.rows import UnreadRow
from radixtrain.errors import UserError, first_line

ROWS_PER_BATCH = 128  # a row of an agent may hold 100,000 tokens
OF_TOOLS = ("tools", "functions", "function", "arguments", "parameters")  # what is in these is rendered as it stands
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
        for number, (fields, filled) in enumerate(_rows(dataset), start=1):
            yield UnreadRow(fields, f"{name}:row {number}", filled=filled)
    except Exception as error:
        raise _unreadable(name, error) from error


def _unreadable(name: str, error: Exception) -> UserError:
    return UserError(f"{name}: cannot be read: {first_line(error)}")


def _rows(dataset: Any) -> Iterator[tuple[Fields, bool]]:
    """Yield each row, and whether nulls were left out of its tools or arguments.

    In a table every object of a column has the keys of all objects, with null for those it lacks; so these nulls are
    left out, as by TRL's `remove_none_values`. What `datasets` keeps as JSON stays as it was written. The value of a
    column of images, audio and so on is a text that says so.
    """
    import datasets

    kinds = {name: _media(feature) for name, feature in dataset.features.items()}
    not_read = {name: f"({kind}, not read)" for name, kind in kinds.items() if kind}
    names = [name for name in kinds if name not in not_read]
    features = datasets.Features({name: _undecoded(dataset.features[name]) for name in names})
    types = {name: features.arrow_schema.field(name).type for name in names}
    for table in dataset.select_columns(names).with_format("arrow").iter(ROWS_PER_BATCH):
        columns = features.decode_batch(table.to_pydict())
        for number in range(len(table)):
            left_out: set[str] = set()
            fields = {name: _given(columns[name][number], types[name], (name,), left_out) for name in names}
            yield fields | not_read, bool(left_out)


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
