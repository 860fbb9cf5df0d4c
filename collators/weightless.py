"""A micro-batch of weight zero, for a rank that has fewer micro-batches of a step than another one.

The ranks run as many passes forward and backward as each other, because all of them take part in every exchange of
gradients, and of parameters if those are sharded. A rank without work for a pass runs this.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from radixtrain.collators.features import FeatureArrays
from radixtrain.collators.targets import IGNORE_INDEX

__all__ = ["weightless"]

NUM_TOKENS = 2  # one that predicts and one that is predicted


def weightless(arrays: Sequence[FeatureArrays], has_weights: bool) -> FeatureArrays:
    """The first tokens of the shortest sequence that bears loss; its own loss and gradients are exactly 0.

    arrays: the features of the step. The tokens are taken from one of them, because a mixture of experts then routes
        them to experts that the step reaches anyway, and no other expert gets a gradient.
    has_weights: whether the batch has loss weights: then a label of weight 0. Otherwise there is no label.
    """
    shortest = min(arrays, key=_unsuitability)
    columns: dict[str, Any] = {
        name: column[:NUM_TOKENS] for name, column in shortest._asdict().items() if isinstance(column, np.ndarray)
    }
    ids = columns["input_ids"]
    columns["labels"] = ids if has_weights else np.full_like(ids, IGNORE_INDEX)
    if has_weights:
        columns["loss_weights"] = np.zeros(len(ids), dtype=np.float32)
    return shortest._replace(**columns)


def _unsuitability(feature: FeatureArrays) -> tuple[bool, int]:
    """Least for a short feature that bears loss: only such a one is sure to have the floats of a policy loss."""
    return not (feature.labels[1:] != IGNORE_INDEX).any(), len(feature.input_ids)
