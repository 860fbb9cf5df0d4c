"""`PaddedCollator`: the ordinary baseline of `dedup: false`. Right-padded rows, the head only on rows that predict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from radixtrain.collators.features import FeatureArrays, all_feature_arrays
from radixtrain.collators.targets import IGNORE_INDEX

__all__ = ["PaddedCollator"]


@dataclass(frozen=True)
class PaddedCollator:
    """Collate token sequences into one padded batch for an unmodified Hugging Face model.

    pad_token_id: fills rows on the right; its value has no effect.
    loss_on_all: see `RadixCollator`.

    Returns `input_ids`, `attention_mask`, `position_ids` [B, L], `shift_labels` [1, P], and the entries that the fused
    loss reads beside them: `predictor_indices` [P] into the B * L flattened rows, `prediction_rows` [P],
    `loss_weights` [P]. Raises as `RadixCollator`.
    """

    pad_token_id: int = 0
    loss_on_all: bool = False

    def __call__(self, features: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return self.collate(all_feature_arrays(features, self.loss_on_all))

    def collate(self, arrays: Sequence[FeatureArrays]) -> dict[str, Any]:
        """The batch of features that have been read already."""
        longest = max(len(feature.input_ids) for feature in arrays)
        input_ids = np.full((len(arrays), longest), self.pad_token_id, dtype=np.int64)
        labels = np.full((len(arrays), longest), IGNORE_INDEX, dtype=np.int64)
        mask = np.zeros((len(arrays), longest), dtype=np.int64)
        positions = np.tile(np.arange(longest), (len(arrays), 1))
        for row, feature in enumerate(arrays):
            length = len(feature.input_ids)
            if feature.position_ids is not None:
                positions[row, :length] = feature.position_ids
            elif feature.is_counted_from_padding:
                positions[row, :length] += feature.num_left_padding
            input_ids[row, :length], labels[row, :length], mask[row, :length] = feature.input_ids, feature.labels, 1
        labels[:, 0] = IGNORE_INDEX
        predicted = np.flatnonzero(labels.ravel() != IGNORE_INDEX)
        return {
            "input_ids": torch.tensor(input_ids),
            "attention_mask": torch.tensor(mask),
            "position_ids": torch.tensor(positions),
            "shift_labels": torch.tensor(labels.ravel()[predicted])[None],
            "predictor_indices": torch.tensor(predicted - 1),
            "prediction_rows": torch.arange(len(predicted)),
            "loss_weights": torch.ones(len(predicted)),
        }
