"""Files to rows: JSONL, a JSON array, parquet, a saved Hugging Face data set. A bad row is named by file and line."""

from __future__ import annotations

import codecs
import json
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from radixtrain.errors import DataError, UserError, first_line

__all__ = ["Row", "read_rows"]

TOO_DEEP = "not valid JSON: nested too deeply to be read"


class Row(NamedTuple):
    """One row of a data file, as it was read.

    fields: column name to value.
    where: `train.jsonl:17` (line, counted from 1) or `train.parquet:row 17` (row, counted from 1).
    """

    fields: dict[str, Any]
    where: str


def read_rows(path: str | os.PathLike[str], on_error: Callable[[DataError], None] | None = None) -> Iterator[Row]:
    """Yields the rows of a file in their order, one at a time.

    path: a `.jsonl`, `.json` (an array of objects) or `.parquet` file, or a folder written by `save_to_disk`.
    on_error: receives what is wrong with a row, and reading goes on with the next one. Without it the first bad row
        raises.

    Raises UserError at the call if there is no such file or its kind is unknown, and while reading if the file holds no
    rows or is not of the kind that its name says. Raises DataError if a row is not a JSON object, holds a key twice, is
    not UTF-8, or holds half of a surrogate pair. A `.json` array that does not parse raises it even with `on_error`,
    since it has no rows to go on with.
    """
    path = os.fspath(path)
    return _deliver(path, _reader(path)(path), on_error)


def _reader(path: str) -> Callable[[str], Iterator[Row | DataError]]:
    if not os.path.exists(path):
        raise UserError(f"no such file: {path}")
    if os.path.isdir(path):
        return _read_saved_dataset
    suffix = os.path.splitext(path)[1].lower()
    if suffix not in READERS:
        raise UserError(
            f"{path}: unknown suffix {suffix!r}; expected {', '.join(READERS)} or a folder written by save_to_disk"
        )
    return READERS[suffix]


def _deliver(
    path: str, outcomes: Iterable[Row | DataError], on_error: Callable[[DataError], None] | None
) -> Iterator[Row]:
    is_empty = True
    for outcome in outcomes:
        is_empty = False
        if isinstance(outcome, Row):
            yield outcome
        elif on_error is None:
            raise outcome
        else:
            on_error(outcome)
    if is_empty:
        raise UserError(f"no rows in {path}; expected at least one")


def _read_jsonl(path: str) -> Iterator[Row | DataError]:
    # Opened as bytes: a text file also splits at U+2028, and one bad byte would lose the rest of the file.
    with _open(path) as lines:
        for number, line in enumerate(lines, start=1):
            if number == 1:
                line = line.removeprefix(codecs.BOM_UTF8)
            if line.strip():
                where = f"{path}:{number}"
                yield _read_line(line.rstrip(), where)


def _read_json_array(path: str) -> Iterator[Row | DataError]:
    with _open(path) as file:
        content = file.read().removeprefix(codecs.BOM_UTF8)
    if not content.strip():
        return
    rows = _parse(content, path, hint="; a file of one object per line is named .jsonl")
    if not isinstance(rows, list):
        raise UserError(f"{path}: expected an array of rows, found {_kind(rows)}; one object per line is named .jsonl")
    for number, fields in enumerate(rows, start=1):
        yield _row(fields, f"{path}:row {number}")


def _read_parquet(path: str) -> Iterator[Row | DataError]:
    import datasets
    import pyarrow.parquet

    try:
        # Not load_dataset: it writes a second copy of the data into the user's cache and treats [ and * as a pattern.
        dataset = datasets.Dataset(pyarrow.parquet.read_table(path))
    except Exception as error:
        raise UserError(f"{path}: cannot be read as parquet: {first_line(error)}") from error
    yield from _number_rows(path, dataset)


def _read_saved_dataset(path: str) -> Iterator[Row | DataError]:
    import datasets

    try:
        dataset = datasets.load_from_disk(path)
    except Exception as error:
        raise UserError(
            f"{path}: not a data set folder ({first_line(error)}); expected one written by datasets' save_to_disk, "
            "or the path of a file"
        ) from error
    if isinstance(dataset, datasets.DatasetDict):
        raise UserError(f"{path}: holds several splits; name one of them: {', '.join(_splits(path, dataset))}")
    yield from _number_rows(path, dataset.with_format(None))


def _splits(path: str, dataset: dict[str, Any]) -> list[str]:
    return [os.path.join(path, str(split)) for split in dataset]


def _number_rows(path: str, dataset: Iterable[dict[str, Any]]) -> Iterator[Row]:
    for number, fields in enumerate(dataset, start=1):
        yield Row(fields, f"{path}:row {number}")


def _read_line(line: bytes, where: str) -> Row | DataError:
    try:
        return _row(_parse(line, where), where)
    except DataError as error:
        return error


def _parse(content: bytes, where: str, hint: str = "") -> Any:
    try:
        text = content.decode("utf-8")
        return json.loads(text, object_pairs_hook=_unique_keys, parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        position = f"byte 0x{content[error.start]:02x} at offset {error.start}"
        raise DataError(where, f"not valid UTF-8: {position}; save the file as UTF-8") from None
    except json.JSONDecodeError as error:
        position = f"column {error.colno}" if error.lineno == 1 else f"line {error.lineno}, column {error.colno}"
        raise DataError(where, f"not valid JSON: {error.msg} at {position}{hint}") from None
    except RecursionError:
        raise DataError(where, TOO_DEEP) from None
    except ValueError as error:
        raise DataError(where, str(error)) from None


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"key {twice!r} occurs more than once in one object; keep one of its values")
    return fields


def _refuse_constant(name: str) -> None:
    raise ValueError(f"not valid JSON: {name} is not a JSON number")


def _row(fields: Any, where: str) -> Row | DataError:
    if not isinstance(fields, dict):
        return DataError(where, f"expected a JSON object, found {_kind(fields)}")
    try:
        # Python's parser accepts half of a surrogate pair; no tokenizer does.
        json.dumps(fields, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        half = ord(error.object[error.start])
        return DataError(where, f"text holds \\u{half:04x}, half of a surrogate pair; write both halves or \\ufffd")
    except RecursionError:
        return DataError(where, TOO_DEEP)
    return Row(fields, where)


def _open(path: str) -> Any:
    try:
        return open(path, "rb")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error


def _kind(value: Any) -> str:
    names = {list: "an array", dict: "an object", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


READERS: dict[str, Callable[[str], Iterator[Row | DataError]]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json_array,
    ".parquet": _read_parquet,
}
