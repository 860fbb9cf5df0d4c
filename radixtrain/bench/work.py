"""The work of one measured step: sequences, cut into the micro-batches of both arms, and the arithmetic of each.

The ordinary arm is the best that a user has: sequences sorted by length and padded on the right, and the head only on
tokens that predict. `sdpa` does not receive the padding mask: causal attention never looks to the right, and without a
mask it has its fastest kernel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from radixtrain.bench.cells import Cell, GivenBatch, features_of_cell
from radixtrain.bench.flops import ordinary_flops, unique_flops
from radixtrain.collators.features import FeatureArrays, all_feature_arrays, packed_positions
from radixtrain.collators.steps import PaddedCollator, Step, StepCollator
from radixtrain.errors import UserError
from radixtrain.tree.cost_model import CHOICES, StepCost
from radixtrain.tree.layout import LOSS_WEIGHTS, MIN_SHARED_TOKENS, PREDICTOR_INDICES, STRATEGY
from radixtrain.tree.plan import PrefixPlan, build_prefix_plan


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """A collated batch, and which sequences of the work are in it."""

    members: list[int]
    tensors: dict[str, Any]

    def to(self, device: torch.device) -> MicroBatch:
        moved = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in self.tensors.items()}
        return MicroBatch(self.members, moved)


@dataclass(frozen=True, eq=False, kw_only=True)
class Work:
    """One step, in both arms.

    cell: its name.
    features: the sequences, as a collator takes them.
    lengths: tokens of each.
    num_labels: labelled tokens, the divisor of the loss.
    least_unique_tokens: U if the step were not cut; None if it is one micro-batch.
    ordinary, radix: micro-batches that make the step together, of either arm.
    plans: of each micro-batch in `radix`.
    auto: as `radix`, with what a `StepCost` chose for each micro-batch; None without one.
    """

    cell: Cell | GivenBatch
    features: Sequence[Mapping[str, Any]]
    lengths: list[int]
    num_labels: int
    least_unique_tokens: int | None
    ordinary: list[MicroBatch]
    radix: list[MicroBatch]
    plans: list[PrefixPlan]
    auto: list[MicroBatch] | None = None

    def to(self, device: torch.device) -> Work:
        auto = None if self.auto is None else [batch.to(device) for batch in self.auto]
        ordinary, radix = ([batch.to(device) for batch in batches] for batches in (self.ordinary, self.radix))
        return replace(self, ordinary=ordinary, radix=radix, auto=auto)

    def radix_batches(self, attention: str) -> list[MicroBatch]:
        """For a strategy by name, or for `auto`: what the `StepCost` chose, if there is one."""
        return self.auto if attention == "auto" and self.auto is not None else self.radix

    @property
    def choices(self) -> str:
        """What the `StepCost` chose for the micro-batches of `auto`, as `strategy/min_shared_tokens`."""
        chosen = [f"{CHOICES[batch.tensors[STRATEGY]]}/{batch.tensors[MIN_SHARED_TOKENS]}" for batch in self.auto or ()]
        return ", ".join(dict.fromkeys(chosen))

    @property
    def num_tokens(self) -> int:
        """T, without padding."""
        return sum(self.lengths)

    def num_unique_tokens(self, attention: str) -> int:
        """U, what a radix arm computes: a prefix that is in two micro-batches counts twice."""
        return sum(batch.tensors["input_ids"].numel() for batch in self.radix_batches(attention))

    def ideal_speedup(self, config: Any) -> float:
        """Floating-point operations of the ordinary arm, without its padding, over those of the radix arm."""
        predictors = [len(batch.tensors[PREDICTOR_INDICES]) for batch in self.radix]
        unique = (unique_flops(config, *each).total for each in zip(self.plans, predictors, strict=True))
        return self._ordinary_flops(config) / sum(unique)

    def ordinary_teraflops(self, config: Any) -> float:
        """1e12 floating-point operations of the ordinary arm's forward pass, or of its step: three times as many."""
        return self._ordinary_flops(config) * (3 if self.cell.mode == "step" else 1) / 1e12

    def _ordinary_flops(self, config: Any) -> float:
        """Of a forward pass. A sequence costs the same in any micro-batch, so the radix ones are counted."""
        labels = [int(batch.tensors[LOSS_WEIGHTS].sum()) for batch in self.radix]
        return sum(ordinary_flops(config, *each).total for each in zip(self.plans, labels, strict=True))


def make_work(cell: Cell) -> Work:
    """Collate a cell, on the host: one micro-batch in each arm, without padding."""
    return work_of(cell, features_of_cell(cell))


def work_of(
    cell: Cell | GivenBatch,
    features: Sequence[Mapping[str, Any]],
    batch_size: int | None = None,
    max_tokens: int | None = None,
) -> Work:
    """Collate given sequences, on the host.

    features: as a `RadixCollator` takes them.
    batch_size: sequences of an ordinary micro-batch; None for a single micro-batch.
    max_tokens: most unique tokens of a radix micro-batch; None for a single micro-batch.

    Raises UserError if no token bears loss.
    """
    step = StepCollator(max_tokens=max_tokens)(features)
    if not step.num_labels:
        raise UserError(f"{cell}: no token bears loss, so there is no step to measure")
    arrays = all_feature_arrays(features)
    radix = _micro_batches(step)
    return Work(
        cell=cell,
        features=features,
        lengths=[len(feature.input_ids) for feature in arrays],
        num_labels=step.num_labels,
        least_unique_tokens=step.num_unique_tokens if len(step.micro_batches) > 1 else None,
        ordinary=_padded(arrays, batch_size, keep_mask=False),
        radix=radix,
        plans=[_plan([arrays[index] for index in batch.members]) for batch in radix],
    )


def with_choices(work: Work, step_cost: StepCost, max_tokens: int | None = None) -> Work:
    """The same work with the batches of `auto`; on the host. max_tokens: as for `work_of`."""
    return replace(work, auto=_micro_batches(StepCollator(max_tokens=max_tokens, step_cost=step_cost)(work.features)))


def with_ordinary_batch_size(work: Work, batch_size: int | None, keep_mask: bool = False) -> Work:
    """The same work with its ordinary arm cut anew; on the host.

    batch_size: as for `work_of`.
    keep_mask: give attention the padding mask, for kernels that skip what it hides.
    """
    return replace(work, ordinary=_padded(all_feature_arrays(work.features), batch_size, keep_mask))


def _micro_batches(step: Step) -> list[MicroBatch]:
    return [MicroBatch(*each) for each in zip(step.members, step.micro_batches, strict=True)]


def _plan(arrays: Sequence[FeatureArrays]) -> PrefixPlan:
    ids = [feature.input_ids for feature in arrays]
    cu_seqlens = np.cumsum([0] + [len(sequence) for sequence in ids])
    return build_prefix_plan(np.concatenate(ids), cu_seqlens, packed_positions(arrays))


def _padded(arrays: Sequence[FeatureArrays], batch_size: int | None, keep_mask: bool) -> list[MicroBatch]:
    """Padded batches of so many sequences, the longest first."""
    order = sorted(range(len(arrays)), key=lambda index: -len(arrays[index].input_ids))
    size = batch_size or len(order)
    batches = []
    for members in (order[start : start + size] for start in range(0, len(order), size)):
        tensors = PaddedCollator().collate([arrays[index] for index in members])
        if not keep_mask:
            tensors["attention_mask"] = torch.ones_like(tensors["attention_mask"])
        batches.append(MicroBatch(members, tensors))
    return batches
