"""Where rows come from: a file, a folder of files, a glob, a saved data set or one of the hub."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from radixtrain.data.files.folders import data_files_of, is_saved, saved_files
from radixtrain.data.files.mapping import check_columns
from radixtrain.data.files.readers import KINDS, READERS, Found, kind_of_file
from radixtrain.data.files.stored import hub_dataset, saved_dataset
from radixtrain.data.files.tables import read_dataset
from radixtrain.errors import UserError, did_you_mean
from radixtrain.redaction import masked

__all__ = ["Source", "as_sources", "files_of", "found_in"]

KEY = "data.train_file"
HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")  # owner/name


@dataclass(frozen=True)
class Source:
    """One place that rows come from.

    path: a file, a folder of files, a glob, a folder written by `save_to_disk`, or `owner/name` on the Hugging Face
        hub. What exists as a path is a path.
    name: what reports call it. Default: the path.
    subset: of a hub data set that has several (`name` in `load_dataset`).
    split: of a saved or hub data set with several; of a folder whose files are named train, test ...
    weight: how often each of its rows occurs in an epoch.
    columns: our columns to those of the file; see `check_columns`.
    """

    path: str
    name: str | None = None
    subset: str | None = None
    split: str | None = None
    weight: float = 1.0
    columns: Mapping[str, str | None] | None = None

    @property
    def label(self) -> str:
        """Its name, or what it was called by."""
        return str(masked(self.name or "/".join(part for part in (self.path, self.subset, self.split) if part)))


def as_sources(value: Any, columns: Any = None, key: str = KEY) -> list[Source]:
    """The sources that a config key names.

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
        raise UserError(f"{key}: {', '.join(twice)} is there more than once; give each a name, or a weight to one")
    return sources


def files_of(source: Source) -> list[str]:
    """The files that a source reads, sorted. Of a hub name those of the local cache; none if they cannot be known.

    Raises UserError if there is no such source.
    """
    path = os.path.expanduser(source.path)
    if is_saved(path):
        return saved_files(path, source.split)
    files = _data_files(source)
    if files is not None:
        return sorted(files)
    return sorted(file["filename"] for file in hub_dataset(source.path, source.subset, source.split).cache_files)


def found_in(source: Source) -> Iterable[Found]:
    """What the files of a source hold, one after the other. Raises UserError at the call if there is no such source."""
    path = os.path.expanduser(source.path)
    if is_saved(path):
        name, dataset = saved_dataset(path, source.split)
        return read_dataset(name, dataset)
    files = _data_files(source)
    if files is not None:
        return (found for file in files for found in READERS[kind_of_file(file)](file))
    return read_dataset(source.label, hub_dataset(source.path, source.subset, source.split))


def _source(item: Any, columns: dict[str, str | None] | None, key: str) -> Source:
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
    for name in ("name", "subset", "split"):
        if item.get(name) is not None and not isinstance(item[name], str):
            raise UserError(f"{key}: {name}: expected text, found {item[name]!r}")
    weight = item.get("weight", 1.0)
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < float("inf"):
        raise UserError(f"{key}: weight: expected a number above 0, found {weight!r}")


def _data_files(source: Source) -> list[str] | None:
    """The files of a path or a glob; None if it can only be a name on the hub."""
    path = os.path.expanduser(source.path)
    if os.path.isdir(path):
        return data_files_of(path, source.split)
    if os.path.exists(path):
        return _known([path], source)
    if any(character in path for character in "*?["):
        found = sorted(file for file in glob.glob(path, recursive=True) if os.path.isfile(file))
        if not found:
            raise UserError(f"no file matches {source.path}")
        return _known(found, source)
    if not HUB_NAME.fullmatch(source.path) or kind_of_file(source.path):
        raise UserError(f"no such file: {source.path}")
    return None


def _known(files: list[str], source: Source) -> list[str]:
    for file in files:
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
