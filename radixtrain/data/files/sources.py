"""Sources of rows: a file, a folder of files, a glob, a saved data set or one of the hub."""

from __future__ import annotations

import glob
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

from radixtrain.data.files.readers import (
    COMPRESSIONS,
    MAX_ROW_BYTES,
    hub_dataset,
    read_csv,
    read_dataset,
    read_json,
    read_jsonl,
    read_table,
    saved_dataset,
)
from radixtrain.data.files.rows import Row, UnreadRow, check_columns
from radixtrain.errors import DataError, UserError, did_you_mean
from radixtrain.screen import without_passwords

AnyRow = Row | UnreadRow
KEY = "data.train_file"
HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")  # owner/name


@dataclass(frozen=True)
class Source:
    """One source of rows.

    path: a file, a folder of files, a glob, a folder written by `save_to_disk`, or `owner/name` on the Hugging Face
        hub. What exists as a path is a path.
    name: what reports call it. Default: the path.
    subset: of a hub data set that has several (`name` in `load_dataset`).
    split: of a saved or hub data set with several; of a folder whose files are named train, test ...
    weight: how often each of its rows occurs in an epoch.
    columns: our columns to those of the file; see `check_columns`.
    system_prompt: replaces that of the configuration for these rows; empty for none.
    max_row_bytes: of a line of a text file. A longer one is refused before it fills the memory.
    """

    path: str
    name: str | None = None
    subset: str | None = None
    split: str | None = None
    weight: float = 1.0
    columns: Mapping[str, str | None] | None = None
    system_prompt: str | None = None
    max_row_bytes: int = MAX_ROW_BYTES

    @property
    def label(self) -> str:
        """Return the name of the source, or else its path, subset and split."""
        return without_passwords(self.name or "/".join(part for part in (self.path, self.subset, self.split) if part))


def as_sources(value: object, columns: object = None, key: str = KEY) -> list[Source]:
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


def files_of(source: Source) -> list[str]:
    """List the files that a source reads, sorted; of a hub name those of the local cache.

    Raises UserError if there is no such source, or if it has no files.
    """
    path = _place(source)
    if is_saved(path):
        return saved_files(path, source.split)
    files = _data_files(source)
    if files is not None:
        return sorted(files)
    cached = hub_dataset(source.path, source.subset, source.split).cache_files
    if not cached:
        raise UserError(f"{source.path}: is only in memory; save it with save_to_disk, and name that folder")
    return sorted(file["filename"] for file in cached)


def found_in(source: Source) -> Iterable[UnreadRow]:
    """Return the rows of a source's files, in order. Raises UserError at the call if there is no such source."""
    path = _place(source)
    if is_saved(path):
        name, dataset = saved_dataset(path, source.split)
        return read_dataset(name, dataset)
    files = _data_files(source)
    if files is not None:
        return (found for file in files for found in _read(file, source.max_row_bytes))
    return read_dataset(source.label, hub_dataset(source.path, source.subset, source.split))


def _source(item: object, columns: dict[str, str | None] | None, key: str) -> Source:
    if isinstance(item, Source):
        return item
    if isinstance(item, str | os.PathLike):
        return Source(os.fspath(item), columns=columns)
    if not isinstance(item, Mapping):
        raise UserError(f"{key}: expected a path or a mapping with the key path, found {item!r}")
    known = [field.name for field in fields(Source)]
    for name in item:
        if name not in known:
            meant = did_you_mean(str(name), known, f"; expected {', '.join(known)}")
            raise UserError(f"{key}: a source has no key {name!r}{meant}")
    _check_fields(item, key)
    own = check_columns(item.get("columns"), f"{key}: columns")
    return Source(**{**item, "columns": own or columns})


def _check_fields(item: Mapping[str, Any], key: str) -> None:
    if not isinstance(item.get("path"), str) or not item["path"]:
        raise UserError(f"{key}: expected a source with the key path, found {dict(item)}")
    for name in ("name", "subset", "split", "system_prompt"):
        if item.get(name) is not None and not isinstance(item[name], str):
            raise UserError(f"{key}: {name}: expected text, found {item[name]!r}")
    weight = item.get("weight", 1.0)
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < float("inf"):
        raise UserError(f"{key}: weight: expected a number above 0, found {weight!r}")
    longest = item.get("max_row_bytes", MAX_ROW_BYTES)
    if isinstance(longest, bool) or not isinstance(longest, int) or not 0 < longest < sys.maxsize:
        raise UserError(f"{key}: max_row_bytes: expected a number of bytes above 0, found {longest!r}")


def _place(source: Source) -> str:
    _check_name(source.path)
    return os.path.expanduser(source.path)


def _check_name(path: str) -> None:
    """Raise UserError for a name that no log and no table can hold: each of its rows is named after it."""
    try:
        path.encode("utf-8")
    except UnicodeEncodeError:
        shown = os.fsencode(path).decode("utf-8", "backslashreplace")
        raise UserError(f"{shown}: the name of this file is not UTF-8; rename it") from None


def _data_files(source: Source) -> list[str] | None:
    """Return the files of a path or a glob; None if it can only be a name on the hub."""
    path = _place(source)
    if os.path.isdir(path):
        return data_files_of(path, source.split)
    if os.path.exists(path):
        return _known([path], source)
    if any(character in path for character in "*?["):
        found = sorted(file for file in glob.glob(path, recursive=True) if not os.path.isdir(file))
        if not found:
            raise UserError(f"no file matches {source.path}")
        return _known(found, source)
    if not HUB_NAME.fullmatch(source.path) or kind_of_file(source.path):
        remote = "; only files of this machine are read: download it first" if "://" in source.path else ""
        raise UserError(f"no such file: {source.path}{remote}")
    return None


def _known(files: list[str], source: Source) -> list[str]:
    for file in files:
        _check_name(file)
        _check_ends(file)
        suffix = os.path.splitext(file)[1].lower()
        if not kind_of_file(file):
            raise UserError(
                f"{file}: unknown suffix {suffix!r}; expected {KINDS}, a folder of such files, or one written by "
                f"save_to_disk"
            )
    if source.split or source.subset:
        what = "split" if source.split else "subset"
        raise UserError(f"{source.path}: a file has no {what}; remove the key {what}")
    return files


TEXTS: dict[str, Callable[[str, int], Iterable[UnreadRow]]] = {  # of a path and the longest row, in bytes
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


def _read(file: str, max_row_bytes: int) -> Iterable[UnreadRow]:
    kind = kind_of_file(file)
    return read_table(file) if kind in TABLES else TEXTS[kind](file, max_row_bytes)


BESIDE_DATA = {".md", ".txt", ".yaml", ".yml", ".py", ".toml", ".gitattributes"}
WORDS = {"train": "training", "validation": "valid val dev", "test": "testing eval evaluation"}
SPLITS = {word: split for split, words in WORDS.items() for word in (split, *words.split())}


def is_saved(path: str) -> bool:
    """Return whether `save_to_disk` wrote the folder: one data set, or several splits."""
    return any(os.path.isfile(os.path.join(path, name)) for name in ("state.json", "dataset_dict.json"))


def saved_files(path: str, split: str | None) -> list[str]:
    """List the files of a saved data set, sorted."""
    folder = Path(path) / split if split and (Path(path) / split).is_dir() else Path(path)
    return sorted(str(file) for file in folder.rglob("*") if file.is_file())


def data_files_of(folder: str, split: str | None) -> list[str]:
    """List the data files in a folder and its subfolders, sorted, without documentation and hidden files.

    split: takes only the files whose name has it, or a word for the same: `data/train-00000-of-00002.parquet`.

    Raises UserError if there are none, or files of several kinds or splits, and for a file that is neither data nor
    documentation: nothing is skipped silently.
    """
    files = _visible_files(folder)
    data = [file for file in files if kind_of_file(file)]
    other = [file for file in files if not kind_of_file(file) and not _is_beside_data(Path(file))]
    if not data:
        raise UserError(f"{folder}: holds no data file; expected {KINDS}, or a folder written by save_to_disk")
    if other:
        raise UserError(f"{folder}: {Path(other[0]).name} is not a data file that can be read; {_choose(folder, data)}")
    data = _of_split(folder, data, split)
    kinds = sorted({kind_of_file(file) for file in data})
    if len(kinds) > 1:
        found = ", ".join(f"{kind} ({_first_of(kind, data)})" for kind in kinds)
        raise UserError(f"{folder}: holds files of several kinds, {found}; {_choose(folder, data)}")
    return data


def _visible_files(folder: str) -> list[str]:
    """List all visible files, through links too; a folder that links reach several times only once."""
    found: list[str] = []
    seen = {os.path.realpath(folder)}
    for root, folders, names in os.walk(folder, followlinks=True):
        visible = sorted(name for name in folders if not name.startswith((".", "_")))
        real = {name: os.path.realpath(os.path.join(root, name)) for name in visible}
        folders[:] = [name for name in visible if real[name] not in seen]
        seen.update(real.values())
        found += [os.path.join(root, name) for name in names if not name.startswith((".", "_"))]
    for file in found:
        _check_name(file)
        if not os.path.exists(file):
            raise UserError(f"{file}: is a link to a file that does not exist")
        _check_ends(file)
    return sorted(found)


def _check_ends(file: str) -> None:
    if os.path.exists(file) and not os.path.isfile(file):
        raise UserError(f"{file}: is a pipe or a device, which may never end; save its content as a file")


def _is_beside_data(file: Path) -> bool:
    """Recognise README, LICENSE and other documentation; but not `part-00001`."""
    return file.suffix.lower() in BESIDE_DATA if file.suffix else file.name.isupper()


def _of_split(folder: str, files: list[str], split: str | None) -> list[str]:
    splits = {file: _split_of(os.path.relpath(file, folder)) for file in files}
    if split is None:
        named = sorted({found for found in splits.values() if found})
        if len(named) > 1:
            choice = f"{{path: {folder}, split: {'train' if 'train' in named else named[0]}}}"
            found = f"its file names show the splits {', '.join(named)}"
            raise UserError(f"{folder}: {found}; name one, as in {choice}, or name the files")
        return files
    chosen = [file for file, found in splits.items() if found == SPLITS.get(split, split)]
    if not chosen:
        names = ", ".join(sorted({found for found in splits.values() if found})) or "none"
        raise UserError(f"{folder}: no file is named after the split {split!r}; found {names}")
    return chosen


def _split_of(path: str) -> str:
    words = [word for word in re.split(r"[^a-z]+", path.lower()) if word in SPLITS]
    return SPLITS[words[-1]] if words else ""


def _first_of(kind: str, files: list[str]) -> str:
    return Path(next(file for file in files if kind_of_file(file) == kind)).name


def _choose(folder: str, files: list[str]) -> str:
    return f"choose by a glob such as {os.path.join(folder, '*' + kind_of_file(files[0]))}"


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
    return _parsed(open_rows(path), on_error)


def open_rows(source: str | os.PathLike[str] | Source) -> Iterator[UnreadRow]:
    """Read rows as `read_rows` does, but parse no lines of JSON yet: a bad row raises when it is read.

    Other processes can then parse: an `UnreadRow` can be pickled, and its `read()` returns the row or raises DataError.
    """
    [opened] = as_sources(source)
    return _checked(opened, found_in(opened))


def _checked(source: Source, found: Iterable[UnreadRow]) -> Iterator[UnreadRow]:
    is_empty = True
    for row in found:
        is_empty = False
        yield row._replace(columns=source.columns)
    if is_empty:
        raise UserError(f"no rows in {source.path}; expected at least one")


def _parsed(rows: Iterable[UnreadRow], on_error: Callable[[DataError], None] | None) -> Iterator[Row]:
    for unread in rows:
        try:
            row = unread.read()
        except DataError as error:
            if on_error is None:
                raise
            on_error(error)
        else:
            yield row
