"""Folders: of data files, or written by `save_to_disk` of `datasets`."""

from __future__ import annotations

import os
import re
from pathlib import Path

from radixtrain.data.files.readers import KINDS, kind_of_file
from radixtrain.errors import UserError

__all__ = ["data_files_of", "is_saved", "saved_files"]

BESIDE_DATA = {".md", ".txt", ".yaml", ".yml", ".py", ".toml", ".gitattributes"}
SPLITS = {
    "train": "train",
    "training": "train",
    "validation": "validation",
    "valid": "validation",
    "val": "validation",
    "dev": "validation",
    "test": "test",
    "testing": "test",
    "eval": "test",
    "evaluation": "test",
}


def is_saved(path: str) -> bool:
    """Whether `save_to_disk` wrote the folder: one data set, or several splits."""
    return any(os.path.isfile(os.path.join(path, name)) for name in ("state.json", "dataset_dict.json"))


def saved_files(path: str, split: str | None) -> list[str]:
    """The files of a saved data set, sorted."""
    folder = Path(path) / split if split and (Path(path) / split).is_dir() else Path(path)
    return sorted(str(file) for file in folder.rglob("*") if file.is_file())


def data_files_of(folder: str, split: str | None) -> list[str]:
    """The data files in a folder and in those inside of it, sorted. Documentation and hidden files are left out.

    split: takes only the files whose name has it, or a word for the same: `data/train-00000-of-00002.parquet`.

    Raises UserError if there are none, or files of several kinds or splits, and for a file that is neither data nor
    documentation: nothing is left out in silence.
    """
    files = _visible_files(folder)
    data = [file for file in files if kind_of_file(file)]
    other = [file for file in files if not kind_of_file(file) and not _is_beside_data(Path(file))]
    if not data:
        raise UserError(f"{folder}: holds no data file; expected {KINDS}, or a folder written by save_to_disk")
    if other:
        raise UserError(f"{folder}: {Path(other[0]).name} is no data file that can be read; {_choose(folder, data)}")
    data = _of_split(folder, data, split)
    kinds = sorted({kind_of_file(file) for file in data})
    if len(kinds) > 1:
        found = ", ".join(f"{kind} ({_first_of(kind, data)})" for kind in kinds)
        raise UserError(f"{folder}: holds files of several kinds, {found}; {_choose(folder, data)}")
    return data


def _visible_files(folder: str) -> list[str]:
    """All files, those that links lead to as well; a folder that is met again, as in a circle of links, only once."""
    found: list[str] = []
    seen = {os.path.realpath(folder)}
    for root, folders, names in os.walk(folder, followlinks=True):
        visible = sorted(name for name in folders if not name.startswith((".", "_")))
        real = {name: os.path.realpath(os.path.join(root, name)) for name in visible}
        folders[:] = [name for name in visible if real[name] not in seen]
        seen.update(real.values())
        found += [os.path.join(root, name) for name in names if not name.startswith((".", "_"))]
    for file in found:
        if not os.path.exists(file):
            raise UserError(f"{file}: is a link to a file that does not exist")
    return sorted(found)


def _is_beside_data(file: Path) -> bool:
    """README, LICENSE and other documentation; but not `part-00001`."""
    return file.suffix.lower() in BESIDE_DATA if file.suffix else file.name.isupper()


def _of_split(folder: str, files: list[str], split: str | None) -> list[str]:
    splits = {file: _split_of(os.path.relpath(file, folder)) for file in files}
    if split is None:
        named = sorted({found for found in splits.values() if found})
        if len(named) > 1:
            choice = f"{{path: {folder}, split: {'train' if 'train' in named else named[0]}}}"
            found = f"by the names of its files it holds the splits {', '.join(named)}"
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
