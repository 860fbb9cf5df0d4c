"""`StepCollator`: the sequences of one optimizer step -> its micro-batches and the number that its loss is divided by.

One item of the DataLoader is one optimizer step. The optimizer batch is drawn as usual; the collator decides only how
it is cut, and the step's gradient does not depend on the cut. If several ranks train together, each gets the whole step
and collates its own share of it (`batching.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from radixtrain.collators.batching import (
    SequenceCost,
    Shares,
    share_by_padded_tokens,
    share_by_unique_tokens,
)
from radixtrain.collators.features import check_no_floats, packed, token_rows
from radixtrain.collators.passes import Keeping, Schedule, Span, aligned
from radixtrain.collators.radix import RadixCollator, policy_fields
from radixtrain.collators.row_split import split_batch
from radixtrain.collators.step_rows import StepRows
from radixtrain.collators.targets import check_shared_targets, keep_once
from radixtrain.collators.token_row import IGNORE_INDEX, TokenRow
from radixtrain.tree.arrays import lengths_of
from radixtrain.tree.context import WITH_CONTEXT
from radixtrain.tree.cost_model import StepCost
from radixtrain.tree.movable import Movable
from radixtrain.tree.radix_inputs import RADIX, RadixInputs, with_radix

DUMMY_TOKENS = 2  # one that predicts and one that is predicted


class Pass(NamedTuple):
    """A pass of an optimizer step. micro_batch: its place in the step. trains: backward too; otherwise only forward."""

    micro_batch: int
    trains: bool


@dataclass(kw_only=True, eq=False)
class Step(Movable):
    """One optimizer step. Not frozen, because Lightning sets the fields if `trainer.precision` converts the batches.

    micro_batches: what the model receives on this rank, in the order of `passes`.
    members: the features that each micro-batch holds, by index; none if it only fills up, and has weight zero, or if it
        is a prefix that several others continue.
    num_labels: labelled tokens of the step on all ranks, whatever their weights: the divisor of its loss.
    num_tokens: T, tokens of the step on all ranks.
    num_computed_tokens: rows that the model computes on this rank: unique tokens, or padded ones.
    num_unique_tokens: rows that it would compute if the step were one micro-batch in which every branch is taken; the
        cut, the ranks and `min_shared_tokens` can only add to them. None with `dedup: false`.
    num_whole_tokens: of the conversations of the step, on all ranks, if each were one sequence and not split into its
        turns; 0 if nothing counted them.
    where: the file and line that each feature came from, for error messages; empty if they came from no file.
    passes: what runs, one after the other; `radixtrain.step_losses` runs it. A micro-batch that others continue comes
        twice, first without training. By default each trains once, in order. All ranks train at the same places.
    holds_graph: whether the graph of a pass that does not train is held until it does; otherwise it runs again.
    """

    micro_batches: list[dict[str, Any]]
    members: list[list[int]]
    num_labels: int
    num_tokens: int
    num_computed_tokens: int
    num_unique_tokens: int | None = None
    num_whole_tokens: int = 0
    where: tuple[str, ...] = ()
    passes: tuple[Pass, ...] = ()
    holds_graph: bool = False

    def __post_init__(self) -> None:
        self.passes = self.passes or tuple(Pass(place, trains=True) for place in range(len(self.micro_batches)))

    @property
    def num_ordinary_tokens(self) -> int:
        """Return the tokens that an ordinary trainer computes, the basis of r and speeds: of whole chats, if split."""
        return self.num_whole_tokens or self.num_tokens

    @property
    def num_losses(self) -> int:
        """Count the passes that train."""
        return sum(each.trains for each in self.passes)


@dataclass(frozen=True, kw_only=True)
class StepCollator:
    """Collate the sequences of one optimizer step.

    dedup: True for radix batches under a budget of unique tokens. False for the baseline: ordinary padded batches,
        sequences x longest sequence under the same budget.
    max_tokens: most tokens that a micro-batch computes; None for a single micro-batch.
    merge_labels: True merges identical predictions and weights them (training); False keeps one for each labelled
        token (`predict`).
    shared_targets: what a label counts that several sequences of the step share, see `RadixCollator`. Decided before
        the step is cut, so that it does not depend on the cut.
    min_shared_tokens, pad_to_multiple_of, step_cost: see `RadixCollator`.
    pad_token_id: see `PaddedCollator`.
    share_across_micro_batches: whether a prefix that several micro-batches continue is computed once in the step, and a
        sequence of more than `max_tokens` in several of them; see `radixtrain.collators.passes`. `auto` does so if it
        pays by `step_cost`. Needs dedup and `merge_labels`, and a loop that runs `step_losses`.
    holds_graph: whether the graph of such a prefix is held meanwhile, and not computed twice: True suits a model whose
        layers all recompute their activations; auto: if it fits into `max_tokens` with what runs meanwhile.
    rank, num_ranks: which share of the step is collated, of how many. All ranks collate the same features.
    sp_size: consecutive ranks that have the same micro-batches, of as many times `max_tokens`. The collator keeps the
        rows of its own (`row_split.py`); it has to merge labels.

    Called with features as `RadixCollator`, returns a `Step`. Raises as `RadixCollator`, naming the feature by its
    index in the step.
    """

    dedup: bool = True
    max_tokens: int | None = None
    merge_labels: bool = True
    min_shared_tokens: int = 1
    pad_to_multiple_of: int | None = None
    pad_token_id: int = 0
    step_cost: StepCost | None = None
    shared_targets: Literal["every", "once"] = "every"
    share_across_micro_batches: bool | Literal["auto"] = False
    holds_graph: bool | Literal["auto"] = "auto"
    rank: int = 0
    num_ranks: int = 1
    sp_size: int = 1

    def __post_init__(self) -> None:
        check_shared_targets(self.shared_targets)
        if not 0 <= self.rank < self.num_ranks:
            raise ValueError(f"rank must be from 0 to {self.num_ranks - 1}, as num_ranks says; got {self.rank}")
        if self.num_ranks % self.sp_size or (self.sp_size > 1 and not (self.dedup and self.merge_labels)):
            raise ValueError(f"sp_size {self.sp_size} must divide num_ranks, and needs dedup and merge_labels")
        for name in ("share_across_micro_batches", "holds_graph"):
            if getattr(self, name) not in (True, False, "auto"):
                raise ValueError(f"{name} must be true, false or auto: {getattr(self, name)!r}")
        if self.share_across_micro_batches is True and (missing := self._missing_for_passes):
            raise ValueError(f"share_across_micro_batches needs {missing}")

    def __call__(self, features: Sequence[Mapping[str, Any]]) -> Step:
        arrays = self._read(features)
        shares = self.shares(arrays)
        groups, passes, holds_graph = shares.groups[self.rank // self.sp_size], list[Pass](), False
        if shares.schedules is None:
            batches = [self._fitting(arrays, group) for group in groups]
            num_missing, num_kept = shares.num_micro_batches - len(groups), 0
        else:
            batches, passes = self._passes(arrays, shares.schedules)
            holds_graph = shares.schedules[self.rank // self.sp_size].holds_graph
            num_kept = len(batches) - len(groups)
            num_missing = max((each.micro_batch + 1 for each in passes), default=0) - len(batches)
        if num_missing:
            empty = dummy_features(arrays, has_weights=self.merge_labels or not self.dedup)
            batches += [with_radix(self._collate([empty]), num_tokens=0) for _ in range(num_missing)]
        if self.sp_size > 1:
            batches = [split_batch(batch, self.rank % self.sp_size, self.sp_size) for batch in batches]
        return Step(
            micro_batches=batches,
            members=[*([] for _ in range(num_kept)), *groups, *([] for _ in range(num_missing))],
            num_labels=sum(feature.num_labels for feature in arrays),
            num_tokens=sum(len(feature.input_ids) for feature in arrays),
            num_computed_tokens=sum(batch["input_ids"].numel() for batch in batches),
            num_unique_tokens=shares.num_unique_tokens,
            passes=tuple(passes),
            holds_graph=holds_graph,
        )

    def _passes(
        self, arrays: Sequence[TokenRow], schedules: Sequence[Schedule]
    ) -> tuple[list[dict[str, Any]], list[Pass]]:
        """Collate the batches of this rank, those that others continue first, and list its passes.

        A pass that only keeps this rank in step with the others has its micro-batch after those.
        """
        group = self.rank // self.sp_size
        schedule = schedules[group]
        num_kept = len(schedule.kept)
        lengths = [len(feature.input_ids) for feature in arrays]
        spans = [[kept] for kept in schedule.kept]
        for members in schedule.groups:
            own = (Span(member, schedule.num_kept[member], lengths[member]) for member in members)
            spans.append([span for span in own if span.start < span.end])
        batches, passes = list[dict[str, Any]](), list[Pass]()
        if spans:  # a rank may have no sequence
            rows = StepRows(arrays, schedule.num_kept)
            batches += [
                self._collate_pass(rows, of_pass, place if place < num_kept else None)
                for place, of_pass in enumerate(spans)
            ]
        for event, trains in aligned([each.order for each in schedules], group):
            place = len(batches) if event is None else event.place + (0 if event.is_kept else num_kept)
            passes.append(Pass(place, trains))
        return batches, passes

    def _collate_pass(self, rows: StepRows, spans: Sequence[Span], kept_as: int | None) -> dict[str, Any]:
        """Collate one pass, and share more if its rows do not fit, as `_fitting` does."""
        batch = self._collator.collate_pass(rows, spans, kept_as, self._budget)
        if self.min_shared_tokens == 1 or self._budget is None or batch["input_ids"].numel() <= self._budget:
            return batch
        return replace(self._collator, min_shared_tokens=1).collate_pass(rows, spans, kept_as)

    def shares(self, arrays: Sequence[TokenRow]) -> Shares:
        """Divide the step among the ranks, or groups of `sp_size`. arrays: the features of the step."""
        sequences = [feature.input_ids for feature in arrays]
        if not self.dedup:
            return share_by_padded_tokens(sequences, self.num_ranks, self.max_tokens)
        multiple, max_tokens = self.pad_to_multiple_of or 1, self._budget
        if max_tokens is not None:
            max_tokens -= max_tokens % multiple  # padding takes no micro-batch over the budget
        cost = SequenceCost.of(self.step_cost)
        num_groups = self.num_ranks // self.sp_size
        positions = packed(arrays).position_ids
        return share_by_unique_tokens(sequences, num_groups, max_tokens, positions, cost, self.keeping)

    @property
    def keeping(self) -> Keeping | None:
        """Return when prefixes are kept; None if never."""
        wanted = not self._missing_for_passes and self.share_across_micro_batches
        return Keeping.of(wanted, self.step_cost, self.holds_graph)

    def _read(self, features: Sequence[Mapping[str, Any]]) -> list[TokenRow]:
        """Read the features, with the labels that are to be trained."""
        arrays = token_rows(features)
        if self.dedup and not self.merge_labels:
            check_no_floats(arrays)  # here, because a micro-batch does not know its features' places in the step
        return keep_once(arrays) if self.shared_targets == "once" else arrays

    def _fitting(self, arrays: Sequence[TokenRow], group: Sequence[int]) -> dict[str, Any]:
        """Collate features whose unique tokens are within the budget, with every branch if they are over it without.

        They are not cut in two, since every rank knows the number of micro-batches before it collates any.
        """
        members = [arrays[index] for index in group]
        batch = self._collate(members)
        if self.min_shared_tokens == 1 or self._budget is None or batch["input_ids"].numel() <= self._budget:
            return batch
        return replace(self, min_shared_tokens=1)._collate(members)

    @property
    def _missing_for_passes(self) -> str | None:
        """Say what the settings lack for a step in several passes; None if nothing."""
        if not (self.dedup and self.merge_labels):
            return "dedup and merge_labels"
        if self.step_cost is not None and not set(self.step_cost.strategies) & set(WITH_CONTEXT):
            return f"attention auto, {' or '.join(WITH_CONTEXT)}, and step_cost is of {self.step_cost.strategies[0]}"
        if (self.pad_to_multiple_of or 1) > (self._budget or math.inf):
            return f"max_tokens of at least pad_to_multiple_of, {self.pad_to_multiple_of}; it is {self.max_tokens}"
        return None

    @property
    def _budget(self) -> int | None:
        """Return the most unique tokens of a micro-batch; None without a limit."""
        return None if self.max_tokens is None else self.max_tokens * self.sp_size

    @cached_property
    def _collator(self) -> RadixCollator:
        return RadixCollator(
            min_shared_tokens=self.min_shared_tokens,
            pad_to_multiple_of=self.pad_to_multiple_of,
            merge_labels=self.merge_labels,
            step_cost=self.step_cost,
        )

    def _collate(self, arrays: Sequence[TokenRow]) -> dict[str, Any]:
        """Collate one micro-batch."""
        if self.dedup:
            return self._collator.collate(arrays, self._budget)
        return PaddedCollator(pad_token_id=self.pad_token_id).collate(arrays)


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
        ids, labels, cu_seqlens, given_positions, floats = packed(arrays)
        lengths = lengths_of(cu_seqlens)
        is_token = np.arange(lengths.max()) < lengths[:, None]
        input_ids = np.full(is_token.shape, self.pad_token_id, dtype=np.int64)
        input_ids[is_token] = ids
        positions = np.tile(np.arange(is_token.shape[1]), (len(arrays), 1))
        if given_positions is not None:
            positions[is_token] = given_positions
        hidden = np.array([feature.num_left_padding * feature.is_counted_from_padding for feature in arrays])
        positions += hidden[:, None] * is_token
        labels[cu_seqlens[:-1]] = IGNORE_INDEX  # the first token is never predicted
        tokens = np.flatnonzero(labels != IGNORE_INDEX)
        weights = floats.get("loss_weights", np.ones(len(ids), dtype=np.float32))
        return {
            "input_ids": torch.from_numpy(input_ids),
            "attention_mask": torch.from_numpy(is_token.astype(np.int64)),
            "position_ids": torch.from_numpy(positions),
            "shift_labels": torch.from_numpy(labels[tokens])[None],
            RADIX: RadixInputs(
                layout=None,
                cu_seqlens=torch.from_numpy(cu_seqlens.astype(np.int32)),
                predictor_indices=torch.from_numpy(np.flatnonzero(is_token)[tokens] - 1),
                prediction_rows=torch.arange(len(tokens), device="cpu"),
                loss_weights=torch.from_numpy(weights[tokens]),
                label_indices=torch.from_numpy(tokens),
                **policy_fields(floats, tokens),
            ),
        }


def dummy_features(arrays: Sequence[TokenRow], has_weights: bool) -> TokenRow:
    """Make a micro-batch of weight zero, for a rank that has fewer micro-batches of a step than another one.

    All ranks take part in every exchange of gradients, and of parameters if those are sharded, so they run as many
    passes. These are the first tokens of the shortest sequence that bears loss; loss and gradients are exactly 0.

    arrays: the features of the step. The tokens are taken from one of them, because a mixture of experts then routes
        them to experts that the step reaches anyway, and no other expert gets a gradient.
    has_weights: whether the batch has loss weights: then a label of weight 0. Otherwise there is no label.
    """
    # Only a feature that bears loss is sure to have the floats of a policy loss.
    shortest = min(arrays, key=lambda feature: (not feature.num_labels, len(feature.input_ids))).part(0, DUMMY_TOKENS)
    ids = shortest.input_ids
    if has_weights:
        return replace(shortest, labels=ids, loss_weights=np.zeros(len(ids), dtype=np.float32))
    return replace(shortest, labels=np.full_like(ids, IGNORE_INDEX))
