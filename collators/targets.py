"""The prediction list: which unique row predicts which token, and how many original tokens that stands for.

A unique row may have several next tokens, one per child: the last token of a shared prompt predicts the first token of
every completion. So the loss is a list of predictions and not a shifted copy of the input. T packed tokens, P
predictions.

    sequence 0    7  8  9         labels  -100  -100   9        row of 8 is 1
    sequence 1    7  8  5         labels  -100  -100   5        the same row
    predictions   (row 1 -> 9), (row 1 -> 5)

A label that several sequences share counts once for each of them, as an ordinary trainer sums over rows.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from radixtrain.collators.token_row import IGNORE_INDEX, FloatArray
from radixtrain.tree.arrays import IntArray
from radixtrain.tree.plan import PrefixPlan


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
    order = np.lexsort((predictions.labels, predictions.predictor_indices))
    rows, labels, tokens = (array[order] for array in predictions[:3])
    is_first = np.ones(len(rows), dtype=bool)
    is_first[1:] = (rows[1:] != rows[:-1]) | (labels[1:] != labels[:-1])
    first = np.flatnonzero(is_first)
    return Predictions(rows[first], labels[first], tokens[first], np.add.reduceat(predictions.weights[order], first))
