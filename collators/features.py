"""Features, read and checked once, as NumPy arrays: what every collator and the oracle start from.

A feature is a mapping as Hugging Face's data sets yield it: `input_ids`, and labels or a mask for the loss. Its floats
are read by `token_floats.py`. Entries that no collator reads are ignored or refused by `unread.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from radixtrain.collators.targets import IGNORE_INDEX, FloatArray
from radixtrain.collators.token_floats import FLOAT_ENTRIES, token_floats
from radixtrain.collators.unread import HARMLESS, check_unread
from radixtrain.tree.arrays import IntArray

__all__ = ["FeatureArrays", "all_feature_arrays", "packed_positions"]

LOSS_MASKS = ("completion_mask", "assistant_masks", "mask")
READ = frozenset({"input_ids", "labels", *LOSS_MASKS, "attention_mask", "position_ids", "seq_lengths", *FLOAT_ENTRIES})
"""The entries of a feature that a collator reads."""
KNOWN = READ | HARMLESS


class FeatureArrays(NamedTuple):
    """One sequence, without its padding.

    input_ids: (L,), int64.
    labels: (L,), int64. unshifted; a token with -100 bears no loss.
    position_ids: (L,), int64, or None if they count from 0.
    num_left_padding: tokens that the attention mask hid before the first of these.
    loss_weights, old_logprobs, advantages: (L,), float32, aligned with the labels, 0 where there is none; None if the
        feature has no such entry.
    """

    input_ids: IntArray
    labels: IntArray
    position_ids: IntArray | None
    num_left_padding: int
    loss_weights: FloatArray | None = None
    old_logprobs: FloatArray | None = None
    advantages: FloatArray | None = None

    @property
    def is_counted_from_padding(self) -> bool:
        """Whether Hugging Face would count the positions from the left padding, as it does if none are given."""
        return self.num_left_padding > 0 and self.position_ids is None


def all_feature_arrays(features: Sequence[Mapping[str, Any]], loss_on_all: bool = False) -> list[FeatureArrays]:
    """Read features, each of which is one sequence.

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
    arrays = [_feature_arrays(feature, index, loss_on_all) for index, feature in enumerate(features)]
    for name in ("input_ids", "labels", "position_ids"):
        _check_not_negative(name, arrays)
    for name in ("old_logprobs", "advantages"):
        _check_in_all(name, arrays)
    return arrays


def packed_positions(arrays: Sequence[FeatureArrays]) -> IntArray | None:
    """Positions of all features back to back, from 0 in features that have none; None if no feature has any."""
    if all(feature.position_ids is None for feature in arrays):
        return None
    counted = (np.arange(len(feature.input_ids)) for feature in arrays)
    given = (feature.position_ids for feature in arrays)
    return np.concatenate([own if own is not None else from_0 for own, from_0 in zip(given, counted, strict=True)])


def _feature_arrays(feature: Mapping[str, Any], index: int, loss_on_all: bool) -> FeatureArrays:
    """One feature's arrays, checked except for negative values."""
    try:
        is_known = feature.keys() <= KNOWN
    except AttributeError:
        kind = type(feature).__name__
        raise ValueError(f"feature {index} must be a mapping such as a dict, got {kind}") from None
    if feature.get("input_ids") is None:
        raise ValueError(f"feature {index} has no input_ids, only {sorted(map(str, feature))}")
    if not is_known:
        check_unread({name: value for name, value in feature.items() if name not in READ}, index)
    ids = _integers(feature, "input_ids", index)
    if not len(ids):
        raise ValueError(f"feature {index}: input_ids is empty")
    positions = _column(feature, "position_ids", ids, index) if feature.get("position_ids") is not None else None
    labels = _labels(feature, ids, index, loss_on_all)
    floats = {} if feature.keys().isdisjoint(FLOAT_ENTRIES) else token_floats(feature, labels, index)
    sequence = FeatureArrays(ids, labels, positions, 0, **floats)
    if feature.get("attention_mask") is not None:
        sequence = _without_padding(sequence, feature, index)
    _check_one_sequence(feature, sequence.position_ids, index)
    return sequence


def _labels(feature: Mapping[str, Any], ids: IntArray, index: int, loss_on_all: bool) -> IntArray:
    if feature.get("labels") is not None:
        return _column(feature, "labels", ids, index)
    names = [name for name in LOSS_MASKS if feature.get(name) is not None]
    if not names and not loss_on_all:
        raise ValueError(
            f"feature {index} has neither labels nor {', '.join(LOSS_MASKS[:-1])} or {LOSS_MASKS[-1]}, so nothing says "
            f"where the loss is. "
            f"Hugging Face's Trainer drops the mask columns unless remove_unused_columns=False; "
            f"RadixCollator(loss_on_all=True) trains every token"
        )
    labels = ids
    for name in names:
        labels = np.where(_mask(feature, name, ids, index), labels, IGNORE_INDEX)
    return labels


def _without_padding(sequence: FeatureArrays, feature: Mapping[str, Any], index: int) -> FeatureArrays:
    """Without the tokens on the left and on the right that the attention mask hides."""
    mask = _mask(feature, "attention_mask", sequence.input_ids, index)
    num_seen = np.count_nonzero(mask)
    if num_seen == len(mask):
        return sequence
    if not num_seen:
        raise ValueError(f"feature {index}: attention_mask hides every token, so the sequence is empty")
    start, end = int(mask.argmax()), len(mask) - int(mask[::-1].argmax())
    if num_seen != end - start:
        raise ValueError(
            f"feature {index}: attention_mask has a hole at token {start + int(mask[start:end].argmin())}: it would be "
            f"dropped, and the tokens after it would move up; only padding on the left or on the right may be hidden. "
            f"Remove the hidden token from every column; or, if only the loss should skip it, set attention_mask to 1 "
            f"and labels to -100 there"
        )
    if feature.get("labels") is not None:
        _check_no_loss_on_padding(sequence.labels, mask, start, end, index)
    if np.count_nonzero(sequence.input_ids < 0):
        raise _negative("input_ids", sequence.input_ids, int(sequence.input_ids.argmin()), 0, index)
    columns = {name: column for name, column in sequence._asdict().items() if isinstance(column, np.ndarray)}
    kept = {name: column[start:end] for name, column in columns.items()}
    return sequence._replace(**kept, num_left_padding=start)


def _check_no_loss_on_padding(labels: IntArray, mask: npt.NDArray[np.bool_], start: int, end: int, index: int) -> None:
    """An ordinary model takes its loss from the labels, whatever the mask says."""
    bears_loss = labels != IGNORE_INDEX
    bears_loss[0] = False  # it is never predicted
    bears_loss[start + 1 : end] = False  # predicted from a token that is not hidden
    if np.count_nonzero(bears_loss):
        place = int(bears_loss.argmax())
        raise ValueError(
            f"feature {index}: labels[{place}] = {labels[place]} {'is predicted from' if mask[place] else 'lies on'} a "
            f"token that attention_mask hides, so an ordinary model would train on padding; set it to -100"
        )


def _check_one_sequence(feature: Mapping[str, Any], positions: IntArray | None, index: int) -> None:
    """Refuse a row into which another packer put several sequences: each would attend to those before it."""
    lengths = None if feature.get("seq_lengths") is None else _integers(feature, "seq_lengths", index)
    is_packed = lengths is not None and len(lengths) > 1
    if is_packed or (positions is not None and (positions[1:] == 0).any()):
        raise ValueError(
            f"feature {index} holds several packed sequences (its position_ids restart, or it has seq_lengths); turn "
            f"packing off: the collator packs, and shares what they have in common"
        )
    if lengths is not None and len(lengths) and lengths[0] != len(feature["input_ids"]):
        num_tokens = len(feature["input_ids"])
        raise ValueError(f"feature {index}: seq_lengths is {lengths[0]}, input_ids has {num_tokens} entries")


def _column(feature: Mapping[str, Any], name: str, ids: IntArray, index: int, kinds: str = "iu") -> IntArray:
    """An entry that is as long as `input_ids`."""
    values = _integers(feature, name, index, kinds)
    if len(values) != len(ids):
        raise ValueError(f"feature {index}: {name} has {len(values)} entries, input_ids has {len(ids)}")
    return values


def _mask(feature: Mapping[str, Any], name: str, ids: IntArray, index: int) -> npt.NDArray[np.bool_]:
    """True for 1. `count_nonzero`, because it takes 0.4 us for 128 entries, and `any` 2.2."""
    values = _column(feature, name, ids, index, "iub")
    mask = values == 1
    if np.count_nonzero(mask) != np.count_nonzero(values):
        place = int(((values != 0) & ~mask).argmax())
        raise ValueError(f"feature {index}: {name} must be 0 or 1: {name}[{place}] = {values[place]}")
    return mask


def _integers(feature: Mapping[str, Any], name: str, index: int, kinds: str = "iu") -> IntArray:
    """kinds: NumPy's letters of the dtypes that are accepted."""
    try:
        values = np.asarray(feature[name])
    except (TypeError, ValueError, RuntimeError):  # ragged lists; tensors on a device, or of a dtype of torch's own
        raise _no_integers(name, kinds, f"a {type(feature[name]).__name__} that NumPy cannot read", index) from None
    dtype = values.dtype
    is_wrong = dtype.kind not in kinds or (dtype.kind == "u" and dtype.itemsize == 8)  # int64 does not hold those
    if values.ndim != 1 or (is_wrong and len(values)):
        raise _no_integers(name, kinds, f"{dtype} {values.shape}", index)
    return values.astype(np.int64, copy=False)


def _no_integers(name: str, kinds: str, came: str, index: int) -> ValueError:
    wanted = "integers or booleans" if "b" in kinds else "integers"
    return ValueError(f"feature {index}: {name} must be a flat list of {wanted}, got {came}")


def _check_not_negative(name: str, arrays: Sequence[FeatureArrays]) -> None:
    """All features at once: checking each by itself took 4 us for each, longer than the prefix plan."""
    columns = [getattr(feature, name) for feature in arrays]
    given = {index: values for index, values in enumerate(columns) if values is not None}
    packed = np.concatenate([*given.values(), np.zeros(0, dtype=np.int64)])
    is_wrong = (packed < 0) & (packed != IGNORE_INDEX) if name == "labels" else packed < 0
    if not is_wrong.any():
        return
    place = int(is_wrong.argmax())
    for index, values in given.items():
        if place < len(values):
            raise _negative(name, values, place, arrays[index].num_left_padding, index)
        place -= len(values)


def _check_in_all(name: str, arrays: Sequence[FeatureArrays]) -> None:
    """Floats for which no number stands if they are missing."""
    has = next((index for index, feature in enumerate(arrays) if getattr(feature, name) is not None), None)
    if has is None:
        return
    for index, feature in enumerate(arrays):
        if getattr(feature, name) is None and (feature.labels[1:] != IGNORE_INDEX).any():
            raise ValueError(f"feature {index} bears loss and has no {name}, but feature {has} has some")


def _negative(name: str, values: IntArray, place: int, num_left_padding: int, index: int) -> ValueError:
    entry = f"{name}[{num_left_padding + place}] = {values[place]}"
    return ValueError(f"feature {index}: {name} must not be negative: {entry}")
