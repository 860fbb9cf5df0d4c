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
from typing import Any

import numpy as np

from radixtrain.collators.batching import cut_by_padded_tokens
from radixtrain.collators.prefix_sampler import GroupedOrder, batches_of
from radixtrain.collators.steps import StepCollator
from radixtrain.collators.token_row import IGNORE_INDEX, TokenRow
from radixtrain.data.steps import StepSampler, conversation_groups, epoch_size, features_of, grouped_order, whole_chats
from radixtrain.tree.arrays import IntArray
from radixtrain.tree.groups import PrefixGroups

BATCH_SIZES = (8, 16, 32, 64, 128, 256)
MAX_TOKENS_FACTORS = (0.25, 0.5, 1, 2, 4)
MAX_STEPS = 16
COUNTED_TOKENS = 1_000_000  # per setting: steps are counted until they hold that many
QUANTILES = {"min": 0.0, "10 %": 0.1, "50 %": 0.5, "90 %": 0.9, "99 %": 0.99, "max": 1.0}
SHORTEST_PROMPT = 16  # tokens, the resolution of `find_prefix_groups`

Features = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, order=True)
class Draw:
    """The settings that affect sharing: the keys of `data` with these names. A plain shuffle is False, not 1."""

    batch_size: int
    max_tokens: int
    group_by_prefix: bool | int = False


@dataclass(frozen=True, kw_only=True)
class SampledSteps:
    """Some steps of an epoch, counted together.

    scale: conversations of the epoch per conversation of these steps.
    num_tokens: of the rows. num_whole_tokens: of the whole chats; the same if no chat is split into its turns.
    num_unique_tokens: that would be computed if each step were one micro-batch and every branch were taken.
    radix, ordinary: rows that every layer computes of each micro-batch: unique tokens; and padded ones of whole chats.
    collate_seconds: that the radix collator took.
    """

    draw: Draw
    num_steps: int
    scale: float
    num_tokens: int
    num_whole_tokens: int
    num_unique_tokens: int
    radix: tuple[int, ...]
    ordinary: tuple[int, ...]
    collate_seconds: float = 0.0

    @property
    def num_rows(self) -> int:
        """Count the tokens that are computed."""
        return sum(self.radix)


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

        A last step that holds fewer conversations than the others is left out, unless it is the only one. They are
        collated as `fit` does; the ordinary arm is counted without being collated.
        """
        collator = replace(self.collator, max_tokens=draw.max_tokens)
        steps, ordinary, drawn, seconds = [], [], [], 0.0
        for batch in self.batches(draw):
            start = time.perf_counter()
            steps.append(collator(self.features(batch)))
            seconds += time.perf_counter() - start
            chats = [range(length) for index in batch for length, _ in whole_chats(self.conversations[index])]
            cut = cut_by_padded_tokens(chats, draw.max_tokens)
            ordinary += [[len(chats[index]) for index in group] for group in cut]
            drawn += batch
            if sum(step.num_tokens for step in steps) > COUNTED_TOKENS:
                break
        return SampledSteps(
            draw=draw,
            num_steps=len(steps),
            scale=self.size / len(drawn),
            num_tokens=sum(step.num_tokens for step in steps),
            num_whole_tokens=sum(map(sum, ordinary)),
            num_unique_tokens=sum(step.num_unique_tokens or 0 for step in steps),
            radix=tuple(batch["input_ids"].numel() for step in steps for batch in step.micro_batches),
            ordinary=tuple(len(lengths) * max(lengths) for lengths in ordinary),
            collate_seconds=seconds,
        )

    def features(self, batch: Sequence[int]) -> Features:
        """Return the sequences of these conversations."""
        return features_of(sample for index in batch for sample in self.conversations[index])

    def whole_chats(self, batch: Sequence[int]) -> Features:
        """Return the sequences that an ordinary trainer computes of them, with as many labels, at their ends."""
        found = []
        for samples in (self.conversations[index] for index in batch):
            for sample, (length, num_labels) in zip(samples[::-1], whole_chats(samples)[::-1], strict=False):
                labels = np.where(np.arange(length) < length - num_labels, IGNORE_INDEX, sample.input_ids)
                found.append({"input_ids": sample.input_ids, "labels": labels})
        return found

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
