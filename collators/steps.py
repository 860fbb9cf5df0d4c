"""`StepCollator`: the sequences of one optimizer step -> its micro-batches and the number that its loss is divided by.

One item of the DataLoader is one optimizer step. The optimizer batch is drawn as ever; what this decides is only how
it is cut, and the step's gradient does not depend on the cut.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from radixtrain.collators.batching import cut_by_padded_tokens, cut_by_unique_tokens
from radixtrain.collators.padded import PaddedCollator
from radixtrain.collators.radix import RadixCollator

__all__ = ["StepCollator"]


@dataclass(frozen=True)
class StepCollator:
    """Collate the sequences of one optimizer step.

    dedup: True for radix batches under a budget of unique tokens, False for ordinary padded ones under the same
        budget of rows x longest row: the baseline.
    max_tokens: most tokens that a micro-batch computes; None for a single micro-batch.
    merge_labels: identical predictions merged and weighted (training), or one per labelled token (`predict`).
    min_shared_tokens, pad_to_multiple_of, pad_token_id: see `RadixCollator` and `PaddedCollator`.

    Called with features as `RadixCollator`; returns

    micro_batches: list of batches.
    members: list of lists, the features that each micro-batch holds, by index.
    num_labels: labelled tokens of the step, the divisor of its loss.
    num_tokens: T, tokens of the step.
    num_computed_tokens: rows that the model computes: unique tokens, or padded ones.
    """

    dedup: bool = True
    max_tokens: int | None = None
    merge_labels: bool = True
    min_shared_tokens: int = 1
    pad_to_multiple_of: int | None = None
    pad_token_id: int = 0

    def __call__(self, features: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        sequences = [np.asarray(feature["input_ids"], dtype=np.int64) for feature in features]
        cut = cut_by_unique_tokens if self.dedup else cut_by_padded_tokens
        members = cut(sequences, self.max_tokens)
        collate = self._collator()
        micro_batches = [collate([features[index] for index in group]) for group in members]
        weights = "radix_loss_weights" if self.dedup else "loss_weights"
        return {
            "micro_batches": micro_batches,
            "members": members,
            "num_labels": sum(_num_labels(batch, weights) for batch in micro_batches),
            "num_tokens": sum(map(len, sequences)),
            "num_computed_tokens": sum(batch["input_ids"].numel() for batch in micro_batches),
        }

    def _collator(self) -> RadixCollator | PaddedCollator:
        if not self.dedup:
            return PaddedCollator(self.pad_token_id)
        return RadixCollator(self.min_shared_tokens, self.pad_to_multiple_of, self.merge_labels)


def _num_labels(batch: Mapping[str, Any], weights: str) -> int:
    if weights in batch:
        return int(batch[weights].sum())
    return int((batch["shift_labels"] >= 0).sum())
