"""Sources of rows: a file, a glob, a saved data set or one of the hub."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import Annotated, Any, ClassVar, get_type_hints

from radixtrain.data.files.readers import (
    COMPRESSIONS,
    is_saved,
    load_dataset,
    read_csv,
    read_dataset,
    read_json,
    read_jsonl,
    read_table,
)
from radixtrain.data.files.rows import Row, UnreadRow, check_columns
from radixtrain.errors import UserError
from radixtrain.screen import without_passwords
from radixtrain.settings.fields import TINY, Limits, check_limits

AnyRow = Row | UnreadRow
TRAIN_FILE = "data.train_file"
HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")  # owner/name


@dataclass(frozen=True)
class Source:
    """One source of rows.

    path: a file, a glob, a folder written by `save_to_disk`, or `owner/name` on the Hugging Face hub. What exists as a
        path is a path.
    name: what reports call it. Default: the path.
    subset: of a hub data set that has several (`name` in `load_dataset`).
    split: of a saved or hub data set with several.
    weight: how often each of its rows occurs in an epoch.
    columns: our columns to those of the file; see `check_columns`.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    path: str
    name: str | None = None
    subset: str | None = None
    split: str | None = None
    weight: Annotated[float, Limits(TINY, 10_000, "above 0 and at most 10,000")] = 1.0
    columns: Mapping[str, str | None] | None = None

    @property
    def label(self) -> str:
        """Return the name of the source, or else its path, subset and split."""
        return without_passwords(self.name or "/".join(part for part in (self.path, self.subset, self.split) if part))


def as_sources(value: object, columns: object = None, key: str = TRAIN_FILE) -> list[Source]:
    """Return the sources that a config key names.

    value: a path; or a mapping with the fields of `Source`; or a list of these.
    columns: the mapping for all sources that have none of their own.
    key: the config key, for errors.

    Raises UserError for another value, an unknown field, a weight that is not above 0, two sources of one name.
    """
    items = value if isinstance(value, list | tuple) else [value]
    if not items:
        raise UserError(f"{key}: expected at least one source, found an empty list")
    mapping = check_columns(columns, "data.columns")
    sources = [_source(item, mapping, key) for item in items]
    labels = [source.label for source in sources]
    if twice := sorted({label for label in labels if labels.count(label) > 1}):
        raise UserError(f"{key}: {', '.join(twice)} occurs more than once; give each a name, or one a weight")
    return sources


def _source(item: object, columns: dict[str, str | None] | None, key: str) -> Source:
    from pydantic import TypeAdapter, ValidationError

    if isinstance(item, Source):
        return item
    if isinstance(item, str | os.PathLike):
        return Source(os.fspath(item), columns=columns)
    if not isinstance(item, Mapping):
        raise UserError(f"{key}: expected a path or a mapping with the key path, found {item!r}")
    own = check_columns(item.get("columns"), f"{key}: columns")
    try:
        source = TypeAdapter(Source).validate_python({**item, "columns": own or columns})
    except ValidationError as error:
        [first, *_] = error.errors()
        known = ", ".join(field.name for field in fields(Source))
        raise UserError(f"{key}: {first['loc'][0]}: {first['msg']}; the keys of a source are {known}") from None
    for name, kind in get_type_hints(Source, include_extras=True).items():
        check_limits(f"{key}: {name}", kind, getattr(source, name))
    return source


def files_of(source: Source) -> list[str]:
    """List the files that a source reads, sorted; of a hub name those of the local cache.

    Raises UserError if there is no such source, or if it has no files.
    """
    files = _data_files(source)
    if files is None:
        files = [file["filename"] for file in _dataset(source).cache_files]
    if not files:
        raise UserError(f"{source.path}: is only in memory; save it with save_to_disk, and name that folder")
    return sorted(files)


def _dataset(source: Source) -> Any:
    return load_dataset(os.path.expanduser(source.path), source.subset, source.split)


def _data_files(source: Source) -> list[str] | None:
    """Return the files of a path or a glob; None if it is a saved data set, or can only be a name on the hub."""
    path = os.path.expanduser(source.path)
    _check_file(path)
    if is_saved(path):
        return None
    if os.path.isdir(path):
        choose = f"choose its files by a glob such as {os.path.join(path, '*.jsonl')}"
        raise UserError(f"{source.path}: is a folder that save_to_disk has not written; {choose}")
    if os.path.exists(path):
        files = [path]
    elif any(character in path for character in "*?["):
        files = sorted(file for file in glob.glob(path, recursive=True) if not os.path.isdir(file))
        if not files:
            raise UserError(f"no file matches {source.path}")
    elif HUB_NAME.fullmatch(path) and not kind_of_file(path):
        return None
    else:
        remote = "; only files of this machine are read: download it first" if "://" in path else ""
        raise UserError(f"no such file: {source.path}{remote}")
    for file in files:
        _check_file(file)
        if not kind_of_file(file):
            suffix = os.path.splitext(file)[1].lower()
            expected = f"expected {KINDS}, or a folder written by save_to_disk"
            raise UserError(f"{file}: unknown suffix {suffix!r}; {expected}")
    for name in ("split", "subset"):
        if getattr(source, name):
            raise UserError(
                f"{source.path}: only a saved data set or one of the hub has a {name}; remove the key {name}"
            )
    return files


def _check_file(file: str) -> None:
    """Raise UserError for what cannot be read to its end, and for a name that no log and no table can hold."""
    try:
        file.encode("utf-8")
    except UnicodeEncodeError:
        shown = os.fsencode(file).decode("utf-8", "backslashreplace")
        raise UserError(f"{shown}: the name of this file is not UTF-8; rename it") from None
    if os.path.exists(file) and not os.path.isfile(file) and not os.path.isdir(file):
        raise UserError(f"{file}: is a pipe or a device, which may never end; save its content as a file")


TEXTS: dict[str, Callable[[str], Iterable[UnreadRow]]] = {
    ".jsonl": read_jsonl,
    ".ndjson": read_jsonl,
    ".json": read_json,
    ".csv": read_csv,
    ".tsv": partial(read_csv, delimiter="\t"),
}
TABLES = (".parquet", ".arrow")
KINDS = f"{', '.join(TEXTS)}, each also with .gz or .zst, {' or '.join(TABLES)}"


def kind_of_file(path: str) -> str:
    """Return the suffix of the kind, without that of a compression; empty if the kind is not known."""
    stem, suffix = os.path.splitext(path.lower())
    text = os.path.splitext(stem)[1] if suffix in COMPRESSIONS else suffix
    return text if text in TEXTS else suffix if suffix in TABLES else ""


def _read(file: str) -> Iterable[UnreadRow]:
    kind = kind_of_file(file)
    return read_table(file) if kind in TABLES else TEXTS[kind](file)


def read_rows(path: str | os.PathLike[str] | Source) -> Iterator[Row]:
    """Yield the rows of a source in their order, one at a time.

    path: a file, a glob or a hub name, as in `Source`; or a `Source`.

    Raises UserError at the call if there is no such file or its kind is unknown, and while reading if the source holds
    no rows or a file is not of the kind that its name says. Raises DataError if a row is not a JSON object, holds a key
    twice, is not UTF-8, holds half of a surrogate pair, or has another number of fields than the header of its table.
    """
    return map(UnreadRow.read, open_rows(path))


def open_rows(source: str | os.PathLike[str] | Source) -> Iterator[UnreadRow]:
    """Read rows as `read_rows` does, but parse no lines of JSON yet: a bad row raises when it is read.

    Other processes can then parse: an `UnreadRow` can be pickled, and its `read()` returns the row or raises DataError.
    """
    [opened] = as_sources(source)
    files = _data_files(opened)
    if files is None:
        return _checked(opened, read_dataset(opened.label, _dataset(opened)))
    return _checked(opened, (found for file in files for found in _read(file)))


def _checked(source: Source, found: Iterable[UnreadRow]) -> Iterator[UnreadRow]:
    is_empty = True
    for row in found:
        is_empty = False
        yield row._replace(columns=source.columns)
    if is_empty:
        raise UserError(f"no rows in {source.path}; expected at least one")
