"""`StepCollator`: the sequences of one optimizer step -> its micro-batches and the number that its loss is divided by.

One item of the DataLoader is one optimizer step. The optimizer batch is drawn as usual; the collator decides only how
it is cut, and the step's gradient does not depend on the cut.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from radixtrain.collators.batching import cut_by_padded_tokens, cut_by_unique_tokens
from radixtrain.collators.features import FeatureArrays, all_feature_arrays, packed_positions
from radixtrain.collators.padded import PaddedCollator
from radixtrain.collators.radix import RadixCollator
from radixtrain.collators.targets import IGNORE_INDEX
from radixtrain.tree.cost_model import StepCost

__all__ = ["StepCollator"]


@dataclass(frozen=True)
class StepCollator:
    """Collate the sequences of one optimizer step.

    dedup: True for radix batches under a budget of unique tokens, False for ordinary padded ones under the same
        budget of rows x longest row: the baseline.
    max_tokens: most tokens that a micro-batch computes; None for a single micro-batch.
    merge_labels: identical predictions merged and weighted (training), or one per labelled token (`predict`).
    min_shared_tokens, pad_to_multiple_of, step_cost, loss_on_all, pad_token_id: see `RadixCollator` and
        `PaddedCollator`.

    Called with features as `RadixCollator`; returns

    micro_batches: list of batches.
    members: list of lists, the features that each micro-batch holds, by index.
    num_labels: labelled tokens of the step, the divisor of its loss.
    num_tokens: T, tokens of the step.
    num_computed_tokens: rows that the model computes: unique tokens, or padded ones.

    Raises as `RadixCollator`, naming the feature by its index in the step.
    """

    dedup: bool = True
    max_tokens: int | None = None
    merge_labels: bool = True
    min_shared_tokens: int = 1
    pad_to_multiple_of: int | None = None
    pad_token_id: int = 0
    step_cost: StepCost | None = None
    loss_on_all: bool = False

    def __call__(self, features: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        arrays = all_feature_arrays(features, self.loss_on_all)
        sequences = [feature.input_ids for feature in arrays]
        if self.dedup:
            cut = cut_by_unique_tokens(sequences, self.max_tokens, packed_positions(arrays))
        else:
            cut = cut_by_padded_tokens(sequences, self.max_tokens)
        collated = [part for group in cut for part in self._within_budget(group, arrays)]
        return {
            "micro_batches": [batch for _, batch in collated],
            "members": [group for group, _ in collated],
            "num_labels": sum(int((feature.labels[1:] != IGNORE_INDEX).sum()) for feature in arrays),
            "num_tokens": sum(map(len, sequences)),
            "num_computed_tokens": sum(batch["input_ids"].numel() for _, batch in collated),
        }

    def _within_budget(
        self, group: list[int], arrays: Sequence[FeatureArrays]
    ) -> list[tuple[list[int], dict[str, Any]]]:
        """Collate a group, in halves if `min_shared_tokens` or the padding took it over the budget of the cut."""
        chosen = [arrays[index] for index in group]
        batch = self._radix_collator().collate(chosen, self.max_tokens) if self.dedup else self._padded(chosen)
        over = self.max_tokens is not None and batch["input_ids"].numel() > self.max_tokens
        if not over or len(group) == 1:
            return [(group, batch)]
        middle = len(group) // 2
        return self._within_budget(group[:middle], arrays) + self._within_budget(group[middle:], arrays)

    def _padded(self, arrays: Sequence[FeatureArrays]) -> dict[str, Any]:
        return PaddedCollator(self.pad_token_id).collate(arrays)

    def _radix_collator(self) -> RadixCollator:
        sizes = self.min_shared_tokens, self.pad_to_multiple_of, self.merge_labels
        return RadixCollator(*sizes, step_cost=self.step_cost)
