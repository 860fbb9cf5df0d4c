"""The prediction list: which unique row predicts which token, and for how many original tokens that stands.

A unique row may have several next tokens, one per child: the last token of a shared prompt predicts the first token of
every completion. So the loss is a list of predictions and not a shifted copy of the input. T packed tokens, P
predictions.

    sequence 0    7  8  9         labels  -100  -100   9        row of 8 is 1
    sequence 1    7  8  5         labels  -100  -100   5        the same row
    predictions   (row 1 -> 9), (row 1 -> 5)
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from radixtrain.plan import PrefixPlan

__all__ = ["IGNORE_INDEX", "Predictions", "list_predictions", "merge_predictions"]

IGNORE_INDEX = -100
IntArray = npt.NDArray[np.int64]


class Predictions(NamedTuple):
    """predictor_indices: (P,), int64. the unique row that predicts, ascending.
    labels: (P,), int64. the token to predict.
    label_indices: (P,), int64. the packed token that bears the label; of a merged entry, the first one.
    weights: (P,), int64. how many original labelled tokens the entry stands for.
    """

    predictor_indices: IntArray
    labels: IntArray
    label_indices: IntArray
    weights: IntArray


def list_predictions(plan: PrefixPlan, labels: IntArray) -> Predictions:
    """One entry per original labelled token, weight 1.

    labels: (T,), int64, packed and unshifted as in Hugging Face: `labels[t]` is predicted from token t - 1 of the same
        sequence; `IGNORE_INDEX` bears no loss, and neither does the first token of a sequence.
    """
    predicted = labels != IGNORE_INDEX
    predicted[plan.cu_seqlens[:-1][np.diff(plan.cu_seqlens) > 0]] = False
    tokens = np.flatnonzero(predicted)
    predictors = plan.inverse_indices[tokens - 1]
    order = np.argsort(predictors, kind="stable")
    return Predictions(predictors[order], labels[tokens][order], tokens[order], np.ones(len(tokens), dtype=np.int64))


def merge_predictions(predictions: Predictions) -> Predictions:
    """Identical (row, label) pairs become one entry that stands for all of them."""
    pairs = np.stack([predictions.predictor_indices, predictions.labels], axis=1)
    distinct, first, inverse = np.unique(pairs, axis=0, return_index=True, return_inverse=True)
    weights = np.bincount(inverse.ravel(), weights=predictions.weights, minlength=len(distinct)).astype(np.int64)
    return Predictions(distinct[:, 0], distinct[:, 1], predictions.label_indices[first], weights)
