"""An optimizer batch -> micro-batches under a budget of unique tokens, which is what memory is spent on.

Tokens are shared only inside a micro-batch, so the cut decides the speed. The sequences are sorted, which puts shared
prefixes side by side, and cut when the budget is full. The gradient of the optimizer step does not depend on the cut,
since the loss of a micro-batch is a sum, divided by the labelled tokens of the whole step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from radixtrain.tree.arrays import IntArray
from radixtrain.tree.sorting import SortedSequences, sort_sequences

__all__ = ["Cut", "cut_by_padded_tokens", "cut_by_unique_tokens", "cut_sorted", "cut_step", "sorted_step"]


class Cut(NamedTuple):
    """An optimizer batch in micro-batches.

    groups: micro-batches of the sequences, by index, in sorted order.
    num_unique_tokens: of all sequences together: what a single micro-batch would compute, so no cut computes less.
    """

    groups: list[list[int]]
    num_unique_tokens: int


def cut_by_unique_tokens(
    sequences: Sequence[IntArray], max_tokens: int | None, position_ids: IntArray | None = None
) -> list[list[int]]:
    """The groups of `cut_step`: micro-batches of the sequences, by index, in sorted order."""
    return cut_step(sequences, max_tokens, position_ids).groups


def cut_step(sequences: Sequence[IntArray], max_tokens: int | None, position_ids: IntArray | None = None) -> Cut:
    """Micro-batches of the sequences, and the unique tokens that no cut gets below.

    sequences: token ids of each, (L,), int64.
    max_tokens: most unique tokens in a micro-batch; None for a single micro-batch. A longer sequence gets its own.
    position_ids: (T,), int64, of all sequences back to back, if they do not count from 0.

    Raises ValueError for an empty sequence, which has no place in the order.

    A sequence costs the tokens that it does not share with the one before it; the first of a micro-batch costs all.
    """
    by_order = sorted_step(sequences, position_ids)
    return Cut(cut_sorted(by_order, max_tokens), by_order.num_unique_tokens)


def sorted_step(sequences: Sequence[IntArray], position_ids: IntArray | None = None) -> SortedSequences:
    """The sequences in the order in which they are cut. Arguments and error as of `cut_step`."""
    lengths = np.array([len(ids) for ids in sequences], dtype=np.int64)
    if not lengths.all():
        raise ValueError(f"sequence {int(lengths.argmin())} is empty")
    packed = np.concatenate([*sequences, np.zeros(0, dtype=np.int64)])
    return sort_sequences(packed, np.concatenate([[0], np.cumsum(lengths)]), position_ids)


def cut_sorted(by_order: SortedSequences, max_tokens: int | None) -> list[list[int]]:
    """The groups of `cut_step`. The first sequence may have any lcp: it costs all of its tokens."""
    added = (by_order.lengths - by_order.lcp).tolist()
    return _cut(by_order.order.tolist(), added, by_order.lengths.tolist(), max_tokens)


def cut_by_padded_tokens(sequences: Sequence[IntArray], max_tokens: int | None) -> list[list[int]]:
    """The ordinary baseline: longest first, cut before sequences x longest sequence exceeds the budget."""
    order = sorted(range(len(sequences)), key=lambda index: -len(sequences[index]))
    batches: list[list[int]] = []
    for index in order:
        longest = len(sequences[batches[-1][0]]) if batches else 0
        if batches and (max_tokens is None or longest * (len(batches[-1]) + 1) <= max_tokens):
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches


def _cut(order: list[int], added: list[int], lengths: list[int], max_tokens: int | None) -> list[list[int]]:
    batches: list[list[int]] = []
    total = 0
    for index, extra, length in zip(order, added, lengths, strict=True):
        if batches and (max_tokens is None or total + extra <= max_tokens):
            batches[-1].append(index)
            total += extra
        else:
            batches.append([index])
            total = length
    return batches
