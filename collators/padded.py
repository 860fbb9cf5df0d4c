"""`PaddedCollator`: the ordinary baseline of `dedup: false`. Right-padded rows, the head only where labels are."""

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

    Returns `input_ids`, `attention_mask`, `position_ids` [B, L], `shift_labels` [1, P], and the entries that the fused
    loss reads beside them: `predictor_indices` [P] into the B * L flattened rows, `prediction_rows` [P],
    `loss_weights` [P].
    """

    pad_token_id: int = 0

    def __call__(self, features: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return self.collate(all_feature_arrays(features))

    def collate(self, arrays: Sequence[FeatureArrays]) -> dict[str, Any]:
        """The batch of features that have been read already."""
        longest = max(len(ids) for ids, _, _ in arrays)
        input_ids = np.full((len(arrays), longest), self.pad_token_id, dtype=np.int64)
        labels = np.full((len(arrays), longest), IGNORE_INDEX, dtype=np.int64)
        mask = np.zeros((len(arrays), longest), dtype=np.int64)
        positions = np.tile(np.arange(longest), (len(arrays), 1))
        for row, (ids, row_labels, row_positions) in enumerate(arrays):
            if row_positions is not None:
                positions[row, : len(ids)] = row_positions
            input_ids[row, : len(ids)], labels[row, : len(ids)], mask[row, : len(ids)] = ids, row_labels, 1
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
