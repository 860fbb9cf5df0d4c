"""How much the steps of an epoch share under the settings that affect it: r, from a sample of steps.

r depends on which conversations make a step (`batch_size`, `group_by_prefix`) and on how a step is cut (`max_tokens`).
The first epoch is drawn as `fit` draws it, and some of its steps, at equal distances, are collated as `fit` does. How
many depends on their tokens and not on the clock, so that r is the same however busy the machine is.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from radixtrain.collators.batching import cut_by_padded_tokens
from radixtrain.collators.prefix_sampler import GroupedOrder, batches_of
from radixtrain.collators.steps import StepCollator
from radixtrain.collators.token_row import IGNORE_INDEX, TokenRow
from radixtrain.data.steps import (
    StepSampler,
    conversation_groups,
    epoch_size,
    features_of,
    grouped_order,
    is_split,
    whole_chats,
)
from radixtrain.report.contents import Splitting
from radixtrain.tree.arrays import IntArray, back_to_back
from radixtrain.tree.groups import PrefixGroups
from radixtrain.tree.radix_inputs import radix_of
from radixtrain.tree.sorting import sort_sequences

BATCH_SIZES = (8, 16, 32, 64, 128, 256)
MAX_TOKENS_FACTORS = (0.25, 0.5, 1, 2, 4)
MAX_STEPS = 16
COUNTED_TOKENS = 1_000_000  # per setting: steps are counted until they hold that many
QUANTILES = {"min": 0.0, "10 %": 0.1, "50 %": 0.5, "90 %": 0.9, "99 %": 0.99, "max": 1.0}
SHORTEST_PROMPT = 16  # tokens, the resolution of `find_prefix_groups`
MAX_SORTED_TOKENS = 32_000_000  # 8 bytes each

Features = Sequence[Mapping[str, Any]]


class Counts(NamedTuple):
    """The counts of a micro-batch.

    rows: that every layer computes: unique tokens, or padded ones.
    attention: what attention costs beyond rows, in a unit of its own for each arm: (query, key) pairs of a radix batch,
        rows x longest sequence of a padded one.
    predictions: rows for which the head computes logits.
    """

    rows: int
    attention: float
    predictions: int


@dataclass(frozen=True, kw_only=True)
class CountedStep:
    """An optimizer step in both arms.

    num_tokens: T. num_whole_tokens: of the whole chats. num_unique_tokens: rows if the step were one micro-batch.
    num_rows: rows that the radix arm computes.
    radix, ordinary, whole: of each micro-batch; whole: of an ordinary step of whole chats.
    collate_seconds: that the radix collator took.
    """

    num_tokens: int
    num_whole_tokens: int
    num_unique_tokens: int
    num_rows: int
    radix: tuple[Counts, ...]
    ordinary: tuple[Counts, ...]
    whole: tuple[Counts, ...]
    collate_seconds: float


def counted_step(
    features: Features,
    collator: StepCollator,
    whole: Sequence[tuple[int, int]],
) -> CountedStep:
    """Collate the sequences of a step as `fit` does, and count. The padded arms are counted without being collated.

    collator: with `dedup`. whole: tokens and labels of the whole chats of the step.
    """
    start = time.perf_counter()
    step = collator(features)
    seconds = time.perf_counter() - start
    assert step.num_unique_tokens is not None
    rows = [(len(each["input_ids"]), int((np.asarray(each["labels"])[1:] != IGNORE_INDEX).sum())) for each in features]
    return CountedStep(
        num_tokens=step.num_tokens,
        num_whole_tokens=sum(length for length, _ in whole),
        num_unique_tokens=step.num_unique_tokens,
        num_rows=step.num_computed_tokens,
        radix=tuple(radix_counts(batch) for batch in step.micro_batches),
        ordinary=_padded_step(rows, collator.max_tokens),
        whole=_padded_step(whole, collator.max_tokens),
        collate_seconds=seconds,
    )


def radix_counts(batch: Mapping[str, Any]) -> Counts:
    """Count a micro-batch of a `RadixCollator`: each unique token attends to its path."""
    rows, predictions = batch["input_ids"].numel(), len(radix_of(batch).predictor_indices)
    return Counts(rows, int(batch["position_ids"].sum()) + rows, predictions)


def ordinary_counts(batch: Mapping[str, Any]) -> Counts:
    """Count a micro-batch of a `PaddedCollator`."""
    num_sequences, longest = batch["input_ids"].shape
    return _padded(num_sequences, longest, len(radix_of(batch).predictor_indices))


def _padded_step(sequences: Sequence[tuple[int, int]], max_tokens: int | None) -> tuple[Counts, ...]:
    """Count a step of sequences with these tokens and labels, cut as for `PaddedCollator`."""
    cut = cut_by_padded_tokens([range(length) for length, _ in sequences], max_tokens)
    groups = ([sequences[index] for index in group] for group in cut)
    return tuple(
        _padded(len(group), max(length for length, _ in group), sum(labels for _, labels in group)) for group in groups
    )


def _padded(num_sequences: int, longest: int, predictions: int) -> Counts:
    return Counts(num_sequences * longest, num_sequences * longest**2, predictions)


@dataclass(frozen=True, order=True)
class Draw:
    """The settings that affect sharing: the keys of `data` with these names. A plain shuffle is False, not 1."""

    batch_size: int
    max_tokens: int
    group_by_prefix: bool | int = False


@dataclass(frozen=True, kw_only=True)
class SampledSteps:
    """Some steps of an epoch. scale: conversations of the epoch per conversation of the sample."""

    draw: Draw
    steps: tuple[CountedStep, ...]
    scale: float

    @property
    def num_tokens(self) -> int:
        return sum(step.num_tokens for step in self.steps)

    @property
    def r(self) -> float:
        """Return tokens per computed token."""
        return self.num_tokens / sum(step.num_rows for step in self.steps)

    @property
    def whole_share(self) -> float:
        """Return tokens of whole chats for each token of the rows."""
        return sum(step.num_whole_tokens for step in self.steps) / self.num_tokens

    @property
    def best_r(self) -> float:
        """Return r if every step were one micro-batch, and every branch taken."""
        return self.num_tokens / sum(step.num_unique_tokens for step in self.steps)


@dataclass(frozen=True, eq=False, kw_only=True)
class Epoch:
    """The conversations of an epoch, and how they are drawn.

    lengths: (num_samples,), int64. tokens of each sample.
    weights: how often each conversation occurs, as for `StepSampler`.
    collator: with `dedup`; its `max_tokens` is replaced.
    """

    conversations: Sequence[Sequence[TokenRow]]
    lengths: IntArray
    seed: int
    shuffle: bool
    collator: StepCollator
    weights: np.ndarray | None = None
    _groupings: dict[tuple[int, str], GroupedOrder | None] = field(default_factory=dict, init=False)

    @property
    def size(self) -> int:
        """Count conversations, each as often as it occurs."""
        return len(self.conversations) if self.weights is None else epoch_size(self.weights)

    @cached_property
    def groups(self) -> PrefixGroups:
        """Group conversations that begin alike. Reads every conversation once."""
        return conversation_groups(self.conversations)

    def sampled(self, draw: Draw) -> SampledSteps:
        """Sample steps of the first epoch, until they hold `COUNTED_TOKENS`: the same for one batch size and order.

        A last step that holds fewer conversations than the others is left out, unless it is the only one.
        """
        collator = replace(self.collator, max_tokens=draw.max_tokens)
        counted, num_conversations = [], 0
        for batch in self.batches(draw):
            whole = [chat for index in batch for chat in whole_chats(self.conversations[index])]
            counted.append(counted_step(self.features(batch), collator, whole))
            num_conversations += len(batch)
            if sum(step.num_tokens for step in counted) > COUNTED_TOKENS:
                break
        return SampledSteps(draw=draw, steps=tuple(counted), scale=self.size / num_conversations)

    def features(self, batch: Sequence[int]) -> Features:
        """Return the sequences of these conversations."""
        return features_of(sample for index in batch for sample in self.conversations[index])

    def settings_grid(self, own: Draw) -> list[Draw]:
        """List draws to compare: other batch sizes with the user's `max_tokens`, and vice versa, plain and grouped.

        own: the user's, which is one of them.

        Leaves out budgets below the longest sequence, which would not bound its micro-batch, and grouped draws that
        would be plain: conversations are not shuffled, or a shuffle is good enough.
        """
        sizes = {size for size in BATCH_SIZES if size <= self.size} | {own.batch_size}
        budgets, longest = {int(own.max_tokens * factor) for factor in MAX_TOKENS_FACTORS}, int(self.lengths.max())
        cross = {(size, own.max_tokens) for size in sizes}
        cross |= {(own.batch_size, budget) for budget in budgets if budget >= longest}
        together = own.group_by_prefix or True
        grouped = {size for size in sizes if self.shuffle and self._grouping(size, together)}
        draws = {Draw(size, budget, together) for size, budget in cross if size in grouped}
        return sorted({own} | draws | {Draw(size, budget) for size, budget in cross})

    def batches(self, draw: Draw) -> list[list[int]]:
        """Return the conversations of some full steps."""
        size, total = draw.batch_size, self.size
        grouping = self._grouping(size, draw.group_by_prefix)
        sampler = StepSampler(len(self.conversations), size, self.shuffle, self.seed, grouping, self.weights)
        return batches_of(sampler.order()[: max(total // size, 1) * size], size, MAX_STEPS)

    def _grouping(self, batch_size: int, group_by_prefix: bool | int) -> GroupedOrder | None:
        """Return the order that draws such steps, made once; None for a plain shuffle."""
        key = batch_size, str(group_by_prefix)  # 1 and True are equal
        if key not in self._groupings:
            wanted = group_by_prefix if isinstance(group_by_prefix, bool) else min(group_by_prefix, batch_size)
            groups = self.groups if wanted else None
            self._groupings[key] = grouped_order(self.conversations, batch_size, wanted, self.seed, groups)
        return self._groupings[key]


def length_quantiles(lengths: IntArray) -> dict[str, int]:
    """Return the tokens of the shortest sample, of the median, ..., of the longest."""
    values = np.quantile(lengths, list(QUANTILES.values()), method="nearest")
    return dict(zip(QUANTILES, map(int, values), strict=True))


def num_shared_prompts(groups: PrefixGroups) -> int:
    """Count distinct prompts: beginnings of at least 16 tokens that several conversations share until they diverge.

    If a longer shared beginning continues a shorter one, only the longer counts. One that saves less than a tenth of
    its conversations' tokens is not a prompt, see `find_prefix_groups`: questions start with the same words by
    accident.
    """
    return groups.num_innermost or int(groups.common >= SHORTEST_PROMPT)


def num_distinct_tokens(epoch: Epoch) -> tuple[int, int]:
    """Count tokens, and those left if each common beginning were computed once, in a single tree of all sequences.

    Counts a sample of the conversations if the epoch is longer than `MAX_SORTED_TOKENS`.
    """
    sequences = [sample.input_ids for index in _some_conversations(epoch) for sample in epoch.conversations[index]]
    packed, bounds = back_to_back(sequences)
    return len(packed), sort_sequences(packed, bounds).num_unique_tokens


def splitting(epoch: Epoch) -> Splitting:
    """Describe the effect of splitting on the sample of `num_distinct_tokens`."""
    turns = changed = num_tokens = num_whole = 0
    for samples in (epoch.conversations[index] for index in _some_conversations(epoch)):
        num_tokens += sum(len(sample.input_ids) for sample in samples)
        num_whole += sum(length for length, _ in whole_chats(samples))
        turns += len(samples)
        if is_split(samples):
            last = samples[-1].input_ids
            changed += sum(not np.array_equal(turn.input_ids, last[: len(turn.input_ids)]) for turn in samples)
    return Splitting(turns, changed, num_whole / num_tokens) if num_whole < num_tokens else Splitting()


def _some_conversations(epoch: Epoch) -> range:
    """Select all conversations, or every n-th if they have more than `MAX_SORTED_TOKENS` tokens."""
    return range(0, len(epoch.conversations), max(1, -(-int(epoch.lengths.sum()) // MAX_SORTED_TOKENS)))
