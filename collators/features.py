"""Features, read and checked once, as NumPy arrays: what every collator and the oracle start from.

A feature is a mapping as Hugging Face's data sets yield it: `input_ids` and what says where the loss is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from radixtrain.collators.targets import IGNORE_INDEX

__all__ = ["FeatureArrays", "all_feature_arrays", "packed_positions"]

IntArray = npt.NDArray[np.int64]
FeatureArrays = tuple[IntArray, IntArray, IntArray | None]


def all_feature_arrays(features: Sequence[Mapping[str, Any]]) -> list[FeatureArrays]:
    """`input_ids`, `labels` and, if there, `position_ids` of each feature, (L,), int64.

    Raises ValueError where there is no feature, or naming the one that is wrong.
    """
    if not features:
        raise ValueError("a collator needs at least one feature, got an empty list")
    arrays = [_feature_arrays(feature, index) for index, feature in enumerate(features)]
    for column, name in enumerate(("input_ids", "labels", "position_ids")):
        _check_not_negative(name, [feature[column] for feature in arrays])
    return arrays


def _feature_arrays(feature: Mapping[str, Any], index: int) -> FeatureArrays:
    """One feature's arrays, whose values are not checked yet."""
    if "input_ids" not in feature:
        raise ValueError(f"feature {index} has no input_ids, only {sorted(feature)}")
    ids = _int_array(feature, "input_ids", index)
    if not len(ids):
        raise ValueError(f"feature {index}: input_ids is empty")
    positions = _int_array(feature, "position_ids", index) if feature.get("position_ids") is not None else None
    if feature.get("labels") is not None:
        labels = _int_array(feature, "labels", index)
    else:
        bears_loss = np.ones(len(ids), dtype=bool)
        for name in ("completion_mask", "assistant_masks"):
            if feature.get(name) is not None:
                mask = _int_array(feature, name, index)
                _check_length(name, mask, ids, index)
                bears_loss &= mask.astype(bool)
        labels = np.where(bears_loss, ids, IGNORE_INDEX)
    _check_length("labels", labels, ids, index)
    if feature.get("attention_mask") is not None:
        mask = _int_array(feature, "attention_mask", index)
        _check_length("attention_mask", mask, ids, index)
        ids, labels = ids[mask != 0], labels[mask != 0]
        positions = None if positions is None else positions[mask != 0]
    _check_one_sequence(feature, positions, index)
    if positions is not None:
        _check_length("position_ids", positions, ids, index)
    return ids, labels, positions


def _check_one_sequence(feature: Mapping[str, Any], positions: IntArray | None, index: int) -> None:
    """A row that another packer filled with several sequences would attend across them."""
    restarts = positions is not None and bool((positions[1:] == 0).any())
    if restarts or len(feature.get("seq_lengths") or ()) > 1:
        raise ValueError(
            f"feature {index} holds several packed sequences (its positions restart, or it has seq_lengths); turn "
            f"packing off: the collator packs, and shares what they have in common"
        )


def packed_positions(arrays: Sequence[FeatureArrays]) -> IntArray | None:
    """Packed positions, counted from 0 in features that bring none; None where no feature brings any."""
    if all(positions is None for _, _, positions in arrays):
        return None
    return np.concatenate([np.arange(len(ids)) if positions is None else positions for ids, _, positions in arrays])


def _int_array(feature: Mapping[str, Any], name: str, index: int) -> IntArray:
    values = np.asarray(feature[name])
    if values.ndim != 1 or (len(values) and values.dtype.kind not in "iub"):
        raise ValueError(f"feature {index}: {name} must be a flat list of integers, got {values.dtype} {values.shape}")
    return values.astype(np.int64, copy=False)


def _check_not_negative(name: str, features: Sequence[IntArray | None]) -> None:
    """All features at once: a look at each of them took longer than the prefix plan, 4 us a feature."""
    given = {index: values for index, values in enumerate(features) if values is not None}
    packed = np.concatenate([*given.values(), np.zeros(0, dtype=np.int64)])
    is_wrong = (packed < 0) & (packed != IGNORE_INDEX) if name == "labels" else packed < 0
    if not is_wrong.any():
        return
    place = int(is_wrong.argmax())
    for index, values in given.items():
        if place < len(values):
            raise ValueError(f"feature {index}: {name} must not be negative: {name}[{place}] = {values[place]}")
        place -= len(values)


def _check_length(name: str, values: IntArray, ids: IntArray, index: int) -> None:
    if len(values) != len(ids):
        raise ValueError(f"feature {index}: {name} has {len(values)} entries, input_ids has {len(ids)}")
