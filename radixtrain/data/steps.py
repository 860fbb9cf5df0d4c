"""Optimizer steps as a data set: which conversations make a step, and with which step a resumed run continues.

`data.group_by_prefix` brings conversations with a common prompt into one step; r of any order is predicted here too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
from torch.utils.data import DataLoader, Dataset, Sampler
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from radixtrain.collators.prefix_sampler import GroupedOrder, batches_of, ratio_of_batches
from radixtrain.collators.steps import Step, StepCollator
from radixtrain.collators.token_row import IGNORE_INDEX, TokenRow
from radixtrain.data.prompts import PromptDataset
from radixtrain.data.workers import blocked_signals, end_with_parent, worker_context
from radixtrain.tree.arrays import IntArray
from radixtrain.tree.groups import PrefixGroups, find_prefix_groups

Conversations = Sequence[Sequence[TokenRow]]


class Expected(NamedTuple):
    """r, tokens of the samples per computed token; and tokens of whole chats per computed token, see `whole_chats`."""

    r: float
    whole_share: float


def expected_r(
    conversations: Conversations, batches: Iterable[Sequence[int]], max_tokens: int | None, num_ranks: int = 1
) -> Expected:
    """Predict how much these steps share.

    batches: the conversations of each step, by index.
    max_tokens: unique tokens of a micro-batch, by which a step is cut; None if it is not.
    num_ranks: ranks that divide each step.

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

    r = ratio_of_batches(sequences_of, batches, max_tokens, num_ranks)
    return Expected(r, num_whole / num_tokens if num_tokens else 1.0)


def whole_chats(samples: Sequence[TokenRow]) -> list[tuple[int, int]]:
    """Count (tokens, labels) of each sequence that a trainer on whole chats has of a conversation.

    A chat that is split into its turns is one sequence: the last turn with all before it. Others count one by one.
    """
    counts = [(len(sample.input_ids), sample.num_labels) for sample in samples]
    return [(counts[-1][0], sum(labels for _, labels in counts))] if is_split(samples) else counts


def is_split(samples: Sequence[TokenRow]) -> bool:
    """Return whether these are the turns of a chat: each ends with its labels, unlike most branches of a run."""
    return len(samples) > 1 and all(
        len(labelled := np.flatnonzero(sample.labels != IGNORE_INDEX))
        and labelled[-1] - labelled[0] == len(labelled) - 1 == len(sample.labels) - 1 - labelled[0]
        for sample in samples
    )


def text_of_copies(conversations: Any, settings: Any) -> str:
    """Say how many conversations have the tokens and labels of another one, and what r is without; empty if none has.

    conversations: a `Corpus`. settings: of an `SFTData`.
    """
    seen: dict[bytes, int] = {}
    for index, samples in enumerate(conversations):
        digest = xxhash.xxh3_128(b"".join(sample.input_ids.tobytes() + sample.labels.tobytes() for sample in samples))
        seen.setdefault(digest.digest(), index)
    total, num_copies = len(conversations), len(conversations) - len(seen)
    if not num_copies:
        return ""
    order = np.random.default_rng(settings.seed).permutation([*seen.values()])
    alone = expected_r(conversations, batches_of(order, settings.batch_size), settings.max_tokens)
    counts = f"{num_copies:,} of {total:,} conversations are copies of others, and count in r"
    return f"{counts}: in random steps without them r is about {alone.r * alone.whole_share:.1f}"


def grouped_order(
    conversations: Conversations,
    batch_size: int,
    group_by_prefix: bool | int,
    seed: int,
    groups: PrefixGroups | None = None,
) -> GroupedOrder | None:
    """Return the order that draws the steps of an epoch, or None for a plain shuffle.

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
    """Group conversations that begin alike, by the last sample of each, which has the most of its history."""
    return find_prefix_groups(conversations[index][-1].input_ids for index in range(len(conversations)))


@dataclass(eq=False)
class StepDataset(Dataset[Step]):
    """Maps a list of conversation indices to the collated optimizer step; runs in the DataLoader worker.

    conversations: samples of each; the samples of one conversation are drawn together.
    collator: cuts and collates.

    A step records the file and line of each of its sequences.
    """

    conversations: Sequence[Sequence[TokenRow]]
    collator: StepCollator

    def __len__(self) -> int:
        return len(self.conversations)

    def __getitem__(self, indices: list[int]) -> Step:
        conversations = [self.conversations[index] for index in indices]
        samples = [sample for conversation in conversations for sample in conversation]
        return replace(
            self.collator(features_of(samples, self.collator.merge_labels)),
            num_whole_tokens=sum(length for each in conversations for length, _ in whole_chats(each)),
            where=tuple(sample.where for sample in samples),
        )


def features_of(samples: Iterable[TokenRow], weighted: bool = True) -> list[dict[str, Any]]:
    """Return samples as a collator takes them. weighted: False without loss weights, for log-probabilities."""
    return [(sample if weighted else replace(sample, loss_weights=None)).columns for sample in samples]


@dataclass(eq=False)
class StepSampler(Sampler[list[int]]):
    """Yields lists of conversation indices, one for each step. The order depends only on `seed` and the epoch.

    num_conversations, batch_size: in conversations; the last step of an epoch may hold fewer.
    shuffle: a new permutation each epoch; otherwise the order of the file.
    grouping: draws the permutation so that conversations with a common prompt meet; None for a plain one.
    weights: (num_conversations,), float64. how often each comes in an epoch; None if each comes once.
    """

    num_conversations: int
    batch_size: int
    shuffle: bool
    seed: int
    grouping: GroupedOrder | None = None
    weights: np.ndarray | None = None
    epoch: int = field(default=0, init=False)
    start: int = field(default=0, init=False)

    def __len__(self) -> int:
        size = self.num_conversations if self.weights is None else epoch_size(self.weights)
        return -(-size // self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        """Return the iterator of a list, not a generator: `start` is for one pass only, so it is read now."""
        order = self.order()
        firsts = range(self.start * self.batch_size, len(order), self.batch_size)
        return iter([order[first : first + self.batch_size].tolist() for first in firsts])

    def order(self) -> IntArray:
        """Return the conversations of this epoch, in the order in which they are cut into steps."""
        generator = np.random.default_rng([self.seed, self.epoch])
        indices = np.arange(self.num_conversations) if self.weights is None else draw_epoch(self.weights, generator)
        if not self.shuffle:
            return indices
        return generator.permutation(indices) if self.grouping is None else self.grouping.draw(indices, generator)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, at its start."""
        self.epoch = epoch


class StepLoader:
    """A DataLoader over steps, or over their prompts, that counts them, so that a resumed run takes the next one.

    Lightning stores `state_dict()` in its checkpoints, and sets the epoch of `sampler`. A resumed run does not read the
    steps that it skips: the sampler starts later. A wrapper and not a subclass, because Lightning rebuilds DataLoaders
    around their sampler.
    """

    batch_sampler = None  # Lightning's `predict` reads it

    def __init__(self, dataset: StepDataset | PromptDataset, sampler: StepSampler, **options: Any):
        self.sampler = sampler
        own = torch.Generator()  # a DataLoader draws a seed for its workers, by default from the generator of dropout
        context = worker_context() if options.get("num_workers") else None
        options |= {"generator": own, "worker_init_fn": end_with_parent, "multiprocessing_context": context}
        self.loader: DataLoader[Any] = DataLoader(dataset, sampler=sampler, batch_size=None, **options)
        self.handed_out = 0
        self._steps: Any = None

    @property
    def _iterator(self) -> Any:
        """Return the loader's iterator; Lightning looks for this name to end workers that outlive an epoch."""
        return self.loader._iterator

    @_iterator.setter
    def _iterator(self, iterator: Any) -> None:
        self.loader._iterator = iterator

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[Any]:
        self.handed_out = self.sampler.start
        with blocked_signals():
            steps = self._steps = iter(self.loader)
        self.sampler.start = 0  # Lightning leaves a pass at its last step, so code after the loop may never run
        for step in steps:
            self.handed_out += 1
            yield step

    def close(self) -> None:
        """End the workers, if there are any; the next pass starts new ones."""
        self.loader._iterator = None
        if isinstance(self._steps, _MultiProcessingDataLoaderIter):
            self._steps._shutdown_workers()
        self._steps = None

    def state_dict(self) -> dict[str, int]:
        return {"handed_out": self.handed_out}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.sampler.start = state["handed_out"] % len(self)


def draw_epoch(weights: np.ndarray, generator: np.random.Generator) -> IntArray:
    """Draw the conversations of an epoch, in rising order; each as often as its weight says on average.

    weights: (num_conversations,), float64, not negative. 2.0: twice in every epoch; 0.25: a quarter of the
        conversations of this weight, drawn anew for every epoch.
    """
    times = np.floor(weights).astype(np.int64)
    for part, size in _parts(weights):
        drawn = generator.choice(np.flatnonzero(weights % 1 == part), size, replace=False)
        times[drawn] += 1
    return np.repeat(np.arange(len(weights)), times)


def epoch_size(weights: np.ndarray) -> int:
    """Count the conversations in an epoch, the same for every epoch."""
    return int(np.floor(weights).sum()) + sum(size for _, size in _parts(weights))


def _parts(weights: np.ndarray) -> list[tuple[float, int]]:
    """Return the fractions that weights have, and how many conversations with each come once more."""
    parts, counts = np.unique(weights % 1, return_counts=True)
    return [(part, round(part * count)) for part, count in zip(parts.tolist(), counts.tolist(), strict=True) if part]
