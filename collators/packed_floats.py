"""The floats of a batch's features back to back, and which batches may have them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from radixtrain.collators.features import FeatureArrays
from radixtrain.collators.targets import FloatArray
from radixtrain.collators.token_floats import FLOATS
from radixtrain.tree.arrays import IntArray
from radixtrain.tree.layout import ADVANTAGES, OLD_LOGPROBS

__all__ = ["check_no_floats", "packed_floats", "policy_entries"]


def packed_floats(arrays: Sequence[FeatureArrays]) -> dict[str, FloatArray]:
    """The floats of all features back to back, (T,), of each kind that some feature has; 1 in those that have none."""
    packed = {}
    for name in FLOATS:
        columns = [getattr(feature, name) for feature in arrays]
        if any(column is not None for column in columns):
            lengths = (len(feature.labels) for feature in arrays)
            pairs = zip(columns, lengths, strict=True)
            packed[name] = np.concatenate([np.ones(n, np.float32) if column is None else column for column, n in pairs])
    return packed


def policy_entries(floats: Mapping[str, FloatArray], tokens: IntArray) -> dict[str, Tensor]:
    """The entries that a policy loss reads, if the features have them.

    floats: as `packed_floats` returns them. tokens: (P,). the packed token that bears each label.
    """
    keys = {"old_logprobs": OLD_LOGPROBS, "advantages": ADVANTAGES}
    return {key: torch.from_numpy(floats[name][tokens]) for name, key in keys.items() if name in floats}


def check_no_floats(arrays: Sequence[FeatureArrays]) -> None:
    """Refuse features with floats for a batch whose loss the model computes, and which would ignore them.

    Raises ValueError that names the feature and the entry.
    """
    for index, feature in enumerate(arrays):
        for name in FLOATS:
            if getattr(feature, name) is not None:
                raise ValueError(
                    f"feature {index} has {name}, which the loss of a Hugging Face model ignores, so that its gradient "
                    f"would be another. Collate with merge_labels=True and take radixtrain's loss "
                    f"(radixtrain.loss.linear_cross_entropy, or linear_logprobs and clipped_policy_loss), or remove "
                    f"the entry"
                )
