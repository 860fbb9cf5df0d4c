"""The prefix plan as runs, each of which a layer with a recurrent state computes at once, from one state to the next.

Attention sees a tree through a mask. A recurrent layer (gated delta rule, state space, short convolution) reads a
sequence in order, so on a tree it works in runs: rows back to back on one path from a root. A run starts from the final
state of the run above it, or from nothing. The run above is a *fork*: its final state is kept, and all runs that
continue it start from a copy.

    segments        forks at every branch         only the first one worth it
    A ─┬─ B ─┬─ C   A │ B │ C    5 runs           A │ B C      4 runs, B is computed twice
       │     └─ D         │ D                       │ B D
       └─ E           │ E                           │ E

Every row of the plan has its output from exactly one run; the others that contain it only carry its state on, so values
and gradients are those of each sequence alone, whichever forks are chosen. A fork costs a state to keep and a call
or more; without it rows are computed again. `RunCost` decides.

Runs are computed in calls of equal shape:

- forks of one level that have the same length, because padding would change the final state;
- last of all the leaves of every level, sorted by length and padded on the right: nothing follows them.

No call has one row after a state, so no fork is shorter than two rows and a leaf of one row is padded: Hugging Face's
mixers take one for a step of generation, which writes into the state in place and has no gradient in some kernels.

The layers: gated delta rule (arXiv 2412.06464, section 3), Mamba 2 (arXiv 2405.21060), short convolutions.
Computed with NumPy, as the plan.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from radixtrain.tree.arrays import IntArray

SHORTEST_FORK = 2  # rows
SHORTEST_FROM_STATE = 2  # rows in a call
MIN_SAVED = (2, 32, 256)  # rows that a fork has to save, to choose from
Pieces = tuple[tuple[int, int], ...]  # ranges of rows, [start, end), one after the other on a path


@dataclass(frozen=True, kw_only=True)
class RunCost:
    """The cost of recurrent layers, forward and backward, in rows.

    call: of the layer, of any size.
    row: computed, a padded one included.
    state: kept, or handed to a run.
    """

    call: float = 64.0
    row: float = 1.0
    state: float = 8.0

    def of_call(self, num_runs: Any, length: Any) -> Any:
        """Return the cost of calls of these shapes without their states. num_runs, length: numbers or arrays."""
        return self.call + num_runs * length * self.row


RATES = RunCost()


class RunCall(NamedTuple):
    """One call of a layer: `num_runs` runs of `length` rows each.

    keeps: 1 if their final states are kept for later calls.
    sources: pairs (call, number): that many runs, in order, start from states that this call kept. Empty for runs
        that start from nothing.
    """

    num_runs: int
    length: int
    keeps: int
    sources: tuple[tuple[int, int], ...]


@dataclass(frozen=True, eq=False, kw_only=True)
class RunLayout:
    """Runs in calls, on a device. U unique rows, R runs.

    calls: in the order in which they are computed; host ints.
    rows: (sum of num_runs x length,), int64. the unique row of each row of the calls, back to back; padding repeats the
        last row of its run.
    places: (U,), int64. the place in `rows` from which each unique row has its output.
    parents: (number of runs that start from a state,), int64. for each, call by call, its place among the states that
        its source call kept.
    """

    calls: tuple[RunCall, ...]
    rows: Tensor
    places: Tensor
    parents: Tensor

    def to(self, device: torch.device) -> RunLayout:
        """Move from the CPU, without waiting for the copies."""
        with _disable_current_modes():
            arrays = [x.numpy() for x in (self.rows, self.places, self.parents)]
        # Made anew for a mode that fakes tensors, which takes no others.
        rows, places, parents = (torch.tensor(array, device="cpu").to(device, non_blocking=True) for array in arrays)
        return replace(self, rows=rows, places=places, parents=parents)

    @property
    def num_forks(self) -> int:
        """Count the states that are kept."""
        return sum(call.num_runs for call in self.calls if call.keeps)


class _Run(NamedTuple):
    """A run. pieces: ranges of unique rows, back to back. parent: the run it continues, or -1. level: forks above."""

    pieces: Pieces
    length: int
    parent: int
    level: int
    is_fork: bool


def cheapest_runs(segment_starts: IntArray, segment_parents: IntArray, rates: RunCost | None = None) -> RunLayout:
    """Return the runs of a plan that cost least among several choices of forks; no forks if none pays. On the CPU.

    segment_starts, segment_parents: (S+1,) and (S,), int64. as in `PrefixPlan`.
    rates: what the layers cost; by default `RATES`.
    """
    rates = rates or RATES
    options = (None, *MIN_SAVED) if (segment_parents >= 0).any() else (None,)
    segments = segment_starts.tolist(), segment_parents.tolist()
    distinct = dict.fromkeys(tuple(_runs(*segments, min_saved)) for min_saved in options)
    choices = [(runs, _groups(runs, rates)) for runs in distinct]
    runs, groups = min(choices, key=lambda choice: _cost(choice[0], choice[1], rates))
    return _layout(runs, groups, int(segment_starts[-1]))


def runs_of_segments(
    segment_starts: IntArray,
    segment_parents: IntArray,
    min_saved: int | None,
    rates: RunCost | None = None,
) -> RunLayout:
    """Make the runs of a plan with these forks, on the CPU.

    segment_starts, segment_parents: (S+1,) and (S,), int64. as in `PrefixPlan`.
    min_saved: rows that a fork must save: its length times the branches after the first. None: no forks at all, each
        leaf's whole path is one run.
    rates: decides which leaves of different lengths share a call; by default `RATES`.
    """
    runs = tuple(_runs(segment_starts.tolist(), segment_parents.tolist(), min_saved))
    return _layout(runs, _groups(runs, rates or RATES), int(segment_starts[-1]))


def _groups(runs: Sequence[_Run], rates: RunCost) -> list[list[int]]:
    """Return the groups of runs that are computed in one call each; the calls in order."""
    return [*_fork_groups(runs), *_leaf_groups(runs, rates)]


def _cost(runs: Sequence[_Run], groups: list[list[int]], rates: RunCost) -> float:
    """Return the cost of one layer with these runs."""
    states = sum(run.is_fork for run in runs) + sum(run.parent >= 0 for run in runs)
    calls = sum(rates.of_call(len(group), _call_length(runs, group)) for group in groups)
    return calls + states * rates.state


class _Above(NamedTuple):
    """How children of a segment begin: the run they continue, its level, and rows that are in no run yet."""

    run: int
    level: int
    pieces: Pieces = ()
    length: int = 0


def _runs(starts: list[int], parents: list[int], min_saved: int | None) -> Iterator[_Run]:
    """Yield the runs in the order of the segments that end them, so that a run comes after the one it continues."""
    children = Counter(parents)
    above_children = {-1: _Above(-1, 0)}
    number = 0
    for segment, (parent, own) in enumerate(zip(parents, pairwise(starts), strict=True)):
        run, level, pieces, length = above_children[parent]
        pieces, length = (*pieces, own), length + own[1] - own[0]
        is_leaf = not children[segment]
        saved = length * (children[segment] - 1)
        is_fork = min_saved is not None and not is_leaf and length >= SHORTEST_FORK and saved >= min_saved
        if is_leaf or is_fork:
            yield _Run(pieces, length, run, level, is_fork)
            above_children[segment] = _Above(number, level + 1)
            number += 1
        else:
            above_children[segment] = _Above(run, level, pieces, length)


def _fork_groups(runs: Sequence[_Run]) -> Iterator[list[int]]:
    """Yield the forks that are computed in one call: of one level and one length; the levels in order."""
    groups: dict[tuple[int, int], list[int]] = {}
    for number, run in enumerate(runs):
        if run.is_fork:
            groups.setdefault((run.level, run.length), []).append(number)
    for key in sorted(groups):
        yield groups[key]


def _leaf_groups(runs: Sequence[_Run], rates: RunCost) -> Iterator[list[int]]:
    """Yield the leaves that are computed in one call: of similar lengths, and with or without a state to start from."""
    for from_state in (False, True):
        leaves = [n for n, run in enumerate(runs) if not run.is_fork and (run.parent >= 0) == from_state]
        leaves.sort(key=lambda number: runs[number].length)
        lengths = np.array([_call_length(runs, [number]) for number in leaves], dtype=np.int64)
        yield from (leaves[start:end] for start, end in pairwise(_cheapest_buckets(lengths, rates)))


def _cheapest_buckets(lengths: IntArray, rates: RunCost) -> list[int]:
    """Return the bounds of the buckets of these ascending lengths that cost least, each padded to its longest.

    By dynamic programming over the distinct lengths: the best cut of the first ones, and one more bucket.
    """
    distinct, ends = np.unique(lengths, return_index=True)
    ends = np.append(ends[1:], len(lengths)) if len(lengths) else ends
    bounds = np.concatenate([[0], ends]).astype(np.int64)
    best, last = np.zeros(len(bounds)), np.zeros(len(bounds), dtype=np.int64)
    for end in range(1, len(bounds)):
        costs = best[:end] + rates.of_call(bounds[end] - bounds[:end], distinct[end - 1])
        last[end] = costs.argmin()
        best[end] = costs[last[end]]
    cuts = [len(bounds) - 1]
    while cuts[-1]:
        cuts.append(int(last[cuts[-1]]))
    return bounds[cuts[::-1]].tolist()


def _call_length(runs: Sequence[_Run], group: Sequence[int]) -> int:
    """Return the rows of each run of a call, with padding."""
    longest = max(runs[number].length for number in group)
    return max(longest, SHORTEST_FROM_STATE) if runs[group[0]].parent >= 0 else longest


def _layout(runs: Sequence[_Run], groups: list[list[int]], num_rows: int) -> RunLayout:
    """Lay the runs out in calls; within a call, order them by the call that their states come from."""
    place_of: dict[int, tuple[int, int]] = {-1: (-1, 0)}  # run -> its call, its place in it
    calls: list[RunCall] = []
    rows, parents = [np.zeros(0, dtype=np.int64)], []
    for group in groups:
        ordered = sorted(group, key=lambda number: (place_of[runs[number].parent], number))
        place_of |= {number: (len(calls), place) for place, number in enumerate(ordered)}
        above = [place_of[runs[number].parent] for number in ordered if runs[number].parent >= 0]
        parents += [place for _, place in above]
        length = _call_length(runs, ordered)
        rows += [_padded_rows(runs[number], length) for number in ordered]
        sources = tuple((call, len(list(same))) for call, same in groupby(call for call, _ in above))
        calls.append(RunCall(len(ordered), length, int(runs[ordered[0]].is_fork), sources))
    flat = np.concatenate(rows)
    return RunLayout(
        calls=tuple(calls),
        rows=torch.from_numpy(flat),
        places=torch.from_numpy(_places(flat, num_rows)),
        parents=torch.tensor(parents, dtype=torch.int64, device="cpu"),
    )


def _padded_rows(run: _Run, length: int) -> IntArray:
    """Return the rows of a run, (length,), with its last one repeated as padding."""
    pieces = [np.arange(start, end) for start, end in run.pieces]
    last = run.pieces[-1][1] - 1
    return np.concatenate([*pieces, np.full(length - run.length, last)])


def _places(rows: IntArray, num_rows: int) -> IntArray:
    """Return the first place of each row, (num_rows,): NumPy keeps the value written last, so write backwards."""
    places = np.zeros(num_rows, dtype=np.int64)
    places[rows[::-1]] = np.arange(len(rows))[::-1]
    return places
