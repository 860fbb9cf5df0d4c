"""One sequence to train on, read from columns: a feature of a collator or a row of a file.

Columns may be lists, arrays or tensors. Weights are aligned with the labels and not shifted: entry t belongs to token
t, which is predicted from the one before. They become float32 here, as in the tensor that an ordinary collator makes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from radixtrain.errors import DataError
from radixtrain.tree.arrays import IntArray

FloatArray: TypeAlias = npt.NDArray[np.float32]
BoolArray: TypeAlias = npt.NDArray[np.bool_]
Columns: TypeAlias = Mapping[str, Any]
"""The columns of a row, by name; None counts as absent."""
IGNORE_INDEX = -100
WEIGHT_NAMES = ("loss_weights", "weights")
LOSS_MASKS = ("completion_mask", "assistant_masks", "mask")


@dataclass(slots=True, eq=False)  # a frozen one takes 0.7 us more to make, half the time of reading a row
class TokenRow:
    """One sequence to train on.

    input_ids: (L,), int64. token ids.
    labels: (L,), int64. `labels[t]` is the target at position t, predicted from t - 1; -100 bears no loss.
    where: the file and line that it came from, or the number of a feature, for errors.
    loss_weights: (L,), float32. factors of the labels' cross-entropies, 0 where there is no label; None if the row has
        no such column.
    position_ids: (L,), int64, or None if they count from 0.
    """

    input_ids: IntArray
    labels: IntArray
    where: str
    loss_weights: FloatArray | None = None
    position_ids: IntArray | None = None

    @property
    def num_labels(self) -> int:
        """Count the tokens that bear loss. The first one is never predicted, so its label does not count."""
        return int(np.count_nonzero(self.labels[1:] != IGNORE_INDEX))

    @property
    def columns(self) -> dict[str, np.ndarray]:
        """Return the columns that the row has, as a collator takes them."""
        fields = ((name, getattr(self, name)) for name in self.__slots__)
        return {name: column for name, column in fields if isinstance(column, np.ndarray)}

    def part(self, start: int, end: int) -> TokenRow:
        """Return the tokens from `start` to `end`."""
        cut: dict[str, Any] = {name: column[start:end] for name, column in self.columns.items()}
        return replace(self, **cut)


def read_token_row(columns: Columns, where: str) -> TokenRow:
    """Read a row.

    columns: `input_ids`, and `labels` or else any of `LOSS_MASKS`, 1 for a token that bears loss. Without these every
        token bears loss. `position_ids` and `loss_weights` (or `weights`) are optional, and so is an `attention_mask`
        that hides nothing.

    Raises DataError that names the column for: one that is not a flat list of integers (of numbers, for weights), or
    not as long as `input_ids`; a mask value other than 0 and 1; a hidden token; both names of the weights; a weight of
    a labelled token that float32 does not hold.
    """
    ids = _integers(columns, "input_ids", where)
    positions = _integers(columns, "position_ids", where, len(ids)) if has(columns, "position_ids") else None
    if has(columns, "attention_mask"):
        _check_hides_nothing(_mask(columns, "attention_mask", where, len(ids)), where)
    labels = _labels(columns, where, ids)
    return TokenRow(ids, labels, where, _loss_weights(columns, where, labels), positions)


def has(columns: Columns, name: str) -> bool:
    """Return whether a row has a column; None counts as absent."""
    return columns.get(name) is not None


def _check_hides_nothing(mask: BoolArray, where: str) -> None:
    if np.count_nonzero(mask) < len(mask):
        raise DataError(
            where,
            f"attention_mask[{int(mask.argmin())}] is 0, and a row has no padding here: tokenize without padding, or "
            f"remove the hidden tokens from every column; if only the loss should skip them, set attention_mask to 1 "
            f"and labels to -100 there",
        )


def _labels(columns: Columns, where: str, ids: IntArray) -> IntArray:
    if has(columns, "labels"):
        return _integers(columns, "labels", where, len(ids))
    labels = ids
    for name in LOSS_MASKS:
        if has(columns, name):
            labels = np.where(_mask(columns, name, where, len(ids)), labels, IGNORE_INDEX)
    return labels


def _mask(columns: Columns, name: str, where: str, length: int) -> BoolArray:
    """Read a 0/1 column as bool. `count_nonzero` takes 0.4 us for 128 entries, `any` 2.2."""
    values = _column(columns, name, where, length, "integers or booleans", "iub")
    mask = values == 1
    if np.count_nonzero(mask) != np.count_nonzero(values):
        place = int(((values != 0) & ~mask).argmax())
        raise DataError(where, f"{name} must be 0 or 1: {name}[{place}] = {int(values[place])}")
    return mask


def _loss_weights(columns: Columns, where: str, labels: IntArray) -> FloatArray | None:
    """Read the weights, 0 on tokens without a label, whatever is given there."""
    named = [name for name in WEIGHT_NAMES if has(columns, name)]
    if not named:
        return None
    if len(named) > 1:
        raise DataError(where, f"{' and '.join(named)} are two names of one column; remove one")
    values = _column(columns, named[0], where, len(labels), "numbers", "fiu")
    with np.errstate(over="ignore", invalid="ignore"):
        weights = np.where(labels != IGNORE_INDEX, values, 0).astype(np.float32)
    if not np.isfinite(weights).all():
        place = int((~np.isfinite(weights)).argmax())
        raise DataError(where, f"{named[0]} must be finite on labelled tokens: {named[0]}[{place}] = {values[place]}")
    return weights


def _integers(columns: Columns, name: str, where: str, length: int | None = None) -> IntArray:
    values = _column(columns, name, where, length, "integers", "iu")
    if values.dtype == np.uint64 and (values >= 2**63).any():
        raise DataError(where, f"{name} must be below 2^63: {name}[{int(values.argmax())}] = {values.max()}")
    return values.astype(np.int64, copy=False)


def _column(columns: Columns, name: str, where: str, length: int | None, what: str, kinds: str) -> np.ndarray:
    """Read a flat column.

    length: that of `input_ids`; None for these themselves. kinds: NumPy's letters of the dtypes that are accepted.
    """
    try:
        values = np.asarray(columns[name])
    except (TypeError, ValueError, RuntimeError):  # ragged lists; tensors on a device, or of a dtype of torch's own
        came = f"a {type(columns[name]).__name__} that NumPy cannot read"
        raise DataError(where, f"{name} must be a flat list of {what}, got {came}") from None
    if values.ndim != 1 or (len(values) and values.dtype.kind not in kinds):
        raise DataError(where, f"{name} must be a flat list of {what}, got {values.dtype} {values.shape}")
    if length not in (None, len(values)):
        raise DataError(where, f"{name} has {len(values)} entries, input_ids has {length}")
    return values
