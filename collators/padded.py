"""`PaddedCollator`: the ordinary baseline of `dedup: false`. Padded on the right, labelled tokens listed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from radixtrain.collators.features import FeatureArrays, all_feature_arrays
from radixtrain.collators.packed_floats import packed_floats, policy_entries
from radixtrain.collators.targets import IGNORE_INDEX, FloatArray
from radixtrain.tree.layout import CU_SEQLENS, LABEL_INDICES, LOSS_WEIGHTS, PREDICTION_ROWS, PREDICTOR_INDICES

__all__ = ["PaddedCollator"]


@dataclass(frozen=True, kw_only=True)
class PaddedCollator:
    """Collate token sequences into one padded batch for an unmodified Hugging Face model.

    pad_token_id: fills sequences on the right; its value has no effect.

    Called with features as `RadixCollator`, returns

    input_ids, attention_mask, position_ids: [B, L], int64.
    shift_labels: [1, P], int64. the labelled tokens.
    radix_predictor_indices: [P], int64. which of the B * L flattened tokens predicts each.
    radix_prediction_rows: [P], int64. 0 ... P - 1, since no prediction is merged.
    radix_loss_weights: [P], float32. the features' loss weights, or ones.
    radix_old_logprobs, radix_advantages: [P], float32. as given; absent if no feature has any.
    radix_label_indices: [P], int64. the original token that each entry is, counted over all features back to back.
    radix_cu_seqlens: [B+1], int32. bounds of the features, back to back.

    Raises as `RadixCollator`.
    """

    pad_token_id: int = 0

    def __call__(self, features: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return self.collate(all_feature_arrays(features))

    def collate(self, arrays: Sequence[FeatureArrays]) -> dict[str, Any]:
        """The batch of features that have been read already."""
        lengths = np.array([len(feature.input_ids) for feature in arrays])
        size = len(arrays), int(lengths.max())
        input_ids = np.full(size, self.pad_token_id, dtype=np.int64)
        labels = np.full(size, IGNORE_INDEX, dtype=np.int64)
        positions = np.tile(np.arange(size[1]), (size[0], 1))
        for index, (feature, length) in enumerate(zip(arrays, lengths, strict=True)):
            input_ids[index, :length], labels[index, :length] = feature.input_ids, feature.labels
            if feature.position_ids is not None:
                positions[index, :length] = feature.position_ids
            elif feature.is_counted_from_padding:
                positions[index, :length] += feature.num_left_padding
        return {
            "input_ids": torch.from_numpy(input_ids),
            "attention_mask": torch.from_numpy((np.arange(size[1]) < lengths[:, None]).astype(np.int64)),
            "position_ids": torch.from_numpy(positions),
            **_targets(labels, lengths, packed_floats(arrays)),
        }


def _targets(labels: np.ndarray, lengths: np.ndarray, floats: Mapping[str, FloatArray]) -> dict[str, Any]:
    """labels: (B, L), -100 on padding. lengths: (B,). floats: (T,) each."""
    labels[:, 0] = IGNORE_INDEX  # it is never predicted
    sequences, places = np.nonzero(labels != IGNORE_INDEX)
    cu_seqlens = np.concatenate([[0], np.cumsum(lengths)])
    tokens = cu_seqlens[sequences] + places
    weights = floats.get("loss_weights", np.ones(int(cu_seqlens[-1]), dtype=np.float32))
    return {
        "shift_labels": torch.from_numpy(labels[sequences, places])[None],
        PREDICTOR_INDICES: torch.from_numpy(sequences * labels.shape[1] + places - 1),
        PREDICTION_ROWS: torch.arange(len(places)),
        LOSS_WEIGHTS: torch.from_numpy(weights[tokens]),
        LABEL_INDICES: torch.from_numpy(tokens),
        CU_SEQLENS: torch.from_numpy(cu_seqlens.astype(np.int32)),
        **policy_entries(floats, tokens),
    }
