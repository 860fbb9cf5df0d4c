"""Where a sample is computed: its step, its micro-batch, its rows there, and with whom it shares them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from radixtrain.data.datamodule import SFTData
from radixtrain.inspection.micro_batch import MicroBatch, micro_batches
from radixtrain.inspection.runs import paths_of

__all__ = ["Place", "SharedRows", "places_of"]


@dataclass(frozen=True)
class SharedRows:
    """Neighbouring rows of a sample that the same sequences share.

    rows: the first, and one past the last. others: the other sequences, by `file:line`; empty if they are its own.
    """

    rows: tuple[int, int]
    others: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Place:
    """One sample of a row in the first epoch. sequence: its index in the micro-batch. shared: its rows, in order."""

    part: MicroBatch
    sequence: int
    shared: tuple[SharedRows, ...]


def places_of(data: SFTData, where: str) -> list[Place]:
    """Where the samples of a row are computed in the first epoch; none if it is not trained on.

    data: after `setup("inspect")`. where: `file:line` of the row.
    """
    conversation = _conversation_of(data, where)
    steps = enumerate(data.train_steps())
    step = next((number for number, members in steps if conversation in members), None)
    if step is None:
        return []
    return [
        Place(part, sequence, tuple(_shared(part, sequence)))
        for part in micro_batches(data, step)
        for sequence, sample in enumerate(part.samples)
        if sample.where == where
    ]


def _conversation_of(data: SFTData, where: str) -> int | None:
    conversations = data.conversations["train"]
    return next((i for i in range(len(conversations)) if conversations[i][0].where == where), None)


def _shared(part: MicroBatch, sequence: int) -> Iterator[SharedRows]:
    """A run ends where the rows jump or where other sequences share them."""
    paths = paths_of(part)
    own = paths[sequence]
    has = np.stack([np.isin(own, path) for path in paths])
    ends = np.flatnonzero((np.diff(own) != 1) | (has[:, 1:] != has[:, :-1]).any(axis=0)) + 1
    for start, end in pairwise([0, *ends.tolist(), len(own)]):
        others = [i for i in np.flatnonzero(has[:, start]).tolist() if i != sequence]
        names = tuple(part.samples[other].where for other in others)
        yield SharedRows((int(own[start]), int(own[end - 1]) + 1), names)
