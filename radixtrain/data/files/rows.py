"""A row of a file: strict JSON to columns, and the config's `columns`, which maps their names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from radixtrain.errors import DataError, UserError

TOO_DEEP = "not valid JSON: nested too deeply to be read"


class Row(NamedTuple):
    """One row of a data file, as read.

    fields: column name to value.
    where: `train.jsonl:17` (line, counted from 1) or `train.parquet:row 17` (row, counted from 1).
    unread: columns of the file that are not in `fields`, because the mapping `columns` does not name them.
    keys: of messages, theirs to ours; None leaves one out.
    """

    fields: dict[str, Any]
    where: str
    unread: Mapping[str, Any] = MappingProxyType({})
    keys: Mapping[str, str | None] = MappingProxyType({})

    def read(self) -> Row:
        """Return the row itself, as `UnreadRow.read` does."""
        return self


class UnreadRow(NamedTuple):
    """A row as a file holds it. A line of JSON is not parsed yet, so that another process can do it.

    content: the JSON; or the columns; or what is wrong with the row.
    where: as in `Row`. columns: of the source, see `map_columns`.
    """

    content: bytes | dict[str, Any] | DataError
    where: str
    columns: Mapping[str, str | None] | None = None

    def read(self) -> Row:
        """Parse the row and rename its columns by the mapping. Raises DataError if it is bad or a column is missing."""
        if isinstance(self.content, DataError):
            raise self.content
        fields = read_fields(self.content, self.where) if isinstance(self.content, bytes) else self.content
        if self.columns is None:
            return Row(fields, self.where)
        mapped, unread = map_columns(fields, self.columns, self.where)
        return Row(mapped, self.where, unread, keys_of_messages(self.columns))


def read_fields(line: bytes, where: str) -> dict[str, Any]:
    """Parse a line of JSON. Raises DataError if it is not valid JSON in UTF-8, or not an object."""
    hint = "; a file that holds one array of rows is named .json" if line.startswith(b"[") else ""
    try:
        text = line.decode("utf-8")
        fields = parse(text)
        written = json.dumps(fields, ensure_ascii=False) if "\\ud" in text.lower() else ""
    except (ValueError, RecursionError) as error:
        raise DataError(where, f"{explain(error)}{hint}") from None
    if not isinstance(fields, dict):
        raise DataError(where, f"expected a JSON object, found {kind_of(fields)}{hint}")
    check_encodable(written, where)
    return fields


def parse(text: str) -> Any:
    """Parse a JSON text, whose objects must hold each key once.

    Raises ValueError or RecursionError, for which `explain` has the words.
    """
    return DECODER.decode(text)


def parsed(text: str, name: str, where: str, hint: str = "") -> Any:
    """Parse a JSON text inside of a row. Raises DataError, by the name of the text, if it is not valid."""
    try:
        return parse(text)
    except (ValueError, RecursionError) as error:
        raise DataError(where, f"{name}: {explain(error)}{hint}") from None


def explain(error: ValueError | RecursionError) -> str:
    """Say what is wrong with a JSON text or its bytes, in a line."""
    if isinstance(error, RecursionError):
        return TOO_DEEP
    if isinstance(error, UnicodeDecodeError):
        position = f"byte 0x{error.object[error.start]:02x} at offset {error.start}"
        return f"not valid UTF-8: {position}; save the file as UTF-8"
    if not isinstance(error, json.JSONDecodeError):
        return str(error)
    position = f"column {error.colno}" if error.lineno == 1 else f"line {error.lineno}, column {error.colno}"
    return f"not valid JSON: {error.msg.removesuffix(' at')} at {position}"


def check_encodable(text: str, where: str) -> None:
    """Raise DataError if a text holds half of a surrogate pair, on which tokenizers fail without naming the row."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        reason = f"text holds \\u{ord(text[error.start]):04x}, half of a surrogate pair"
        raise DataError(where, f"{reason}; write both halves or \\ufffd") from None


def kind_of(value: object) -> str:
    """Return what JSON calls a value: an array, an object, a string ..."""
    names = {list: "an array", dict: "an object", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"key {twice!r} occurs more than once in one object; keep one of its values")
    return fields


def _refuse_constant(name: str) -> None:
    raise ValueError(f"not valid JSON: {name} is not a JSON number")


DECODER = json.JSONDecoder(object_pairs_hook=_unique_keys, parse_constant=_refuse_constant)


STANDARD_COLUMNS = (
    *("messages", "prompt", "completion", "user", "assistant", "system", "instruction", "input", "output"),
    *("conversations", "text", "tools", "chat_template_kwargs"),
    *("input_ids", "labels", "completion_mask", "assistant_masks", "mask", "loss_weights"),
)
OF_MESSAGES = "messages."
OF_TOKENS = (
    *("labels", "completion_mask", "assistant_masks", "mask"),
    *("loss_weights", "weights", "advantages", "old_logprobs", "attention_mask"),
)
RIDERS = ("system", "tools", "chat_template_kwargs")  # read with a mapped chat, though the mapping does not name them
MAY_BE_ABSENT = ("input", *RIDERS)


def check_columns(columns: object, where: str) -> dict[str, str | None] | None:
    """Check the mapping: `{prompt: question, completion: answer}` reads the file's `question` as our `prompt`.

    columns: ours to theirs, or a column of the file to null, which leaves it out; `messages.KEY` is a key of every
        message. None or empty: no mapping.
    where: the config key, for the error.

    Raises UserError if a name is not one of our columns, or one of theirs is not text or is named twice.
    """
    if not columns:
        return None
    expected = f"{where}: expected a mapping of our columns to those of the file, such as {{prompt: question}}"
    if not isinstance(columns, Mapping):
        raise UserError(f"{expected}, found {columns!r}")
    for ours, theirs in columns.items():
        if theirs is not None and not isinstance(theirs, str):
            raise UserError(f"{expected}, found {ours}: {theirs!r}")
        if theirs is not None and ours not in STANDARD_COLUMNS and not str(ours).startswith(OF_MESSAGES):
            known = f"ours come first, and are {', '.join(STANDARD_COLUMNS)}, and messages.KEY"
            raise UserError(f"{where}: {ours}: {theirs}: {ours!r} is not one of our columns; {known}")
    named = [theirs for theirs in columns.values() if theirs is not None]
    if twice := sorted({theirs for theirs in named if named.count(theirs) > 1}):
        raise UserError(f"{where}: {', '.join(twice)} is named more than once; name each column of the file once")
    return dict(columns)


def keys_of_messages(columns: Mapping[str, str | None]) -> dict[str, str | None]:
    """Return the keys of messages that a mapping names, theirs to ours; None leaves one out."""
    named = [(theirs or ours, theirs and ours) for ours, theirs in columns.items() if str(ours).startswith(OF_MESSAGES)]
    return {theirs.removeprefix(OF_MESSAGES): ours and ours.removeprefix(OF_MESSAGES) for theirs, ours in named}


def map_columns(
    fields: dict[str, Any], columns: Mapping[str, str | None], where: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the columns of a row under our names; and those that the mapping neither reads nor leaves out.

    Reads only what the mapping names, and system, tools and chat_template_kwargs; beside `input_ids` also labels,
    masks and weights. A mapping that only leaves columns out, such as `{label: null}`, reads all the others.

    Raises DataError if the row lacks a column that the mapping names, unless it is one that a row may go without.
    """
    taken = {theirs: ours for ours, theirs in columns.items() if theirs and not str(ours).startswith(OF_MESSAGES)}
    for theirs, ours in taken.items():
        if theirs not in fields and ours not in MAY_BE_ABSENT:
            found = ", ".join(map(str, fields)) or "none"
            raise DataError(where, f"columns: {ours}: the row has no column {theirs!r}; it has {found}")
    mapped = {ours: fields[theirs] for theirs, ours in taken.items() if theirs in fields}
    riders = {*RIDERS, *(OF_TOKENS if "input_ids" in columns else ())}  # labels and masks belong to their tokens
    unread: dict[str, Any] = {}
    for name, value in fields.items():
        if name in taken or (name in columns and columns[name] is None):
            continue
        is_read = not taken or (name in riders and name not in columns)
        (mapped if is_read else unread)[name] = value
    return mapped, unread
