"""The sequences of an optimizer step -> micro-batches under a budget of unique tokens, and the share of each rank.

Tokens are shared only inside a micro-batch, so the cut decides the speed. The sequences are sorted, which puts shared
prefixes side by side, and cut when the budget is full. The gradient of the optimizer step does not depend on the cut,
since the loss of a micro-batch is a sum, divided by the labelled tokens of the whole step.

Every rank computes the same answer without communication: it gets a run of the sorted order.

    7 8 1, 7 8 2 | 7 8 3, 7 8 4     4 + 4 unique tokens: what the neighbours of a border share, 7 8, is computed on both
                                    sides of it

The borders are those whose fullest rank has the fewest unique tokens.
Pure NumPy, because the collator carries it into DataLoader workers.
"""

from __future__ import annotations

import sys
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from radixtrain.tree.arrays import IntArray, cumulative
from radixtrain.tree.sorting import SortedSequences, sort_sequences


class Shares(NamedTuple):
    """A step, divided among the ranks.

    groups: by rank, its micro-batches as lists of sequence indices.
    costs: by rank, the tokens that it computes: unique ones, or padded ones.
    num_unique_tokens: of all sequences together; None if they are padded.
    """

    groups: list[list[list[int]]]
    costs: list[int]
    num_unique_tokens: int | None = None

    @property
    def num_micro_batches(self) -> int:
        """Count the micro-batches of the rank that has most. All ranks run that many."""
        return max(map(len, self.groups))


def share_by_unique_tokens(
    sequences: Sequence[IntArray],
    num_ranks: int,
    max_tokens: int | None,
    position_ids: IntArray | None = None,
) -> Shares:
    """Cut the sequences into micro-batches for each rank, of at most `max_tokens` unique tokens or a single sequence.

    sequences: token ids of each, (L,), int64.
    max_tokens: None for a single micro-batch on each rank.
    position_ids: (T,), int64, of all sequences back to back, if they do not count from 0.

    Minimises the cost of the most expensive rank. A rank may get nothing.
    Raises ValueError for an empty sequence, which has no place in the order.
    """
    lengths = np.array([len(ids) for ids in sequences], dtype=np.int64)
    if not lengths.all():
        raise ValueError(f"sequence {int(lengths.argmin())} is empty")
    if not len(lengths):
        return Shares([[] for _ in range(num_ranks)], [0] * num_ranks, 0)
    by_order = sort_sequences(np.concatenate(sequences), cumulative(lengths), position_ids)
    bounds = [0, len(lengths)] if num_ranks == 1 else _bounds_of_ranks(by_order, num_ranks, max_tokens)
    groups, paid = [], []
    for start, end in pairwise(bounds):
        mine = by_order.some(np.arange(start, end))
        groups.append(cut_by_unique_tokens(mine, max_tokens))
        firsts = cumulative(np.array([len(group) for group in groups[-1]], dtype=np.int64))[:-1]
        paid.append(int((mine.lengths - mine.lcp).sum() + mine.lcp[firsts].sum()))
    return Shares(groups, paid, by_order.num_unique_tokens)


def share_by_padded_tokens(sequences: Sequence[IntArray], num_ranks: int, max_tokens: int | None) -> Shares:
    """Share and cut as the ordinary baseline does.

    Each rank takes every n-th of the sequences, longest first, until sequences x longest would exceed the budget.
    """
    order = sorted(range(len(sequences)), key=lambda index: -len(sequences[index]))
    groups: list[list[list[int]]] = []
    for rank in range(num_ranks):
        batches: list[list[int]] = []
        for index in order[rank::num_ranks]:
            longest = len(sequences[batches[-1][0]]) if batches else 0
            if batches and (max_tokens is None or longest * (len(batches[-1]) + 1) <= max_tokens):
                batches[-1].append(index)
            else:
                batches.append([index])
        groups.append(batches)
    return Shares(groups, [sum(len(each) * len(sequences[each[0]]) for each in batches) for batches in groups])


def _bounds_of_ranks(by_order: SortedSequences, num_ranks: int, max_tokens: int | None) -> list[int]:
    """Return the bounds, (num_ranks + 1,), of the sorted places that each rank gets."""
    sums = cumulative(by_order.lengths - by_order.lcp).tolist()
    shared = by_order.lcp.tolist()

    def end_of(start: int, limit: int) -> int:
        """Fill micro-batches as long as the limit allows; the first sequence of each is paid in full."""
        while start < len(shared):
            full = len(shared)
            if max_tokens is not None:
                full = max(bisect_right(sums, sums[start] + max_tokens - shared[start]) - 1, start + 1)
            end = min(full, bisect_right(sums, sums[start] + limit - shared[start]) - 1)
            if end <= start:
                break
            limit -= sums[end] - sums[start] + shared[start]
            start = end
        return start

    def bounds_for(limit: int) -> list[int]:
        """Return the bounds of the longest runs that cost no more."""
        bounds = [0]
        for _ in range(num_ranks):
            bounds.append(end_of(bounds[-1], limit))
        return bounds

    most = int(by_order.lengths.sum())
    return bounds_for(bisect_left(range(most), True, key=lambda limit: bounds_for(limit)[-1] == len(shared)))


def cut_by_unique_tokens(
    by_order: SortedSequences, max_tokens: int | None, num_extra: int = 0, max_sequences: int = sys.maxsize
) -> list[list[int]]:
    """Cut into full micro-batches. A sequence costs the tokens that it does not share with the one before it.

    num_extra: tokens that each sequence costs beside its own. max_sequences: of a micro-batch.
    """
    batches: list[list[int]] = []
    total = 0
    added = by_order.lengths - by_order.lcp
    for index, extra, length in zip(by_order.order.tolist(), added.tolist(), by_order.lengths.tolist(), strict=True):
        fits = max_tokens is None or total + extra + num_extra <= max_tokens
        if batches and fits and len(batches[-1]) < max_sequences:
            batches[-1].append(index)
            total += extra + num_extra
        else:
            batches.append([index])
            total = length + num_extra
    return batches
