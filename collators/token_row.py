"""One sequence to train on, read from columns: a feature of a collator or a row of a file.

Columns may be lists, arrays or tensors. Floats are aligned with the labels and not shifted: entry t belongs to token t,
which is predicted from the one before. They become float32 here, as in the tensor that an ordinary collator would make.
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
FLOATS = {"loss_weights": WEIGHT_NAMES, "old_logprobs": ("old_logprobs",), "advantages": ("advantages",)}
"""The floats that a row may have -> the names that their column may have."""
FLOAT_COLUMNS = frozenset(name for names in FLOATS.values() for name in names)
ONE_FOR_ALL = frozenset({"advantages"})  # may be a single number for all tokens
LOSS_MASKS = ("completion_mask", "assistant_masks", "mask")


@dataclass(slots=True, eq=False)  # a frozen one takes 0.7 us more to make, half the time of reading a row
class TokenRow:
    """One sequence to train on.

    input_ids: (L,), int64. token ids.
    labels: (L,), int64. `labels[t]` is the target at position t, predicted from t - 1; -100 bears no loss.
    where: the file and line that it came from, or the number of a feature, for errors.
    loss_weights, old_logprobs, advantages: (L,), float32, aligned with the labels, 0 where there is none; None if the
        row has no such column. The first are factors of the labels' cross-entropies.
    position_ids: (L,), int64, or None if they count from 0.
    """

    input_ids: IntArray
    labels: IntArray
    where: str
    loss_weights: FloatArray | None = None
    old_logprobs: FloatArray | None = None
    advantages: FloatArray | None = None
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
        token bears loss. `position_ids` and `FLOATS` are optional, and so is an `attention_mask` that hides nothing.

    Raises DataError that names the column for: one that is not a flat list of integers (of numbers, for floats), or not
    as long as `input_ids`; a mask value other than 0 and 1; a hidden token; two names of the same floats; a float on a
    labelled token that float32 does not hold.
    """
    ids = _integers(columns, "input_ids", where)
    positions = _integers(columns, "position_ids", where, len(ids)) if has(columns, "position_ids") else None
    if has(columns, "attention_mask"):
        _check_hides_nothing(_mask(columns, "attention_mask", where, len(ids)), where)
    labels = _labels(columns, where, ids)
    floats: dict[str, Any] = {} if columns.keys().isdisjoint(FLOAT_COLUMNS) else _token_floats(columns, where, labels)
    return TokenRow(ids, labels, where, position_ids=positions, **floats)


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


def _token_floats(columns: Columns, where: str, labels: IntArray) -> dict[str, FloatArray]:
    """Read the floats of a row, each (L,), 0 on tokens without a label, whatever is given there."""
    given = {}
    for floats, names in FLOATS.items():
        named = [name for name in names if has(columns, name)]
        if len(named) > 1:
            raise DataError(where, f"{' and '.join(named)} are two names of one column; remove one")
        if named:
            given[floats] = _floats(columns, named[0], where, labels)
    return given


def _floats(columns: Columns, name: str, where: str, labels: IntArray) -> FloatArray:
    values = _column(columns, name, where, len(labels), "numbers", "fiu")
    with np.errstate(over="ignore", invalid="ignore"):
        floats = np.where(labels != IGNORE_INDEX, values, 0).astype(np.float32)
    if not np.isfinite(floats).all():
        place = int((~np.isfinite(floats)).argmax())
        raise DataError(where, f"{name} must be finite on labelled tokens: {name}[{place}] = {values[place]}")
    return floats


def _integers(columns: Columns, name: str, where: str, length: int | None = None) -> IntArray:
    return _column(columns, name, where, length, "integers", "iu").astype(np.int64, copy=False)


def _column(columns: Columns, name: str, where: str, length: int | None, what: str, kinds: str) -> np.ndarray:
    """Read a flat column; those in `ONE_FOR_ALL` may be one number.

    length: that of `input_ids`; None for these themselves. kinds: NumPy's letters of the dtypes that are accepted.
    """
    try:
        values = np.asarray(columns[name])
    except (TypeError, ValueError, RuntimeError):  # ragged lists; tensors on a device, or of a dtype of torch's own
        came = f"a {type(columns[name]).__name__} that NumPy cannot read"
        raise DataError(where, f"{name} must be a flat list of {what}, got {came}") from None
    if not values.ndim and name in ONE_FOR_ALL and length is not None:
        values = np.broadcast_to(values, length)
    if values.ndim != 1 or (len(values) and values.dtype.kind not in kinds):
        raise DataError(where, f"{name} must be a flat list of {what}, got {values.dtype} {values.shape}")
    if length not in (None, len(values)):
        raise DataError(where, f"{name} has {len(values)} entries, input_ids has {length}")
    return values
