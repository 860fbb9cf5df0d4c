"""How often a label counts that several sequences share: once for each of them, or only once.

An ordinary trainer sums over rows, so a turn that eight branches of an agent's run share is trained eight times. That
is the default, `every`. With `once` the first sequence keeps the label, and the others lose it before the batch is cut,
so that everything after this (the cut, the plan, the divisor of the loss) works in the same way for both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from radixtrain.collators.features import FeatureArrays, all_feature_arrays, packed_positions
from radixtrain.collators.packed_floats import packed_floats
from radixtrain.collators.targets import IGNORE_INDEX, list_predictions
from radixtrain.tree.plan import build_prefix_plan

__all__ = ["SHARED_TARGETS", "check_shared_targets", "features_once", "keep_once"]

SHARED_TARGETS = ("every", "once")


def check_shared_targets(value: str) -> None:
    """ValueError if it is not one of `SHARED_TARGETS`."""
    if value not in SHARED_TARGETS:
        raise ValueError(f"shared_targets must be {' or '.join(SHARED_TARGETS)}, got {value!r}")


def keep_once(arrays: Sequence[FeatureArrays]) -> list[FeatureArrays]:
    """The features, with each shared label kept in the first sequence that has it, and -100 in the others.

    A label is shared by sequences that have the same label after the same tokens at the same positions, and the same
    `old_logprobs` and `advantages` there, if they have any: samples of a policy that differ in these are different
    samples. The kept label weighs the mean of the copies' `loss_weights`. No other entry changes.
    """
    ids, labels = (np.concatenate([getattr(each, name) for each in arrays]) for name in ("input_ids", "labels"))
    cu_seqlens = np.concatenate([[0], np.cumsum([len(feature.input_ids) for feature in arrays])])
    floats = packed_floats(arrays)
    weights = floats.pop("loss_weights", None)
    plan = build_prefix_plan(ids, cu_seqlens, packed_positions(arrays))  # shares all; a batch's plan may share less
    listed = list_predictions(plan, labels)
    order, starts = _groups(
        (listed.predictor_indices, listed.labels, *(x[listed.label_indices] for x in floats.values()))
    )
    tokens = listed.label_indices[order]
    first = tokens[starts]
    kept = np.full_like(labels, IGNORE_INDEX)
    kept[first] = labels[first]
    if weights is not None and len(starts):
        counts = np.diff(starts, append=len(tokens))
        weights[first] = np.add.reduceat(weights[tokens].astype(np.float64), starts) / counts
    spans = [slice(*bounds) for bounds in pairwise(cu_seqlens)]
    return [
        feature._replace(labels=kept[span], loss_weights=None if weights is None else weights[span])
        for feature, span in zip(arrays, spans, strict=True)
    ]


def features_once(features: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """`keep_once` for features as a collator takes them, so that a trainer without the collator can use it.

    The features come back without their padding.
    """
    arrays = keep_once(all_feature_arrays(features))
    return [{name: value for name, value in each._asdict().items() if isinstance(value, np.ndarray)} for each in arrays]


def _groups(columns: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """The stable order that puts entries with equal columns beside each other, and where each group starts in it."""
    order = np.lexsort(columns[::-1])
    is_first = np.zeros(len(order), dtype=bool)
    is_first[:1] = True
    for column in columns:
        is_first[1:] |= column[order][1:] != column[order][:-1]
    return order, np.flatnonzero(is_first)
