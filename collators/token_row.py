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
    num_left_padding: tokens that the attention mask hid before the first of these.
    """

    input_ids: IntArray
    labels: IntArray
    where: str
    loss_weights: FloatArray | None = None
    old_logprobs: FloatArray | None = None
    advantages: FloatArray | None = None
    position_ids: IntArray | None = None
    num_left_padding: int = 0

    @property
    def num_labels(self) -> int:
        """Count the tokens that bear loss. The first one is never predicted, so its label does not count."""
        return int(np.count_nonzero(self.labels[1:] != IGNORE_INDEX))

    @property
    def is_counted_from_padding(self) -> bool:
        """Return whether Hugging Face would count the positions from the left padding, as it does if none are given."""
        return self.num_left_padding > 0 and self.position_ids is None

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
    """Read a row, with its padding.

    columns: `input_ids`, and `labels` or else any of `LOSS_MASKS`, 1 for a token that bears loss. Without these every
        token bears loss. `position_ids` and `FLOATS` are optional.

    Raises DataError that names the column for: one that is not a flat list of integers (of numbers, for floats), or not
    as long as `input_ids`; a mask value other than 0 and 1; two names of the same floats; a float on a labelled token
    that float32 does not hold.
    """
    ids = read_integers(columns, "input_ids", where)
    positions = _column(columns, "position_ids", ids, where) if columns.get("position_ids") is not None else None
    labels = _labels(columns, ids, where)
    floats: dict[str, Any] = {} if columns.keys().isdisjoint(FLOAT_COLUMNS) else _token_floats(columns, labels, where)
    return TokenRow(ids, labels, where, position_ids=positions, **floats)


def attended_span(columns: Columns, row: TokenRow) -> tuple[int, int]:
    """Return the start and end of the tokens that `attention_mask` does not hide; (0, 0) if it hides all.

    Raises DataError for a mask with a hole, one of other values than 0 and 1, or not as long as the row.
    """
    mask = _mask(columns, "attention_mask", row.input_ids, row.where)
    num_seen = np.count_nonzero(mask)
    if not num_seen:
        return 0, 0
    start, end = int(mask.argmax()), len(mask) - int(mask[::-1].argmax())
    if num_seen != end - start:
        raise DataError(
            row.where,
            f"attention_mask has a hole at token {start + int(mask[start:end].argmin())}: it would be dropped, and the "
            f"tokens after it would move up; only padding on the left or on the right may be hidden. Remove the hidden "
            f"token from every column; or, if only the loss should skip it, set attention_mask to 1 and labels to -100 "
            f"there",
        )
    return start, end


def read_integers(columns: Columns, name: str, where: str, kinds: str = "iu") -> IntArray:
    """Read a flat column. kinds: NumPy's letters of the dtypes that are accepted."""
    wanted = f"a flat list of {'integers or booleans' if 'b' in kinds else 'integers'}"
    values = _array(columns, name, wanted, where)
    dtype = values.dtype
    is_wrong = dtype.kind not in kinds or (dtype.kind == "u" and dtype.itemsize == 8)  # int64 does not hold those
    if values.ndim != 1 or (is_wrong and len(values)):
        raise _wrong_type(name, wanted, f"{dtype} {values.shape}", where)
    return values.astype(np.int64, copy=False)


def _labels(columns: Columns, ids: IntArray, where: str) -> IntArray:
    if columns.get("labels") is not None:
        return _column(columns, "labels", ids, where)
    labels = ids
    for name in LOSS_MASKS:
        if columns.get(name) is not None:
            labels = np.where(_mask(columns, name, ids, where), labels, IGNORE_INDEX)
    return labels


def _column(columns: Columns, name: str, ids: IntArray, where: str, kinds: str = "iu") -> IntArray:
    """Read a column that has to be as long as `input_ids`."""
    values = read_integers(columns, name, where, kinds)
    _check_length(name, values, ids, where)
    return values


def _check_length(name: str, values: np.ndarray, ids: IntArray, where: str) -> None:
    if len(values) != len(ids):
        raise DataError(where, f"{name} has {len(values)} entries, input_ids has {len(ids)}")


def _mask(columns: Columns, name: str, ids: IntArray, where: str) -> BoolArray:
    """Read a 0/1 column as bool. `count_nonzero` takes 0.4 us for 128 entries, `any` 2.2."""
    values = _column(columns, name, ids, where, "iub")
    mask = values == 1
    if np.count_nonzero(mask) != np.count_nonzero(values):
        place = int(((values != 0) & ~mask).argmax())
        raise DataError(where, f"{name} must be 0 or 1: {name}[{place}] = {values[place]}")
    return mask


def _token_floats(columns: Columns, labels: IntArray, where: str) -> dict[str, FloatArray]:
    """Read the floats of a row, each (L,), 0 on tokens without a label, whatever is given there."""
    given = {}
    for floats, names in FLOATS.items():
        named = [name for name in names if columns.get(name) is not None]
        if len(named) > 1:
            raise DataError(where, f"{' and '.join(named)} are two names of one column; remove one")
        if named:
            given[floats] = _floats(columns, named[0], labels, where)
    return given


def _floats(columns: Columns, name: str, labels: IntArray, where: str) -> FloatArray:
    wanted = "a flat list of numbers" + (" or one number" if name in ONE_FOR_ALL else "")
    values = _array(columns, name, wanted, where)
    is_one_for_all = name in ONE_FOR_ALL and values.ndim == 0
    if values.dtype.kind not in "fiu" or not (values.ndim == 1 or is_one_for_all):
        raise _wrong_type(name, wanted, f"{values.dtype} {values.shape}", where)
    if not is_one_for_all:
        _check_length(name, values, labels, where)
    with np.errstate(over="ignore", invalid="ignore"):
        floats = np.where(labels != IGNORE_INDEX, values, 0).astype(np.float32)
    if not np.isfinite(floats).all():
        place = int((~np.isfinite(floats)).argmax())
        came = values if is_one_for_all else values[place]
        raise DataError(where, f"{name} must be finite on labelled tokens: {name}[{place}] = {came}")
    return floats


def _array(columns: Columns, name: str, wanted: str, where: str) -> np.ndarray:
    try:
        return np.asarray(columns[name])
    except (TypeError, ValueError, RuntimeError):  # ragged lists; tensors on a device, or of a dtype of torch's own
        raise _wrong_type(name, wanted, f"a {type(columns[name]).__name__} that NumPy cannot read", where) from None


def _wrong_type(name: str, wanted: str, came: str, where: str) -> DataError:
    return DataError(where, f"{name} must be {wanted}, got {came}")
