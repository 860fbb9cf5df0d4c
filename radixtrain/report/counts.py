"""What an optimizer step computes, counted: the numbers that its seconds and its memory are predicted from."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from radixtrain.collators.batching import cut_by_padded_tokens
from radixtrain.collators.features import IGNORE_INDEX
from radixtrain.collators.steps import Step, StepCollator
from radixtrain.tree.cost_model import CHOICES, StepCost
from radixtrain.tree.layout import MIN_SHARED_TOKENS, PREDICTOR_INDICES, STRATEGY
from radixtrain.tree.plan import PrefixPlan, build_prefix_plan

__all__ = ["CountedStep", "Counts", "Features", "counted_step", "ordinary_counts", "plans_of", "radix_counts"]

Features = Sequence[Mapping[str, Any]]


class Counts(NamedTuple):
    """Of a micro-batch.

    rows: that every layer computes: unique tokens, or padded ones.
    attention: what attention costs beyond rows. In a unit of its own for each arm: seconds of one layer by its
        `StepCost` in a radix batch, or its (query, key) pairs without one; rows x longest sequence in a padded batch.
    predictions: rows for which the head computes logits.
    """

    rows: float
    attention: float
    predictions: float


@dataclass(frozen=True, kw_only=True)
class CountedStep:
    """An optimizer step in both arms.

    num_tokens: T. num_unique_tokens: rows if the step were one micro-batch.
    radix, ordinary: of each micro-batch.
    collate_seconds: that the radix collator took.
    """

    num_tokens: int
    num_unique_tokens: int
    radix: tuple[Counts, ...]
    ordinary: tuple[Counts, ...]
    collate_seconds: float

    @property
    def num_rows(self) -> int:
        """That the radix arm computes."""
        return round(sum(counts.rows for counts in self.radix))


def counted_step(features: Features, collator: StepCollator, step_cost: StepCost | None) -> CountedStep:
    """Collate the sequences of a step as `fit` does, and count. The padded arm is counted without being collated.

    collator: with `dedup`. step_cost: of one layer on this machine; None without one.
    """
    start = time.perf_counter()
    step = collator(features)
    seconds = time.perf_counter() - start
    assert step.num_unique_tokens is not None
    plans = plans_of(features, step)
    labels = _num_labels(features)
    return CountedStep(
        num_tokens=step.num_tokens,
        num_unique_tokens=step.num_unique_tokens,
        radix=tuple(radix_counts(*each, step_cost) for each in zip(step.micro_batches, plans, strict=True)),
        ordinary=tuple(_padded_counts(features, labels, collator.max_tokens)),
        collate_seconds=seconds,
    )


def plans_of(features: Features, step: Step) -> list[PrefixPlan]:
    """The plan of each micro-batch of a step of the radix arm."""
    return [_plan(features, *each) for each in zip(step.members, step.micro_batches, strict=True)]


def radix_counts(batch: Mapping[str, Any], plan: PrefixPlan, step_cost: StepCost | None) -> Counts:
    """Of a micro-batch of a `RadixCollator` and its plan."""
    rows, predictions = batch["input_ids"].numel(), len(batch[PREDICTOR_INDICES])
    if step_cost is None:
        return Counts(rows, _pairs(plan), predictions)
    strategy = CHOICES[batch[STRATEGY]] if STRATEGY in batch else step_cost.strategies[0]
    linear = plan.num_rows * step_cost.row_flops * step_cost.rates.flop
    return Counts(rows, step_cost.seconds(plan, strategy) - linear, predictions)


def ordinary_counts(batch: Mapping[str, Any]) -> Counts:
    """Of a micro-batch of a `PaddedCollator`."""
    num_sequences, longest = batch["input_ids"].shape
    return _padded(num_sequences, longest, len(batch[PREDICTOR_INDICES]))


def _plan(features: Features, members: list[int], batch: Mapping[str, Any]) -> PrefixPlan:
    ids = [np.asarray(features[index]["input_ids"], dtype=np.int64) for index in members]
    bounds = np.cumsum([0, *map(len, ids)])
    return build_prefix_plan(np.concatenate(ids), bounds, min_shared_tokens=batch.get(MIN_SHARED_TOKENS, 1))


def _pairs(plan: PrefixPlan) -> int:
    """(query, key) pairs of unique tokens: each sees its own path."""
    return int(plan.position_ids.sum() + plan.num_rows)


def _padded_counts(features: Features, labels: Sequence[int], max_tokens: int | None) -> Iterator[Counts]:
    lengths = [len(feature["input_ids"]) for feature in features]
    for group in cut_by_padded_tokens([feature["input_ids"] for feature in features], max_tokens):
        longest = max(lengths[index] for index in group)
        yield _padded(len(group), longest, sum(labels[index] for index in group))


def _padded(num_sequences: int, longest: int, predictions: int) -> Counts:
    return Counts(num_sequences * longest, num_sequences * longest**2, predictions)


def _num_labels(features: Features) -> list[int]:
    return [int((np.asarray(feature["labels"])[1:] != IGNORE_INDEX).sum()) for feature in features]
