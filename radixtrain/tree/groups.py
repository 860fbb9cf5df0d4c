"""Sequences that begin alike, found in a whole data set: they should meet in a batch.

One pass reads every sequence once and keeps hashes of its beginnings, 8 bytes for each 16 tokens. Sorted by these
hashes, sequences that share most are neighbours, as in `radixtrain/tree/sorting.py`, which sorts a batch by its tokens.
A branch is what some sequences share beyond those around them; a group is a branch with all that are inside it.

    you are a tutor ... [+ question]    40 sequences        branch 1: 28 of them, depth 240
                        [+ example]     12 of them          branch 0: depth 400, inside branch 1: one group
    you are a judge ...                 30 sequences        branch 2: another group

Depths are multiples of 16, so that a branch may share up to 15 tokens more than it says. NumPy only, as for the plan.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from radixtrain.tree.arrays import IntArray, back_to_back, lengths_of
from radixtrain.tree.sorting import SortedSequences, branch_points, sort_sequences, without_branches

# Beginnings that are hashed, in tokens: every 16th up to 512, then 16 to each doubling. What sequences share beyond the
# last one is not looked for.
DEPTHS = np.concatenate([16 * np.arange(1, 17), *(16 * np.arange(17, 33) << k for k in range(8))])
MIN_SHARE = 0.1
"""A branch shares at least this part of its sequences' tokens, beyond what the branch around it shares.

Shorter beginnings are common to texts of one kind ("Write a function that"). Keeping them together saves little, and
fills batches with texts of that kind.
"""


@dataclass(frozen=True, eq=False)
class PrefixGroups:
    """n sequences in sorted order, and the groups of those that share enough.

    by_order: all of them, with what neighbours share.
    shared: (n,), int64. of each sorted place, the tokens that it shares with the one before it, if that is a branch.
    """

    by_order: SortedSequences
    shared: IntArray

    def __len__(self) -> int:
        """Count the groups."""
        return len(set(self.group_of[self.group_of >= 0].tolist()))

    @cached_property
    def places(self) -> IntArray:
        """Return the sorted place of each sequence, (n,), int64."""
        places = np.empty_like(self.by_order.order)
        places[self.by_order.order] = np.arange(len(places))
        return places

    @cached_property
    def branch_of(self) -> IntArray:
        """Return the deepest branch of each sequence, (n,), int64, -1 without one; inner ones before outer ones."""
        found = np.full(len(self.shared), -1)
        for number, (_, starts, end) in enumerate(branch_points(self.shared)):
            inside = found[starts[0] : end]
            inside[inside < 0] = number
        return found[self.places]

    @cached_property
    def group_of(self) -> IntArray:
        """Return the group of each sequence, (n,), int64; -1 for one that shares nothing."""
        groups = (self.shared == 0).cumsum() - 1
        groups[np.bincount(groups)[groups] == 1] = -1
        return groups[self.places]

    def sorted(self, indices: IntArray) -> SortedSequences:
        """Sort some of the sequences. indices: (m,), int64, distinct. The returned `order` holds places in it."""
        places = self.places[indices]
        order = np.argsort(places)
        found = self.by_order.some(places[order])
        return SortedSequences(order, found.lengths, found.lcp)


def find_prefix_groups(sequences: Iterable[IntArray], copies: bool = False) -> PrefixGroups:
    """Group sequences with a common beginning. Each sequence is read once and not kept.

    sequences: token ids of each, (L,), int64.
    copies: whether copies of one sequence are a group, as for prompts without their completions. Copies of whole rows
        should not be in one batch: they would act as one row of a larger weight.
    """
    multipliers = np.random.default_rng(0).integers(2**64, size=DEPTHS[-1], dtype=np.uint64)  # one for each place
    hashes: list[IntArray] = []
    lengths: list[int] = []
    for ids in sequences:
        hashes.append(_hashes(ids, multipliers))
        lengths.append(len(ids))
    packed, bounds = back_to_back(hashes)
    del hashes
    by_hash = sort_sequences(packed, bounds)
    num_hashes = lengths_of(bounds)[by_hash.order]
    is_copy = by_hash.lcp == num_hashes
    lcp = np.append(0, DEPTHS)[np.minimum(by_hash.lcp, num_hashes - 1)]
    by_order = SortedSequences(by_hash.order, np.array(lengths, dtype=np.int64)[by_hash.order], lcp)
    common = int(lcp[1:].min()) if len(lcp) > 1 else 0
    shared = np.where(lcp > common, lcp, 0)  # what all share makes no group: all meet in any order
    return PrefixGroups(by_order, _worthwhile(by_order, shared if copies else _apart(shared, is_copy), common))


def _hashes(ids: IntArray, multipliers: npt.NDArray[np.uint64]) -> IntArray:
    """Hash the beginning of each of `DEPTHS` that the sequence has, and last all of it, to numbers below 2**63.

    Two different beginnings collide with a probability of about 2**-63. Then batches share less than they could;
    nothing else depends on it.
    """
    depths = DEPTHS[: np.searchsorted(DEPTHS, len(ids), side="right")]
    ids = ids[: len(multipliers)]
    sums = np.append(np.uint64(0), np.cumsum(ids.view(np.uint64) * multipliers[: len(ids)]))
    return (sums[np.append(depths, len(ids))] >> np.uint64(1)).astype(np.int64)


def _apart(shared: IntArray, is_copy: IntArray) -> IntArray:
    """Let copies share with each other only what they share with other sequences. is_copy: of the one before."""
    firsts = np.flatnonzero(~is_copy)
    around = np.maximum(shared[firsts], np.append(shared[firsts[1:]], 0))
    return np.where(is_copy, around[(~is_copy).cumsum() - 1], shared)


def _worthwhile(by_order: SortedSequences, shared: IntArray, common: int) -> IntArray:
    """Remove branches that share too little, see `MIN_SHARE`."""
    enough = (MIN_SHARE * by_order.lengths).tolist()

    def is_small(places: list[int], depth: int, above: int) -> bool:
        return depth - max(above, common) < sum(enough[place] for place in places) / len(places)

    return without_branches(shared, is_small)
