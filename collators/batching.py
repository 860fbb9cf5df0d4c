"""The sequences of an optimizer step -> micro-batches under a budget of unique tokens, and the share of each rank.

Tokens are shared only inside a micro-batch, so the cut decides the speed. The sequences are sorted, which puts shared
prefixes side by side, and cut when the budget is full. The gradient of the optimizer step does not depend on the cut,
since the loss of a micro-batch is a sum, divided by the labelled tokens of the whole step.

Every rank computes the same answer without communication. The sorted sequences are handed out in two ways:

    in a row    7 8 1, 7 8 2 | 7 8 3, 7 8 4     each rank gets a run of the sorted order: 4 + 4 unique tokens. What the
                                                neighbours of a border share, 7 8, is computed on both sides of it
    in units    3 3 3 3, 2 | 1 1 1, 4 4         neighbours that share enough stay together, and the largest unit goes
                                                first, to the rank that has least: 5 + 5 unique tokens

The way whose fullest rank has the fewest unique tokens is taken.
Pure NumPy, because the collator carries it into DataLoader workers.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence, Sized
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from radixtrain.tree.arrays import IntArray, cumulative
from radixtrain.tree.sorting import SortedSequences, sort_sequences

DEPTHS = (16, 64, 256, 1024)  # fewest tokens that neighbours in a unit share; single sequences are tried as units too
PRECISION = 1000  # the cost of the most expensive rank is minimised to one part in this many
CLOSE = 50  # costs that differ by less than one part in this many count as equal: then the least computation wins


def cut_by_padded_tokens(sequences: Sequence[Sized], max_tokens: int | None) -> list[list[int]]:
    """Cut as the ordinary baseline does: longest first, until sequences x longest sequence would exceed the budget."""
    order = sorted(range(len(sequences)), key=lambda index: -len(sequences[index]))
    batches: list[list[int]] = []
    for index in order:
        longest = len(sequences[batches[-1][0]]) if batches else 0
        if batches and (max_tokens is None or longest * (len(batches[-1]) + 1) <= max_tokens):
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches


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

    Minimises the cost of the most expensive rank first, then the sum over the ranks. A rank may get nothing.
    Raises ValueError for an empty sequence, which has no place in the order.
    """
    lengths = np.array([len(ids) for ids in sequences], dtype=np.int64)
    if not lengths.all():
        raise ValueError(f"sequence {int(lengths.argmin())} is empty")
    if not len(lengths):
        return Shares([[] for _ in range(num_ranks)], [0] * num_ranks, 0)
    by_order = sort_sequences(np.concatenate(sequences), cumulative(lengths), position_ids)
    if num_ranks == 1:
        return _cut_for_ranks(by_order, np.zeros_like(lengths), 1, max_tokens)
    candidates = [_in_a_row(by_order, num_ranks, max_tokens)]
    candidates += [_in_units(by_order, starts, num_ranks) for starts in _units(by_order.lcp)]
    found = [_cut_for_ranks(by_order, rank_of, num_ranks, max_tokens) for rank_of in candidates]
    return _cheapest(found)


def deal_by_unique_tokens(by_order: SortedSequences, batch_size: int) -> list[list[int]]:
    """Cut the sequences into batches of `batch_size`, by index, such that the largest number of unique tokens is small.

    by_order: the sequences of a step, a multiple of `batch_size`.

    For trainers that give every rank the same number of sequences.
    """
    num_batches = len(by_order.order) // batch_size
    candidates = [np.arange(num_batches).repeat(batch_size)]
    candidates += [_in_units(by_order, starts, num_batches, batch_size) for starts in _units(by_order.lcp)]
    found = [_cut_for_ranks(by_order, each, num_batches, None) for each in candidates]
    return [batch for (batch,) in _cheapest(found).groups]


def _cheapest(found: Sequence[Shares]) -> Shares:
    """Find the way that computes least, among those whose most expensive rank costs about the least."""
    least = min(max(shares.costs) for shares in found)
    close = [shares for shares in found if CLOSE * (max(shares.costs) - least) <= least]
    return min(close, key=lambda shares: sum(shares.costs))


def share_by_padded_tokens(sequences: Sequence[IntArray], num_ranks: int, max_tokens: int | None) -> Shares:
    """Share as the ordinary baseline does: runs of the sequences, longest first, each cut by `cut_by_padded_tokens`."""
    order = sorted(range(len(sequences)), key=lambda index: -len(sequences[index]))
    lengths = [len(sequences[index]) for index in order]

    def end_of(start: int, limit: int) -> int:
        """Fill micro-batches as long as the limit allows; a sequence costs as much as the longest beside it."""
        while start < len(order):
            full = len(order) if max_tokens is None else start + max(max_tokens // lengths[start], 1)
            end = min(full, start + limit // lengths[start], len(order))
            limit -= (end - start) * lengths[start]
            start = end
            if end < full:
                break
        return start

    bounds = _even_runs(end_of, num_ranks, lengths)
    groups, paid = [], []
    for start, end in pairwise(bounds):
        cut = cut_by_padded_tokens([sequences[index] for index in order[start:end]], max_tokens)
        groups.append([[order[start + place] for place in group] for group in cut])
        paid.append(sum(len(group) * lengths[start + group[0]] for group in cut))
    return Shares(groups, paid)


def _in_a_row(by_order: SortedSequences, num_ranks: int, max_tokens: int | None) -> IntArray:
    """Return the rank of each sorted place, (B,), if every rank gets a run of them."""
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
            if end < full:
                break
        return start

    bounds = _even_runs(end_of, num_ranks, by_order.lengths.tolist())
    return np.arange(num_ranks).repeat(np.diff(bounds))


def _even_runs(end_of: Callable[[int, int], int], num_ranks: int, costs: list[int]) -> list[int]:
    """Return the bounds, (num_ranks + 1,), of runs whose most expensive one costs about as little as possible.

    end_of: the end of the longest run that begins at a place and costs no more than a limit.
    costs: of each place. The limit is at least the largest, so that a run has at least one place.
    """

    def bounds_for(limit: int) -> list[int]:
        bounds = [0]
        for _ in range(num_ranks):
            bounds.append(end_of(bounds[-1], limit))
        return bounds

    dearest = max(costs, default=0)
    low, high = dearest - 1, dearest * len(costs)
    best = bounds_for(high)
    while high - low > max(high // PRECISION, 1):
        middle = (low + high) // 2
        bounds = bounds_for(middle)
        if bounds[-1] == len(costs):
            best, high = bounds, middle
        else:
            low = middle
    return best


def _units(lcp: IntArray) -> Iterator[IntArray]:
    """Yield where units start in the sorted order, for each kind of unit: single sequences, and each of `DEPTHS`."""
    yield np.arange(len(lcp))
    largest = int(lcp.max())
    for depth in DEPTHS:
        if depth <= largest:
            yield np.flatnonzero(lcp < depth)


def _in_units(by_order: SortedSequences, starts: IntArray, num_ranks: int, most: int | None = None) -> IntArray:
    """Return the rank of each sorted place, (B,): units go to the cheapest rank, the most expensive unit first.

    most: sequences per rank. A unit that no rank has room for is divided.
    """
    heads, ends = by_order.lcp, np.append(starts[1:], len(by_order.lcp))
    sums = cumulative(by_order.lengths - heads)
    ranks = [(0, rank) for rank in range(num_ranks)]
    room = [len(heads) if most is None else most] * num_ranks
    rank_of = np.zeros(len(heads), dtype=np.int64)
    for unit in np.argsort(-(sums[ends] - sums[starts] + heads[starts]), kind="stable").tolist():
        start, end = int(starts[unit]), int(ends[unit])
        while start < end:
            part = min(end - start, max(room))
            full = []
            while room[ranks[0][1]] < part:
                full.append(heapq.heappop(ranks))
            paid, rank = ranks[0]
            rank_of[start : start + part] = rank
            heapq.heapreplace(ranks, (paid + int(sums[start + part] - sums[start] + heads[start]), rank))
            for each in full:
                heapq.heappush(ranks, each)
            room[rank] -= part
            start += part
    return rank_of


def _cut_for_ranks(by_order: SortedSequences, rank_of: IntArray, num_ranks: int, max_tokens: int | None) -> Shares:
    """Cut the sequences of each rank into micro-batches, and compute their cost with all that they share."""
    groups, paid = [], []
    for rank in range(num_ranks):
        mine = _some_of(by_order, np.flatnonzero(rank_of == rank))
        groups.append(_cut(mine, max_tokens))
        firsts = cumulative(np.array([len(group) for group in groups[-1]], dtype=np.int64))[:-1]
        paid.append(int((mine.lengths - mine.lcp).sum() + mine.lcp[firsts].sum()))
    return Shares(groups, paid, by_order.num_unique_tokens)


def _cut(by_order: SortedSequences, max_tokens: int | None) -> list[list[int]]:
    """Cut into full micro-batches. A sequence costs the tokens that it does not share with the one before it."""
    batches: list[list[int]] = []
    total = 0
    added = by_order.lengths - by_order.lcp
    for index, extra, length in zip(by_order.order.tolist(), added.tolist(), by_order.lengths.tolist(), strict=True):
        if batches and (max_tokens is None or total + extra <= max_tokens):
            batches[-1].append(index)
            total += extra
        else:
            batches.append([index])
            total = length
    return batches


def _some_of(by_order: SortedSequences, places: IntArray) -> SortedSequences:
    """Select sequences by ascending place. Two of them share the shortest prefix of the neighbours between them."""
    if not len(places):
        return SortedSequences(places, places, places)
    before = np.append(0, places[:-1] + 1)
    lcp = np.minimum.reduceat(by_order.lcp[: places[-1] + 1], before)
    return SortedSequences(by_order.order[places], by_order.lengths[places], lcp)
