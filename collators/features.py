"""Features, read and checked once, as token rows: the input of every collator and of the oracle.

A feature is a mapping as Hugging Face's data sets yield it: `input_ids`, and labels or a mask for the loss.

A collator drops what it does not read. If a model read such an entry, the gradient would change, so an entry that could
be a model input is refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import date, time, timedelta
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from radixtrain.collators.token_row import (
    FLOAT_COLUMNS,
    FLOATS,
    IGNORE_INDEX,
    LOSS_MASKS,
    FloatArray,
    TokenRow,
    attended_span,
    read_integers,
    read_token_row,
)
from radixtrain.errors import DataError
from radixtrain.tree.arrays import IntArray, cumulative

READ = frozenset({"input_ids", "labels", *LOSS_MASKS, "attention_mask", "position_ids", "seq_lengths", *FLOAT_COLUMNS})
"""The entries of a feature that a collator reads."""
HARMLESS = frozenset(
    (
        *("length", "num_tokens", "num_truncated_tokens", "overflowing_tokens"),  # sizes, and what a tokenizer cut off
        *("special_tokens_mask", "offset_mapping", "overflow_to_sample_mapping"),  # a tokenizer's notes on its tokens
        *("id", "idx", "index", "row_id", "__index_level_0__"),  # which example it is; the last name is from pandas
    )
)
"""Bookkeeping numbers: accepted but not read, since no causal model of transformers takes them as input."""
_MEDIA = frozenset({"image", "images", "video", "videos", "audio", "audios"})  # paths and undecoded bytes too
_METADATA = (str, bytes, type(None), dict, date, time, timedelta)
_UNREAD = {
    r"^token_type_ids$": "is not read by radixtrain, and a model that reads it, such as GPT-2, would get another "
    "gradient; tokenize with tokenizer(..., return_token_type_ids=False), or remove the column",
    r"pixel|image|^mm_": "is not read by a RadixCollator: on rows with images, use share_prefixes(model) and the "
    "collator of an ordinary trainer; remove the column if the text is complete without it",
    r"video|audio|^input_features": "is not read by radixtrain: it trains on text and images only; remove the column "
    "if the text is complete without it",
    r"^inputs_embeds$": "is not read by radixtrain, which shares tokens by their ids; remove the column",
    r"": "is not read by radixtrain, and a model or loss that reads it would train differently; remove the column",
}
KNOWN = READ | HARMLESS


def token_rows(features: Sequence[Mapping[str, Any]], loss_on_all: bool = False) -> list[TokenRow]:
    """Read and check features, one sequence each.

    loss_on_all: a feature that has neither labels nor a loss mask bears loss on every token; otherwise it is refused.

    Raises ValueError for an empty list of features. Raises ValueError that names the feature and its entry for: no
    labels and no loss mask; an entry that is not a flat list of integers (of finite numbers, for loss weights,
    log-probabilities and advantages), or not as long as `input_ids`; a negative integer; a mask value other than 0 and
    1; an empty sequence; several packed ones; an attention mask with a hole; labels on padding; log-probabilities or
    advantages in only some of the features that bear loss; and an entry that a collator does not read, unless it cannot
    be an input of a model.
    """
    if not features:
        raise ValueError("a collator needs at least one feature, got an empty list")
    try:
        rows = [_token_row(feature, index, loss_on_all) for index, feature in enumerate(features)]
        for name in ("input_ids", "labels", "position_ids"):
            _check_not_negative(name, rows)
    except DataError as error:  # a DataLoader worker cannot pickle that one
        raise ValueError(str(error)) from None
    for name in ("old_logprobs", "advantages"):
        _check_in_all(name, rows)
    return rows


class PackedFeatures(NamedTuple):
    """Several features, concatenated.

    input_ids, labels: (T,), int64.
    cu_seqlens: (B+1,), int64. where each begins, and the end.
    position_ids: (T,), int64, from 0 in features that have none; None if no feature has any.
    floats: (T,), float32, of each kind that some feature has; 1 in features that have none.
    """

    input_ids: IntArray
    labels: IntArray
    cu_seqlens: IntArray
    position_ids: IntArray | None
    floats: dict[str, FloatArray]


def packed(arrays: Sequence[TokenRow]) -> PackedFeatures:
    """Concatenate one or more features."""
    lengths = [len(feature.input_ids) for feature in arrays]

    def column(name: str, default: Callable[[int], np.ndarray] = np.arange) -> Any:
        columns = [getattr(feature, name) for feature in arrays]
        if all(values is None for values in columns):
            return None
        return np.concatenate([default(n) if x is None else x for x, n in zip(columns, lengths, strict=True)])

    floats = {name: column(name, partial(np.ones, dtype=np.float32)) for name in FLOATS}
    return PackedFeatures(
        column("input_ids"),
        column("labels"),
        cumulative(np.array(lengths)),
        column("position_ids"),
        {name: values for name, values in floats.items() if values is not None},
    )


def _token_row(feature: Mapping[str, Any], index: int, loss_on_all: bool) -> TokenRow:
    """Read one feature and check it, except for negative values."""
    try:
        is_known = feature.keys() <= KNOWN
    except AttributeError:
        kind = type(feature).__name__
        raise ValueError(f"feature {index} must be a mapping such as a dict, got {kind}") from None
    if feature.get("input_ids") is None:
        raise ValueError(f"feature {index} has no input_ids, only {sorted(map(str, feature))}")
    if not is_known:
        _check_unread({name: value for name, value in feature.items() if name not in READ}, index)
    row = read_token_row(feature, f"feature {index}")
    if not len(row.input_ids):
        raise DataError(row.where, "input_ids is empty")
    if not loss_on_all and feature.get("labels") is None and all(feature.get(name) is None for name in LOSS_MASKS):
        raise ValueError(
            f"feature {index} has neither labels nor {', '.join(LOSS_MASKS[:-1])} or {LOSS_MASKS[-1]}, so nothing says "
            f"where the loss is. "
            f"Hugging Face's Trainer drops the mask columns unless remove_unused_columns=False; "
            f"RadixCollator(loss_on_all=True) trains every token"
        )
    if feature.get("attention_mask") is not None:
        row = _without_padding(row, feature)
    _check_one_sequence(feature, row, index)
    return row


def _without_padding(row: TokenRow, feature: Mapping[str, Any]) -> TokenRow:
    """Cut off the tokens on the left and on the right that the attention mask hides."""
    start, end = attended_span(feature, row)
    if (start, end) == (0, len(row.input_ids)):
        return row
    if start == end:
        raise DataError(row.where, "attention_mask hides every token, so the sequence is empty")
    if feature.get("labels") is not None:
        _check_no_loss_on_padding(row, start, end)
    if np.count_nonzero(row.input_ids < 0):
        raise _negative("input_ids", row, int(row.input_ids.argmin()))
    return replace(row.part(start, end), num_left_padding=start)


def _check_no_loss_on_padding(row: TokenRow, start: int, end: int) -> None:
    """Refuse labels on padding: an ordinary model takes its loss from the labels, whatever the mask says."""
    bears_loss = row.labels != IGNORE_INDEX
    bears_loss[0] = False  # it is never predicted
    bears_loss[start + 1 : end] = False  # predicted from a token that is not hidden
    if np.count_nonzero(bears_loss):
        place = int(bears_loss.argmax())
        raise DataError(
            row.where,
            f"labels[{place}] = {row.labels[place]} {'is predicted from' if place == start else 'lies on'} a token "
            f"that attention_mask hides, so an ordinary model would train on padding; set it to -100",
        )


def _check_one_sequence(feature: Mapping[str, Any], row: TokenRow, index: int) -> None:
    """Refuse a row into which another packer put several sequences: each would attend to the ones before it."""
    lengths = None if feature.get("seq_lengths") is None else read_integers(feature, "seq_lengths", row.where)
    is_packed = lengths is not None and len(lengths) > 1
    if is_packed or (row.position_ids is not None and (row.position_ids[1:] == 0).any()):
        raise ValueError(
            f"feature {index} holds several packed sequences (its position_ids restart, or it has seq_lengths); turn "
            f"packing off: the collator packs, and shares what they have in common"
        )
    if lengths is not None and len(lengths) and lengths[0] != len(feature["input_ids"]):
        num_tokens = len(feature["input_ids"])
        raise DataError(row.where, f"seq_lengths is {lengths[0]}, input_ids has {num_tokens} entries")


def _check_not_negative(name: str, rows: Sequence[TokenRow]) -> None:
    """Check all rows together: one at a time took 4 us per row, longer than the prefix plan."""
    given = [row for row in rows if getattr(row, name) is not None]
    ignored = IGNORE_INDEX if name == "labels" else 0
    together = np.concatenate([*(getattr(row, name) for row in given), np.zeros(0, dtype=np.int64)])
    if not ((together < 0) & (together != ignored)).any():
        return
    for row in given:
        values = getattr(row, name)
        if (is_wrong := (values < 0) & (values != ignored)).any():
            raise _negative(name, row, int(is_wrong.argmax()))


def _check_in_all(name: str, arrays: Sequence[TokenRow]) -> None:
    """Refuse features that lack floats which others have and for which there is no default."""
    has = next((index for index, feature in enumerate(arrays) if getattr(feature, name) is not None), None)
    if has is None:
        return
    for index, feature in enumerate(arrays):
        if getattr(feature, name) is None and feature.num_labels:
            raise ValueError(f"feature {index} bears loss and has no {name}, but feature {has} has some")


def _negative(name: str, row: TokenRow, place: int) -> ValueError:
    entry = f"{name}[{row.num_left_padding + place}] = {getattr(row, name)[place]}"
    return DataError(row.where, f"{name} must not be negative: {entry}")


def check_no_floats(arrays: Sequence[TokenRow]) -> None:
    """Refuse features with floats for a batch whose loss the model computes: it would ignore them.

    Raises ValueError that names the feature and the entry.
    """
    for index, feature in enumerate(arrays):
        for name in FLOATS:
            if getattr(feature, name) is not None:
                raise ValueError(
                    f"feature {index} has {name}, which the loss of a Hugging Face model ignores, so its gradient "
                    f"would differ. Collate with merge_labels=True and take radixtrain's loss "
                    f"(radixtrain.loss.linear_cross_entropy, or linear_logprobs and clipped_policy_loss), or remove "
                    f"the entry"
                )


def _check_unread(entries: Mapping[str, Any], index: int) -> None:
    """Refuse an image, video or audio, a path to one too, and any other entry that could be a model input.

    Ignores `HARMLESS` names, and text, None, a dict, a date or a list of those.

    entries: what the collator does not read of a feature. index: of the feature, for the error.

    Raises ValueError that names the feature and the entry.
    """
    for name, value in entries.items():
        if name in _MEDIA and _holds_nothing(value):
            continue  # a feature without media, in a data set whose other features have some
        if name in _MEDIA or not (name in HARMLESS or isinstance(value, _METADATA) or _is_metadata(value)):
            reason = next(reason for pattern, reason in _UNREAD.items() if re.search(pattern, str(name)))
            raise ValueError(f"feature {index}: {name} ({_kind_of(value)}) {reason}")


def _holds_nothing(value: object) -> bool:
    leaf = _first_leaf(value)
    return leaf is None or (hasattr(leaf, "__len__") and len(leaf) == 0)


def _is_metadata(value: object) -> bool:
    """Return whether a value is text, None, a dict, a date or a list of those, judged by its first entry."""
    leaf = _first_leaf(value)
    if isinstance(leaf, np.ndarray) and leaf.dtype.kind == "O":
        return _is_metadata(leaf.tolist())
    if isinstance(leaf, np.ndarray | np.generic):
        return leaf.dtype.kind in "USMm"
    return isinstance(leaf, _METADATA)


def _first_leaf(value: object) -> Any:
    """Return the first entry of nested lists that is not None; None if there is no other."""
    if not isinstance(value, list | tuple):
        return value
    return next((leaf for leaf in map(_first_leaf, value) if leaf is not None), None)


def _kind_of(value: object) -> str:
    shape = getattr(value, "shape", None)
    size = f" of {len(value)}" if isinstance(value, list | tuple) else f" of shape {tuple(shape)}" if shape else ""
    return f"{type(value).__name__}{size}"
