"""The prediction list: which unique row predicts which token, and how many original tokens that stands for.

A unique row may have several next tokens, one per child: the last token of a shared prompt predicts the first token of
every completion. So the loss is a list of predictions and not a shifted copy of the input. T packed tokens, P
predictions.

    sequence 0    7  8  9         labels  -100  -100   9        row of 8 is 1
    sequence 1    7  8  5         labels  -100  -100   5        the same row
    predictions   (row 1 -> 9), (row 1 -> 5)

A label that several sequences share counts once for each of them, as an ordinary trainer sums over rows: a turn that
eight branches of an agent's run share is trained eight times. That is `shared_targets="every"`, the default. With
`"once"` the first sequence keeps the label, and the others lose it before the batch is cut, so that all that follows
(the cut, the plan, the divisor of the loss) is the same for both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from radixtrain.collators.features import packed, token_rows
from radixtrain.collators.token_row import IGNORE_INDEX, FloatArray, TokenRow
from radixtrain.tree.arrays import IntArray
from radixtrain.tree.plan import PrefixPlan, build_prefix_plan

SHARED_TARGETS = ("every", "once")


class Predictions(NamedTuple):
    """The prediction list.

    predictor_indices: (P,), int64. the unique row that predicts, ascending.
    labels: (P,), int64. the token to predict.
    label_indices: (P,), int64. the packed token that bears the label; of a merged entry, the first one.
    weights: (P,). how many original labelled tokens the entry stands for, int64; or its loss weight, float32.
    """

    predictor_indices: IntArray
    labels: IntArray
    label_indices: IntArray
    weights: IntArray | FloatArray


def list_predictions(plan: PrefixPlan, labels: IntArray, weights: FloatArray | None = None) -> Predictions:
    """List one entry per original labelled token.

    labels: (T,), int64, packed and unshifted as in Hugging Face: `labels[t]` is predicted from token t - 1 of the same
        sequence; `IGNORE_INDEX` bears no loss, and neither does the first token of a sequence.
    weights: (T,), of the same tokens; None if each counts 1.
    """
    predicted = labels != IGNORE_INDEX
    predicted[plan.cu_seqlens[:-1][np.diff(plan.cu_seqlens) > 0]] = False
    tokens = np.flatnonzero(predicted)
    predictors = plan.inverse_indices[tokens - 1]
    order = np.argsort(predictors, kind="stable")
    tokens = tokens[order]
    counted = np.ones(len(tokens), dtype=np.int64) if weights is None else weights[tokens]
    return Predictions(predictors[order], labels[tokens], tokens, counted)


def merge_predictions(predictions: Predictions) -> Predictions:
    """Merge identical (row, label) pairs into one entry that stands for all of them."""
    order = _by_row_and_label(predictions.predictor_indices, predictions.labels)
    rows, labels, tokens = (array[order] for array in predictions[:3])
    is_first = np.ones(len(rows), dtype=bool)
    is_first[1:] = (rows[1:] != rows[:-1]) | (labels[1:] != labels[:-1])
    first = np.flatnonzero(is_first)
    return Predictions(rows[first], labels[first], tokens[first], np.add.reduceat(predictions.weights[order], first))


def _by_row_and_label(rows: IntArray, labels: IntArray) -> IntArray:
    """Sort stably by row and then label, for rows that mostly ascend.

    A combined key is nearly in order: sorting it is 4 times as fast as `np.unique(axis=0)`.
    """
    num_labels = int(labels.max(initial=0)) + 1
    if num_labels > 2**32:
        labels = np.unique(labels, return_inverse=True)[1]
        num_labels = len(labels)
    return np.argsort(rows * num_labels + labels, kind="stable")


def check_shared_targets(value: str) -> None:
    """Raise ValueError if it is not one of `SHARED_TARGETS`."""
    if value not in SHARED_TARGETS:
        raise ValueError(f"shared_targets must be {' or '.join(SHARED_TARGETS)}, got {value!r}")


def keep_once(arrays: Sequence[TokenRow]) -> list[TokenRow]:
    """Keep each shared label in the first sequence that has it, and put -100 in the others.

    A label is shared by sequences that have the same label after the same tokens at the same positions, and the same
    `old_logprobs` and `advantages` there, if they have any: samples of a policy that differ in these are different
    samples. The kept label weighs the mean of the copies' `loss_weights`. No other entry changes.
    """
    ids, labels, cu_seqlens, positions, floats = packed(arrays)
    weights = floats.pop("loss_weights", None)
    plan = build_prefix_plan(ids, cu_seqlens, positions)  # shares all; a batch's plan may share less
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
        replace(feature, labels=kept[span], loss_weights=None if weights is None else weights[span])
        for feature, span in zip(arrays, spans, strict=True)
    ]


def features_once(features: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Apply `keep_once` to features as a collator takes them, for a trainer that has another collator.

    The features come back without their padding.
    """
    return [row.columns for row in keep_once(token_rows(features))]


def _groups(columns: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Sort stably so that entries with equal columns are neighbours; return the order and where each group starts."""
    order = np.lexsort(columns[::-1])
    is_first = np.zeros(len(order), dtype=bool)
    is_first[:1] = True
    for column in columns:
        is_first[1:] |= column[order][1:] != column[order][:-1]
    return order, np.flatnonzero(is_first)
