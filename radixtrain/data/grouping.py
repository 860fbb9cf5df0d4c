"""`data.group_by_prefix`: conversations with a common prompt in one step, and what r that order and others reach."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from radixtrain.collators.passes import Keeping
from radixtrain.collators.prefix_sampler import GroupedOrder, ratio_of_batches
from radixtrain.collators.token_row import IGNORE_INDEX, TokenRow
from radixtrain.tree.arrays import IntArray
from radixtrain.tree.groups import PrefixGroups, find_prefix_groups

Conversations = Sequence[Sequence[TokenRow]]
FAR_BELOW = 0.8
"""An order is far below what the data could give if it reaches less than this part of it."""


@dataclass(frozen=True)
class Arrangement:
    """r of the order that a run has, and r that `group_by_prefix: true` would reach on the same data."""

    r: float
    grouped_r: float

    @property
    def hint(self) -> str | None:
        """A sentence for the log, if the order of the run is far below the other one."""
        if self.r >= FAR_BELOW * self.grouped_r:
            return None
        return f"r is {self.r:.1f}; data.group_by_prefix: true would give about {self.grouped_r:.1f}"


class Expected(NamedTuple):
    """r, tokens of the samples per computed token; and tokens of whole chats for each of them, see `whole_chats`."""

    r: float
    whole_share: float


def expected_r(
    conversations: Conversations,
    batches: Iterable[Sequence[int]],
    max_tokens: int | None,
    num_ranks: int = 1,
    keeping: Keeping | None = None,
) -> Expected:
    """What these steps are expected to share.

    batches: the conversations of each step, by index.
    max_tokens: unique tokens of a micro-batch, by which a step is cut; None if it is not.
    num_ranks: ranks that share out each step. keeping: of the `StepCollator`.

    Each conversation is read once for each time that it is listed. What changes r by little is not taken into account,
    see `ratio_of_batches`.
    """
    num_tokens = num_whole = 0

    def sequences_of(index: int) -> list[IntArray]:
        nonlocal num_tokens, num_whole
        samples = conversations[index]
        num_tokens += sum(len(sample.input_ids) for sample in samples)
        num_whole += sum(length for length, _ in whole_chats(samples))
        return [sample.input_ids for sample in samples]

    r = ratio_of_batches(sequences_of, batches, max_tokens, num_ranks, keeping)
    return Expected(r, num_whole / num_tokens if num_tokens else 1.0)


def whole_chats(samples: Sequence[TokenRow]) -> list[tuple[int, int]]:
    """(tokens, labels) of each sequence that a trainer on whole chats has of a conversation.

    Of a chat that is split into its turns this is one, as long as the last turn with all before it. Anything else is
    there as it is.
    """
    counts = [(len(sample.input_ids), sample.num_labels) for sample in samples]
    return [(counts[-1][0], sum(labels for _, labels in counts))] if is_split(samples) else counts


def is_split(samples: Sequence[TokenRow]) -> bool:
    """Whether these are the turns of a chat: each ends with its labels, unlike most branches of an agent's run."""
    return len(samples) > 1 and all(
        len(labelled := np.flatnonzero(sample.labels != IGNORE_INDEX))
        and labelled[-1] - labelled[0] == len(labelled) - 1 == len(sample.labels) - 1 - labelled[0]
        for sample in samples
    )


def grouped_order(
    conversations: Conversations,
    batch_size: int,
    group_by_prefix: bool | int,
    seed: int,
    groups: PrefixGroups | None = None,
) -> GroupedOrder | None:
    """What draws the steps of an epoch, or None for a plain shuffle.

    group_by_prefix: conversations of a prompt that stay together in a step. True chooses, see `GroupedOrder.choose`.
        False and 1 are a plain shuffle, and so is True if a plain shuffle is good enough.
    groups: of these conversations, if they are known.

    Reads every conversation once. The result depends on them, on `batch_size` and on `seed`.
    """
    if group_by_prefix is not True and group_by_prefix <= 1:
        return None
    groups = conversation_groups(conversations) if groups is None else groups
    if group_by_prefix is True:
        order = GroupedOrder.choose(groups, batch_size, seed)
    else:
        order = GroupedOrder(groups, batch_size, group_by_prefix)
    return order if order.together > 1 and len(groups) else None


def conversation_groups(conversations: Conversations) -> PrefixGroups:
    """Groups of conversations that begin alike, by the last sample of each, which has the most of its history."""
    return find_prefix_groups(conversations[index][-1].input_ids for index in range(len(conversations)))
