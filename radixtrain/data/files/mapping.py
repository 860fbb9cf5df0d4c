"""The config's `columns`: which column of a file is which of ours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from radixtrain.errors import DataError, UserError, did_you_mean

__all__ = ["OURS", "check_columns", "map_columns"]

OURS = (
    "messages",
    "prompt",
    "completion",
    "user",
    "assistant",
    "system",
    "instruction",
    "input",
    "output",
    "history",
    "conversations",
    "text",
    "tools",
    "chat_template_kwargs",
    "input_ids",
    "labels",
    "completion_mask",
    "assistant_masks",
    "mask",
    "loss_weights",
)
OF_TOKENS = (
    *("labels", "completion_mask", "assistant_masks", "mask", "loss_mask", "assistant_mask", "prompt_mask"),
    *("loss_weights", "weights", "advantages", "attention_mask", "position_ids", "seq_lengths"),
)
RIDERS = ("system", "tools", "chat_template_kwargs")  # read with a mapped chat, though the mapping does not name them
MAY_BE_ABSENT = ("input", "history", *RIDERS)


def check_columns(columns: Any, where: str) -> dict[str, str | None] | None:
    """The mapping, checked. `{prompt: question, completion: answer}` reads the file's `question` as our `prompt`.

    columns: ours to theirs, or a column of the file to null, which leaves it out. None or empty: no mapping.
    where: the config key, for the error.

    Raises UserError if a name is not one of ours, or one of theirs is not text or is named twice.
    """
    if not columns:
        return None
    expected = f"{where}: expected a mapping of our columns to those of the file, such as {{prompt: question}}"
    if not isinstance(columns, Mapping):
        raise UserError(f"{expected}, found {columns!r}")
    for ours, theirs in columns.items():
        if theirs is not None and not isinstance(theirs, str):
            raise UserError(f"{expected}, found {ours}: {theirs!r}")
        if theirs is not None and ours not in OURS:
            raise UserError(f"{where}: {_unknown(ours, theirs)}")
    named = [theirs for theirs in columns.values() if theirs is not None]
    if twice := sorted({theirs for theirs in named if named.count(theirs) > 1}):
        raise UserError(f"{where}: {', '.join(twice)} is named more than once; one column of the file is one of ours")
    return dict(columns)


def map_columns(
    fields: dict[str, Any], columns: Mapping[str, str | None], where: str
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The columns of a row under our names, and the names of those that are not read.

    Only what the mapping names is read, and system, tools and chat_template_kwargs; beside `input_ids` also labels,
    masks and weights. A mapping that only leaves columns out, such as `{label: null}`, reads all the others.

    Raises DataError if the row lacks a column that the mapping names, unless it is one that a row may go without.
    """
    taken = {theirs: ours for ours, theirs in columns.items() if theirs is not None}
    left_out = {ours for ours, theirs in columns.items() if theirs is None}
    for theirs, ours in taken.items():
        if theirs not in fields and ours not in MAY_BE_ABSENT:
            found = ", ".join(map(str, fields)) or "none"
            raise DataError(where, f"columns: {ours}: the row has no column {theirs!r}; it has {found}")
    kept = (name for name in fields if name not in left_out and name not in taken)
    riders = {*RIDERS, *(OF_TOKENS if "input_ids" in columns else ())}  # labels and masks belong to their tokens
    riding = [name for name in kept if not taken or (name in riders and name not in columns)]
    mapped = {ours: fields[theirs] for theirs, ours in taken.items() if theirs in fields}
    read = {*taken, *riding}
    return mapped | {name: fields[name] for name in riding}, tuple(name for name in fields if name not in read)


def _unknown(ours: Any, theirs: Any) -> str:
    if theirs in OURS:
        return f"write {theirs}: {ours} (our name first, then the file's)"
    meant = did_you_mean(str(ours), OURS, f"; ours are {', '.join(OURS)}")
    return f"{ours!r} is none of our columns{meant}"
