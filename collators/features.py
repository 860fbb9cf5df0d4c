"""Features, read and checked once, as token rows: the input of every collator and of the oracle.

A feature is a mapping as Hugging Face's data sets yield it: `input_ids`, and labels or a mask for the loss.

A collator drops what it does not read. If a model read such an entry, the gradient would change, so an entry that could
be a model input is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import date, time, timedelta
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from radixtrain.collators.token_row import (
    IGNORE_INDEX,
    LOSS_MASKS,
    WEIGHT_NAMES,
    FloatArray,
    TokenRow,
    has,
    read_token_row,
)
from radixtrain.errors import DataError
from radixtrain.tree.arrays import IntArray, back_to_back, cumulative

READ = frozenset({"input_ids", "labels", *LOSS_MASKS, "attention_mask", "position_ids", "seq_lengths", *WEIGHT_NAMES})
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
_METADATA = (str, bytes, dict, date, time, timedelta, np.datetime64, np.timedelta64)
KNOWN = READ | HARMLESS


def token_rows(features: Sequence[Mapping[str, Any]], loss_on_all: bool = False) -> list[TokenRow]:
    """Read and check features, one sequence each.

    loss_on_all: a feature that has neither labels nor a loss mask bears loss on every token; otherwise it is refused.

    Raises ValueError for an empty list of features. Raises ValueError that names the feature and its entry for: no
    labels and no loss mask; an entry that is not a flat list of integers (of finite numbers, for loss weights), or not
    as long as `input_ids`; a negative integer; a mask value other than 0 and 1; an empty sequence; packed ones; a token
    that the attention mask hides; and an entry that a collator does not read, unless it cannot be an input of a model.
    """
    if not features:
        raise ValueError("a collator needs at least one feature, got an empty list")
    try:
        rows = [_token_row(feature, index, loss_on_all) for index, feature in enumerate(features)]
        for name in ("input_ids", "labels", "position_ids"):
            _check_not_negative(name, rows)
    except DataError as error:  # a DataLoader worker cannot pickle that one
        raise ValueError(str(error)) from None
    return rows


class PackedFeatures(NamedTuple):
    """Several features, concatenated.

    input_ids, labels: (T,), int64.
    cu_seqlens: (B+1,), int64. where each begins, and the end.
    position_ids: (T,), int64, from 0 in features that have none; None if no feature has any.
    loss_weights: (T,), float32, 1 in features that have none; None if no feature has any.
    """

    input_ids: IntArray
    labels: IntArray
    cu_seqlens: IntArray
    position_ids: IntArray | None
    loss_weights: FloatArray | None


def packed(arrays: Sequence[TokenRow]) -> PackedFeatures:
    """Concatenate one or more features."""
    lengths = [len(feature.input_ids) for feature in arrays]

    def column(name: str, default: Callable[[int], np.ndarray] = np.arange) -> Any:
        columns = [getattr(feature, name) for feature in arrays]
        if all(values is None for values in columns):
            return None
        return np.concatenate([default(n) if x is None else x for x, n in zip(columns, lengths, strict=True)])

    weights = column("loss_weights", partial(np.ones, dtype=np.float32))
    return PackedFeatures(
        column("input_ids"), column("labels"), cumulative(np.array(lengths)), column("position_ids"), weights
    )


def _token_row(feature: Mapping[str, Any], index: int, loss_on_all: bool) -> TokenRow:
    """Read one feature and check it, except for negative values."""
    where = f"feature {index}"
    try:
        is_known = feature.keys() <= KNOWN
    except AttributeError:
        raise DataError(where, f"expected a mapping such as a dict, got {type(feature).__name__}") from None
    if not has(feature, "input_ids"):
        raise DataError(where, f"it has no input_ids, only {sorted(map(str, feature))}")
    if not is_known:
        _check_unread(feature, where)
    row = read_token_row(feature, where)
    if not len(row.input_ids):
        raise DataError(where, "input_ids is empty")
    if not (loss_on_all or has(feature, "labels") or any(has(feature, name) for name in LOSS_MASKS)):
        raise DataError(
            where,
            f"it has neither labels nor {', '.join(LOSS_MASKS[:-1])} or {LOSS_MASKS[-1]}, so nothing says where the "
            f"loss is. Hugging Face's Trainer drops the mask columns unless remove_unused_columns=False; "
            f"RadixCollator(loss_on_all=True) trains every token",
        )
    restarts = row.position_ids is not None and (row.position_ids[1:] == 0).any()
    is_packed = has(feature, "seq_lengths") and np.ravel(feature["seq_lengths"]).tolist() != [len(row.input_ids)]
    if restarts or is_packed:  # each sequence would attend to those before it
        raise DataError(
            where,
            "it holds packed sequences (its position_ids restart, or it has seq_lengths); turn packing off: the "
            "collator packs, and shares what they have in common",
        )
    return row


def _check_not_negative(name: str, rows: Sequence[TokenRow]) -> None:
    """Check all rows together: one at a time took 4 us per row, longer than the prefix plan."""
    given = [(row.where, getattr(row, name)) for row in rows if getattr(row, name) is not None]
    values, bounds = back_to_back([values for _, values in given])
    is_wrong = values < 0
    if name == "labels":
        is_wrong &= values != IGNORE_INDEX
    if is_wrong.any():
        place = int(is_wrong.argmax())
        number = int(np.searchsorted(bounds, place, side="right")) - 1
        entry = f"{name}[{place - bounds[number]}] = {values[place]}"
        raise DataError(given[number][0], f"{name} must not be negative: {entry}")


def check_no_weights(arrays: Sequence[TokenRow]) -> None:
    """Refuse features with loss weights for a batch whose loss the model computes: it would ignore them.

    Raises ValueError that names the feature.
    """
    for index, feature in enumerate(arrays):
        if feature.loss_weights is not None:
            raise ValueError(
                f"feature {index} has loss_weights, which the loss of a Hugging Face model ignores, so its gradient "
                f"would differ. Collate with merge_labels=True and take radixtrain's loss "
                f"(radixtrain.loss.linear_cross_entropy), or remove the entry"
            )


def _check_unread(feature: Mapping[str, Any], where: str) -> None:
    """Refuse an image, video or audio, a path to one too, and any other entry that could be a model input.

    Ignores `HARMLESS` names, and text, None, a dict, a date or a list of those.
    """
    for name in feature.keys() - KNOWN:
        leaf = _first_leaf(feature[name])
        if name in _MEDIA:  # other features of the data have some
            has_length = hasattr(leaf, "__len__") and getattr(leaf, "ndim", None) != 0
            is_ignored = leaf is None or (has_length and not len(leaf))
        else:
            is_ignored = leaf is None or isinstance(leaf, _METADATA)
        if not is_ignored:
            raise DataError(
                where,
                f"{name} ({type(feature[name]).__name__}) is not read by a RadixCollator, and a model or loss that "
                f"reads it would train differently; remove the column, or use share_prefixes(model) and the collator "
                f"of an ordinary trainer (a loss of your own finds numbers of a token by radix.label_indices)",
            )


def _first_leaf(value: object) -> Any:
    """Return the first entry of nested lists and arrays that is not None; None if there is no other."""
    if isinstance(value, np.ndarray) and value.ndim:
        value = list(value)
    if not isinstance(value, list | tuple):
        return value
    return next((leaf for leaf in map(_first_leaf, value) if leaf is not None), None)
