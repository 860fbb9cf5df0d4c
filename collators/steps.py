"""`StepCollator`: the sequences of one optimizer step -> its micro-batches and the number that its loss is divided by.

One item of the DataLoader is one optimizer step. The optimizer batch is drawn as usual; the collator decides only how
it is cut, and the step's gradient does not depend on the cut. If several ranks train together, each gets the whole step
and collates its own share of it (`batching.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from radixtrain.collators.batching import Shares, share_by_padded_tokens, share_by_unique_tokens
from radixtrain.collators.features import check_no_weights, packed, token_rows
from radixtrain.collators.radix import RadixCollator, list_predictions, targets_in_one_row
from radixtrain.collators.row_split import RowShare, split_batch
from radixtrain.collators.token_row import IGNORE_INDEX, TokenRow
from radixtrain.tree.arrays import lengths_of
from radixtrain.tree.layout import Function, Movable
from radixtrain.tree.radix_inputs import RADIX, RadixInputs, with_radix

DUMMY_TOKENS = 2  # one that predicts and one that is predicted


@dataclass(kw_only=True, eq=False)
class Step(Movable):
    """One optimizer step. Not frozen, because Lightning sets the fields if `trainer.precision` converts the batches.

    micro_batches: what the model receives on this rank; all ranks have as many.
    members: the features that each micro-batch holds, by index; none if it only fills up, and has weight zero.
    num_labels: labelled tokens of the step on all ranks, whatever their weights: the divisor of its loss.
    num_tokens: T, tokens of the step on all ranks.
    num_computed_tokens: rows that the model computes on this rank: unique tokens, or padded ones.
    num_unique_tokens: rows that it would compute if the step were one micro-batch in which every branch is taken; the
        cut, the ranks and `min_shared_tokens` can only add to them. None with `dedup: false`.
    num_whole_tokens: of the conversations of the step, on all ranks, if each were one sequence and not split into its
        turns; 0 if nothing counted them.
    where: the file and line that each feature came from, for error messages; empty if they came from no file.
    """

    micro_batches: list[dict[str, Any]]
    members: list[list[int]]
    num_labels: int
    num_tokens: int
    num_computed_tokens: int
    num_unique_tokens: int | None = None
    num_whole_tokens: int = 0
    where: tuple[str, ...] = ()

    def map(self, function: Function) -> Step:
        """Replace what moves of the micro-batches."""

        def moved(x: Any) -> Any:
            return x.map(function) if isinstance(x, Movable) else function(x) if isinstance(x, Tensor) else x

        batches = [{name: moved(x) for name, x in batch.items()} for batch in self.micro_batches]
        return replace(self, micro_batches=batches)

    @property
    def num_ordinary_tokens(self) -> int:
        """Return the tokens that an ordinary trainer computes, the basis of r and speeds: of whole chats, if split."""
        return self.num_whole_tokens or self.num_tokens


@dataclass(frozen=True, kw_only=True)
class StepCollator:
    """Collate the sequences of one optimizer step.

    dedup: True for radix batches under a budget of unique tokens. False for the baseline: ordinary padded batches,
        sequences x longest sequence under the same budget.
    max_tokens: most tokens that a micro-batch computes, unless it is a single longer sequence; None for a single
        micro-batch.
    merge_labels: True merges identical predictions and weights them (training); False keeps one for each labelled
        token (`predict`).
    min_shared_tokens, pad_to_multiple_of: see `RadixCollator`.
    pad_token_id: what fills padded batches, without `dedup`.
    rank, num_ranks: which share of the step is collated, of how many. All ranks collate the same features.
    sp_size: consecutive ranks that have the same micro-batches, of as many times `max_tokens`. The collator keeps the
        rows of its own (`row_split.py`); it has to merge labels.

    Called with features as `RadixCollator`.
    Returns a `Step`.
    Raises ValueError as `RadixCollator`, naming the feature by its index in the step, and for ranks that do not fit.

    >>> step = StepCollator(max_tokens=4096)(rows)
    >>> len(step.micro_batches), step.num_labels, step.num_tokens, step.num_computed_tokens
    (1, 2, 6, 4)
    """

    dedup: bool = True
    max_tokens: int | None = None
    merge_labels: bool = True
    min_shared_tokens: int = 1
    pad_to_multiple_of: int | None = None
    pad_token_id: int = 0
    rank: int = 0
    num_ranks: int = 1
    sp_size: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.num_ranks:
            raise ValueError(f"rank must be from 0 to {self.num_ranks - 1}, as num_ranks says; got {self.rank}")
        if self.num_ranks % self.sp_size or (self.sp_size > 1 and not (self.dedup and self.merge_labels)):
            raise ValueError(f"sp_size {self.sp_size} must divide num_ranks, and needs dedup and merge_labels")

    def __call__(self, features: Sequence[Mapping[str, Any]]) -> Step:
        arrays = token_rows(features)
        if self.dedup and not self.merge_labels:
            check_no_weights(arrays)  # here, because a micro-batch does not know its features' places in the step
        shares = self.shares(arrays)
        groups = shares.groups[self.rank // self.sp_size]
        batches = [self._fitting(arrays, group) for group in groups]
        num_missing = shares.num_micro_batches - len(groups)
        if num_missing:
            empty = dummy_features(arrays, has_weights=self.merge_labels or not self.dedup)
            batches += [with_radix(self._collator.collate([empty]), num_tokens=0) for _ in range(num_missing)]
        if self.sp_size > 1:
            batches = [split_batch(batch, RowShare(self.rank % self.sp_size, self.sp_size)) for batch in batches]
        return Step(
            micro_batches=batches,
            members=[*groups, *([] for _ in range(num_missing))],
            num_labels=sum(feature.num_labels for feature in arrays),
            num_tokens=sum(len(feature.input_ids) for feature in arrays),
            num_computed_tokens=sum(batch["position_ids"].numel() for batch in batches),
            num_unique_tokens=shares.num_unique_tokens,
        )

    def shares(self, arrays: Sequence[TokenRow]) -> Shares:
        """Divide the step among the ranks, or groups of `sp_size`. arrays: the features of the step."""
        sequences = [feature.input_ids for feature in arrays]
        if not self.dedup:
            return share_by_padded_tokens(sequences, self.num_ranks, self.max_tokens)
        multiple, max_tokens = self.pad_to_multiple_of or 1, self._budget
        if max_tokens is not None:
            max_tokens -= max_tokens % multiple  # padding takes no micro-batch over the budget
        num_groups = self.num_ranks // self.sp_size
        positions = packed(arrays).position_ids
        return share_by_unique_tokens(sequences, num_groups, max_tokens, positions)

    def _fitting(self, arrays: Sequence[TokenRow], group: Sequence[int]) -> dict[str, Any]:
        """Collate features whose unique tokens are within the budget, with every branch if they are over it without.

        They are not cut in two, since every rank knows the number of micro-batches before it collates any.
        """
        members = [arrays[index] for index in group]
        batch = self._collator.collate(members)
        if self.min_shared_tokens == 1 or self._budget is None or batch["position_ids"].numel() <= self._budget:
            return batch
        return replace(self, min_shared_tokens=1)._collator.collate(members)

    @property
    def _budget(self) -> int | None:
        """Return the most unique tokens of a micro-batch; None without a limit."""
        return None if self.max_tokens is None else self.max_tokens * self.sp_size

    @cached_property
    def _collator(self) -> RadixCollator | PaddedCollator:
        """Return what collates one micro-batch."""
        if not self.dedup:
            return PaddedCollator(pad_token_id=self.pad_token_id)
        return RadixCollator(
            min_shared_tokens=self.min_shared_tokens,
            pad_to_multiple_of=self.pad_to_multiple_of,
            merge_labels=self.merge_labels,
        )


@dataclass(frozen=True, kw_only=True)
class PaddedCollator:
    """Collate token sequences into one padded batch for an unmodified Hugging Face model.

    pad_token_id: fills sequences on the right; its value has no effect.

    Called with features as `RadixCollator`, returns

    input_ids, attention_mask, position_ids: [B, L], int64.
    shift_labels: [1, P], int64. the labelled tokens.
    radix: a `RadixInputs` without a layout, in which no prediction is merged.

    Raises as `RadixCollator`.
    """

    pad_token_id: int = 0

    def __call__(self, features: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return self.collate(token_rows(features))

    def collate(self, arrays: Sequence[TokenRow]) -> dict[str, Any]:
        """Collate features that have been read."""
        ids, labels, cu_seqlens, given_positions, weights = packed(arrays)
        lengths = lengths_of(cu_seqlens)
        is_token = np.arange(lengths.max()) < lengths[:, None]
        input_ids = np.full(is_token.shape, self.pad_token_id, dtype=np.int64)
        input_ids[is_token] = ids
        positions = np.tile(np.arange(is_token.shape[1]), (len(arrays), 1))
        if given_positions is not None:
            positions[is_token] = given_positions
        predictions = list_predictions(labels, weights, cu_seqlens, np.flatnonzero(is_token))
        targets, of_predictions = targets_in_one_row(predictions, is_merged=False)
        return {
            "input_ids": torch.from_numpy(input_ids),
            "attention_mask": torch.from_numpy(is_token.astype(np.int64)),
            "position_ids": torch.from_numpy(positions),
            **targets,
            RADIX: RadixInputs.of(cu_seqlens=torch.from_numpy(cu_seqlens.astype(np.int32)), **of_predictions),
        }


def dummy_features(arrays: Sequence[TokenRow], has_weights: bool) -> TokenRow:
    """Make a micro-batch of weight zero, for a rank that has fewer micro-batches of a step than another one.

    All ranks take part in every exchange of gradients, and of parameters if those are sharded, so they run as many
    passes. These are the first tokens of the shortest sequence; loss and gradients are exactly 0.

    arrays: the features of the step. The tokens are taken from one of them, because a mixture of experts then routes
        them to experts that the step reaches anyway, and no other expert gets a gradient.
    has_weights: whether the batch has loss weights: then a label of weight 0. Otherwise there is no label.
    """
    shortest = min(arrays, key=lambda feature: len(feature.input_ids)).part(0, DUMMY_TOKENS)
    ids = shortest.input_ids
    if has_weights:
        return replace(shortest, labels=ids, loss_weights=np.zeros(len(ids), dtype=np.float32))
    return replace(shortest, labels=np.full_like(ids, IGNORE_INDEX))
