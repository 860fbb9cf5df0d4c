"""Optimizer steps as a data set: which conversations make a step, and where a run that is resumed goes on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, Dataset, Sampler

from radixtrain.collators.steps import StepCollator
from radixtrain.data.sample import Sample

__all__ = ["StepDataset", "StepLoader", "StepSampler"]


class StepDataset(Dataset[dict[str, Any]]):
    """Maps a list of conversation indices to the collated optimizer step; runs in the DataLoader worker.

    conversations: samples of each; the samples of one conversation are drawn together.
    collator: cuts and collates.

    A step carries `rows` beside the collator's entries: where each of its sequences came from, for error messages.
    """

    def __init__(self, conversations: Sequence[Sequence[Sample]], collator: StepCollator):
        self.conversations = conversations
        self.collator = collator

    def __len__(self) -> int:
        return len(self.conversations)

    def __getitem__(self, indices: list[int]) -> dict[str, Any]:
        rows = [sample.where for index in indices for sample in self.conversations[index]]
        return {**self.collator(self.features(indices)), "rows": rows}

    def features(self, indices: list[int]) -> list[dict[str, Any]]:
        """The sequences of these conversations, as the collator takes them."""
        samples = [sample for index in indices for sample in self.conversations[index]]
        return [{"input_ids": sample.input_ids, "labels": sample.labels} for sample in samples]


class StepSampler(Sampler[list[int]]):
    """Lists of conversation indices, one a step. The order of an epoch depends on `seed` and the epoch's number alone.

    num_conversations, batch_size: in conversations; the last step of an epoch may hold fewer.
    shuffle: a new permutation each epoch; otherwise the order of the file.
    """

    def __init__(self, num_conversations: int, batch_size: int, shuffle: bool, seed: int):
        self.num_conversations, self.batch_size = num_conversations, batch_size
        self.shuffle, self.seed = shuffle, seed
        self.epoch = 0
        self.start = 0

    def __len__(self) -> int:
        return -(-self.num_conversations // self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        """Decides at once, and not when the first step is asked for: `start` holds for one pass only."""
        order = np.arange(self.num_conversations)
        if self.shuffle:
            order = np.random.default_rng([self.seed, self.epoch]).permutation(self.num_conversations)
        firsts = range(self.start * self.batch_size, self.num_conversations, self.batch_size)
        return iter([order[first : first + self.batch_size].tolist() for first in firsts])

    def set_epoch(self, epoch: int) -> None:
        """Called by Lightning at the start of every epoch."""
        self.epoch = epoch


class StepLoader:
    """A DataLoader over steps that knows how many it handed out, so that a resumed run goes on with the next one.

    Lightning stores `state_dict()` in its checkpoints, and tells `sampler` the epoch. Nothing is skipped by reading it:
    the sampler starts later. A wrapper and not a subclass, because Lightning rebuilds DataLoaders around their sampler.
    """

    batch_sampler = None  # Lightning's `predict` asks for it

    def __init__(self, dataset: StepDataset, sampler: StepSampler, **options: Any):
        self.sampler = sampler
        self.loader: DataLoader[dict[str, Any]] = DataLoader(dataset, sampler=sampler, batch_size=None, **options)
        self.handed_out = 0

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self.handed_out = self.sampler.start
        steps = iter(self.loader)
        self.sampler.start = 0  # Lightning leaves a pass at its last step, so nothing behind the loop is sure to run
        for step in steps:
            self.handed_out += 1
            yield step

    def state_dict(self) -> dict[str, int]:
        return {"handed_out": self.handed_out}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.sampler.start = state["handed_out"] % len(self)
