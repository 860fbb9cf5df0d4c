"""Sequences that begin alike, found in a whole data set: they should meet in a batch.

One pass reads every sequence once and keeps hashes of its beginnings, 8 bytes for each 16 tokens. Sorted by these
hashes, sequences that share most are neighbours, as in `radixtrain/tree/sorting.py`, which sorts a batch by its tokens.
A group is a branch of the tree that the sorted hashes spell.

    you are a tutor ... [+ question]    40 sequences        group 1: 40 sequences, depth 240
                        [+ example]     12 of them          group 2: 12 sequences, depth 400, inside group 1
    you are a judge ...                 30 sequences        group 3

Depths are multiples of 16, so that a group may share up to 15 tokens more than it says. NumPy only, as for the plan.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from radixtrain.tree.arrays import IntArray, back_to_back
from radixtrain.tree.sorting import SortedSequences, lcp_intervals, sort_sequences

# Beginnings that are hashed, in tokens: every 16th up to 512, then 16 to each doubling. What sequences share beyond the
# last one is not looked for.
DEPTHS = np.concatenate([16 * np.arange(1, 17), *(16 * np.arange(17, 33) << k for k in range(8))])
MIN_SHARE = 0.1
"""A group shares at least this part of its sequences' tokens, beyond what the group around it shares.

Shorter beginnings are common to texts of one kind ("Write a function that"). Keeping them together saves little, and
fills batches with texts of that kind.
"""


@dataclass(frozen=True, eq=False)
class PrefixGroups:
    """A tree of groups of sequences. Group 0 holds all of them, and a group has a higher number than its parent.

    group_of: (n,), int64. the deepest group that holds each sequence.
    parent: (G,), int64. the group around each group; 0 for group 0.
    depth: (G,), int64. tokens that all sequences of a group share.
    lengths: (n,), int64. tokens of each sequence.
    """

    group_of: IntArray
    parent: IntArray
    depth: IntArray
    lengths: IntArray

    def __len__(self) -> int:
        """Count the groups besides group 0."""
        return len(self.parent) - 1

    def sorted(self, indices: IntArray) -> SortedSequences:
        """Sort some of the sequences by group; neighbours share what their groups share.

        indices: (m,), int64. The returned `order` holds places in it.
        """
        group = self.group_of[indices]
        order = np.argsort(self._places[group], kind="stable")
        low, high = group[order[:-1]], group[order[1:]]
        while len(inside := np.flatnonzero(low != high)):  # up to the group that holds both; parents have lower numbers
            low[inside], high[inside] = np.sort([low[inside], high[inside]], axis=0)
            high[inside] = self.parent[high[inside]]
        lcp = np.append(np.zeros(min(1, len(order)), dtype=np.int64), self.depth[low])
        return SortedSequences(order, self.lengths[indices][order], lcp)

    @cached_property
    def _places(self) -> IntArray:
        """Return the place of each group, (G,), int64, in an order in which inner groups follow the one around them."""
        sizes, parent = [1] * len(self.parent), self.parent.tolist()
        for group in range(len(parent) - 1, 0, -1):
            sizes[parent[group]] += sizes[group]
        places, free = [0] * len(parent), [1] * len(parent)
        for group in range(1, len(parent)):
            around = parent[group]
            places[group], free[group] = free[around], free[around] + 1
            free[around] += sizes[group]
        return np.array(places, dtype=np.int64)

    def num_unique_tokens(self, order: IntArray, batch_size: int) -> int:
        """Count the unique tokens of all batches of an epoch together, as far as the groups tell: an upper bound.

        order: (m,), int64. sequences by index; each `batch_size` in a row are a batch.
        """
        batch_of = np.arange(len(order)) // batch_size
        gain = self.depth - np.where(np.arange(len(self.parent)) > 0, self.depth[self.parent], 0)
        group = self.group_of[order]
        entered, saved = [], int(gain[0]) * len(order)
        while len(group):
            entered.append(batch_of * len(self.parent) + group)
            is_inside = group > 0
            saved += int(gain[group[is_inside]].sum())
            batch_of, group = batch_of[is_inside], self.parent[group[is_inside]]
        computed = np.unique(np.concatenate([*entered, np.zeros(0, dtype=np.int64)])) % len(self.parent)
        return int(self.lengths[order].sum()) - saved + int(gain[computed].sum())


def find_prefix_groups(sequences: Iterable[IntArray], copies: bool = False) -> PrefixGroups:
    """Group sequences with a common beginning. Each sequence is read once and not kept.

    sequences: token ids of each, (L,), int64.
    copies: whether copies of one sequence are a group, as for prompts without their completions. Copies of whole rows
        should not be in one batch: they would act as one row of a larger weight.

    What all sequences have in common makes no group: they meet in any order.
    """
    multipliers = np.random.default_rng(0).integers(2**64, size=DEPTHS[-1], dtype=np.uint64)  # one for each place
    hashes: list[IntArray] = []
    lengths: list[int] = []
    whole: list[int] = []
    for ids in sequences:
        beginnings, all_of_it = _hashes(ids, multipliers)
        hashes.append(beginnings)
        whole.append(all_of_it)
        lengths.append(len(ids))
    packed, bounds = back_to_back(hashes)
    del hashes
    by_hash = sort_sequences(packed, bounds)
    identity = range(len(whole)) if copies else whole
    return _groups(by_hash, np.array(lengths, dtype=np.int64), np.array(identity, dtype=np.uint64))


def _hashes(ids: IntArray, multipliers: npt.NDArray[np.uint64]) -> tuple[IntArray, int]:
    """Hash the beginning of each of `DEPTHS` that the sequence has, and all of it, to numbers below 2**63.

    Two different beginnings collide with a probability of about 2**-63. Then batches share less than they could;
    nothing else depends on it.
    """
    depths = DEPTHS[: np.searchsorted(DEPTHS, len(ids), side="right")]
    ids = ids[: len(multipliers)]
    sums = np.cumsum(ids.view(np.uint64) * multipliers[: len(ids)])
    return (sums[depths - 1] >> np.uint64(1)).astype(np.int64), int(sums[-1]) if len(sums) else 0


def _groups(by_hash: SortedSequences, lengths: IntArray, whole: npt.NDArray[np.uint64]) -> PrefixGroups:
    """Build the tree of the sorted hashes, without groups that share too little and those of copies.

    lengths: tokens of each sequence. whole: a number that only copies have in common, if copies make no group.
    """
    shared = np.concatenate([[0], DEPTHS])[by_hash.lcp]
    all_share = int(shared[1:].min(initial=DEPTHS[-1])) if len(shared) == len(lengths) > 1 else 0
    tree = _Branches(shared.tolist(), all_share)
    group_of = np.zeros(len(lengths), dtype=np.int64)
    group_of[by_hash.order] = tree.branch_of
    kept, parent, depth = _worthwhile(tree, group_of, lengths, whole)
    return PrefixGroups(kept[group_of], parent, depth, lengths)


class _Branches:
    """Every branch of sorted sequences, built from what each shares with the one before it.

    branch_of: the deepest branch of each. depth, parent: of each branch; parents have lower numbers than children.
    """

    def __init__(self, shared: list[int], all_share: int):
        depth, parent, entered = lcp_intervals(shared[:1] and [all_share, *shared[1:]], all_share)
        order = np.argsort(depth, kind="stable")
        number = np.empty_like(order)
        number[order] = np.arange(len(order))
        self.depth = np.array(depth, dtype=np.int64)[order]
        self.parent = number[np.array(parent, dtype=np.int64)[order]]
        before = number[np.array(entered, dtype=np.int64)]
        after = np.append(before[1:], 0)
        self.branch_of = np.maximum(before, after)  # one is inside the other, and the inner one has the larger number


def _worthwhile(
    tree: _Branches, branch_of: IntArray, lengths: IntArray, whole: npt.NDArray[np.uint64]
) -> tuple[IntArray, IntArray, IntArray]:
    """Return the group of each branch, its own or one around it, and each group's parent and depth. See `MIN_SHARE`."""
    depths, above = tree.depth.tolist(), tree.parent.tolist()
    enough = _enough_shared(above, branch_of, lengths, whole)
    kept, parent, depth = [0], [0], depths[:1]
    for branch in range(1, len(above)):
        around = kept[above[branch]]
        if depths[branch] - depth[around] < enough[branch]:
            kept.append(around)
            continue
        kept.append(len(depth))
        parent.append(around)
        depth.append(depths[branch])
    return np.array(kept, dtype=np.int64), np.array(parent, dtype=np.int64), np.array(depth, dtype=np.int64)


def _enough_shared(
    above: list[int], branch_of: IntArray, lengths: IntArray, whole: npt.NDArray[np.uint64]
) -> list[float]:
    """Return the tokens that make a branch a group: `MIN_SHARE` of the mean of its sequences; infinite for copies.

    above: the branch around each.
    """
    num_branches = len(above)
    sizes = np.bincount(branch_of, minlength=num_branches).tolist()
    tokens = np.bincount(branch_of, weights=lengths, minlength=num_branches).tolist()
    lowest = np.full(num_branches, np.iinfo(np.uint64).max, dtype=np.uint64)
    highest = np.zeros(num_branches, dtype=np.uint64)
    np.minimum.at(lowest, branch_of, whole)
    np.maximum.at(highest, branch_of, whole)
    least, most = lowest.tolist(), highest.tolist()
    for branch in range(num_branches - 1, 0, -1):
        around = above[branch]
        sizes[around] += sizes[branch]
        tokens[around] += tokens[branch]
        least[around] = min(least[around], least[branch])
        most[around] = max(most[around], most[branch])
    return [
        MIN_SHARE * tokens[branch] / sizes[branch] if least[branch] < most[branch] else np.inf
        for branch in range(num_branches)
    ]
