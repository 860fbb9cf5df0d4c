"""The prefix plan as runs, each of which a layer with a recurrent state computes at once, from one state to the next.

Attention sees a tree through a mask. A recurrent layer (gated delta rule, state space, short convolution) reads a
sequence in order, so on a tree it works in runs: rows back to back on one path from a root. A run starts from the final
state of the run above it, or from nothing. The run above is a *fork*: all runs that continue it start from a copy of
that state.

    segments        forks at every branch         only the first one worth it
    A ─┬─ B ─┬─ C   A │ B │ C    5 runs           A │ B C      4 runs, B is computed twice
       │     └─ D         │ D                       │ B D
       └─ E           │ E                           │ E

Every row of the plan has its output from exactly one run; the others that contain it only carry its state on, so values
and gradients are those of each sequence alone, whichever forks are chosen. A fork costs a state to store and another
group or more; without it rows are computed again. So a fork has to save `MIN_SAVED` rows.

Runs of equal shape are computed as one *group*:

- forks of one level that have the same length, because padding would change the final state;
- last of all the leaves of every level, the longest first and padded on the right: nothing follows them.

No group has one row after a state, so no fork is shorter than two rows and a leaf of one row is padded: Hugging Face's
mixers take one for a step of generation, which writes into the state in place and has no gradient in some kernels.

The layers: gated delta rule (arXiv 2412.06464, section 3), Mamba 2 (arXiv 2405.21060), short convolutions.
Computed with NumPy, as the plan.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from radixtrain.tree.arrays import IntArray
from radixtrain.tree.layout import TreeLayout, on_device

SHORTEST_FORK = 2  # rows
SHORTEST_FROM_STATE = 2  # rows in a group
# Rows that a fork has to save: its length times the branches after the first. If a group costs as much as 64 rows and a
# state as much as 8, this cost 0.3 % more than the best of 2, 32, 256 and no fork over 74 trees, and 13 % at most.
MIN_SAVED = 32
# Of a group of any size beside its rows, forward and backward, in rows. So leaves cost 0.6 % more in all than in the
# groups that cost least (2,000 draws of up to 64 lengths), and 17 % at most.
GROUP_COST = 64.0
CPU = torch.device("cpu")


class RunGroup(NamedTuple):
    """Runs that a layer computes at once: `num_runs` of `length` rows each.

    is_fork: whether runs of later groups start from their final states.
    sources: the groups in whose final states, one group after the other, these runs find their own; empty for runs that
        start from nothing.
    """

    num_runs: int
    length: int
    is_fork: bool
    sources: tuple[int, ...]


@dataclass(frozen=True, eq=False, kw_only=True)
class RunLayout:
    """Runs in groups, on a device. U unique rows.

    groups: in the order in which they are computed; host ints.
    rows: (sum of num_runs x length,), int64. the unique row of each row of the groups, back to back; padding repeats
        the last row of its run.
    outputs: (U,), int64. the entry of `rows` from which each unique row has its output.
    parents: (number of runs that start from a state,), int64. for each, group by group, which of the final states of
        its group's sources.
    """

    groups: tuple[RunGroup, ...]
    rows: Tensor
    outputs: Tensor
    parents: Tensor


class _Run(NamedTuple):
    """A run. pieces: ranges of unique rows, back to back. parent: the run it continues, or -1. level: forks above."""

    pieces: tuple[tuple[int, int], ...] = ()
    length: int = 0
    parent: int = -1
    level: int = 0
    is_fork: bool = False


def tree_runs(layout: TreeLayout, forks: bool) -> RunLayout:
    """Return the runs of a batch, on its device; without forks each sequence is one, as in an ordinary batch."""
    return runs_of_segments(*layout.segments, MIN_SAVED if forks else None, layout.device)


def runs_of_segments(
    segment_starts: IntArray,
    segment_parents: IntArray,
    min_saved: int | None,
    device: torch.device = CPU,
    group_cost: float = GROUP_COST,
) -> RunLayout:
    """Make the runs of a plan. Does not wait for the device.

    segment_starts, segment_parents: (S+1,) and (S,), int64. as in `PrefixPlan`.
    min_saved: as `MIN_SAVED`. None: no forks at all, each leaf's whole path is one run.
    group_cost: as `GROUP_COST`; decides which leaves of different lengths are padded to one.
    """
    runs = _runs(segment_starts.tolist(), segment_parents.tolist(), min_saved)
    groups: list[RunGroup] = []
    rows, parents = [np.zeros(0, dtype=np.int64)], list[int]()
    place_of: dict[int, tuple[int, int]] = {}  # run -> its group, its place in it
    for numbers in (*_fork_groups(runs), *_leaf_groups(runs, group_cost)):
        above = [place_of[runs[number].parent] for number in numbers if runs[number].parent >= 0]
        sources = tuple(sorted({group for group, _ in above}))
        firsts = dict(
            zip(sources, accumulate((groups[source].num_runs for source in sources), initial=0), strict=False)
        )
        parents += [firsts[group] + place for group, place in above]
        place_of |= {number: (len(groups), place) for place, number in enumerate(numbers)}
        length = _group_length(runs, numbers)
        rows += [_padded_rows(runs[number], length) for number in numbers]
        groups.append(RunGroup(len(numbers), length, runs[numbers[0]].is_fork, sources))
    flat = np.concatenate(rows)
    outputs = np.zeros(int(segment_starts[-1]), dtype=np.int64)
    outputs[flat[::-1]] = np.arange(len(flat))[::-1]  # NumPy keeps what is written last: the first entry of each row
    on_it = [on_device(array, device) for array in (flat, outputs, np.array(parents, dtype=np.int64))]
    return RunLayout(groups=tuple(groups), rows=on_it[0], outputs=on_it[1], parents=on_it[2])


def _runs(starts: list[int], parents: list[int], min_saved: int | None) -> list[_Run]:
    """Return the runs in the order of the segments that end them, so that a run comes after the one it continues."""
    runs: list[_Run] = []
    children = Counter(parents)
    begun = {-1: _Run()}  # what the children of a segment go on with
    for segment, (parent, own) in enumerate(zip(parents, pairwise(starts), strict=True)):
        run = begun[parent]
        run = run._replace(pieces=(*run.pieces, own), length=run.length + own[1] - own[0])
        is_leaf = not children[segment]
        saved = run.length * (children[segment] - 1)
        is_fork = min_saved is not None and not is_leaf and run.length >= SHORTEST_FORK and saved >= min_saved
        begun[segment] = _Run(parent=len(runs), level=run.level + 1) if is_fork else run
        if is_leaf or is_fork:
            runs.append(run._replace(is_fork=is_fork))
    return runs


def _fork_groups(runs: Sequence[_Run]) -> Iterator[list[int]]:
    """Yield the forks that are computed at once: of one level and one length; the levels in order."""
    groups: dict[tuple[int, int], list[int]] = {}
    for number, run in enumerate(runs):
        if run.is_fork:
            groups.setdefault((run.level, run.length), []).append(number)
    for key in sorted(groups):
        yield groups[key]


def _leaf_groups(runs: Sequence[_Run], group_cost: float) -> Iterator[list[int]]:
    """Yield the leaves that are computed at once, the longest first, and with or without a state to start from.

    A group takes shorter leaves as long as its padding costs no more than another group.
    """
    for from_state in (False, True):
        leaves = [n for n, run in enumerate(runs) if not run.is_fork and (run.parent >= 0) == from_state]
        lengths = {number: _group_length(runs, [number]) for number in leaves}
        group: list[int] = []
        padding = 0
        for number in sorted(leaves, key=lambda number: -lengths[number]):
            padding += lengths[group[0]] - lengths[number] if group else 0
            if padding > group_cost:
                yield group
                group, padding = [], 0
            group.append(number)
        if group:
            yield group


def _group_length(runs: Sequence[_Run], numbers: Sequence[int]) -> int:
    """Return the rows of each run of a group, with padding."""
    longest = max(runs[number].length for number in numbers)
    return max(longest, SHORTEST_FROM_STATE) if runs[numbers[0]].parent >= 0 else longest


def _padded_rows(run: _Run, length: int) -> IntArray:
    """Return the rows of a run, (length,), with its last one repeated as padding."""
    pieces = [np.arange(start, end) for start, end in run.pieces]
    last = run.pieces[-1][1] - 1
    return np.concatenate([*pieces, np.full(length - run.length, last)])
