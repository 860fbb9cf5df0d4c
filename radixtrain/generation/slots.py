"""Which slots of a key/value store are free. A *slot* is a row of the store, the same number in every layer.

Free slots are kept as sorted runs, merged when neighbours meet, so that what is computed together can lie together.
NumPy only: the store itself is elsewhere.
"""

from __future__ import annotations

import numpy as np

from radixtrain.tree.arrays import IntArray, concatenate_ranges, cumulative

__all__ = ["SlotPool"]


class SlotPool:
    """The free slots of a store.

    capacity: slots there are, free or not. Grows, never shrinks.
    num_free: slots that nobody owns.
    """

    def __init__(self) -> None:
        self.capacity = self.num_free = 0
        self._starts = self._ends = np.zeros(0, dtype=np.int64)  # run i is [start, end); sorted; no two runs touch

    def __repr__(self) -> str:
        return f"SlotPool(capacity={self.capacity}, num_free={self.num_free}, runs={len(self._starts)})"

    def allocate(self, count: int, contiguous: bool = False) -> IntArray:
        """(count,), int64, ascending. Slots that were free: one run if one is long enough, else as few as possible.

        contiguous: always one run.

        The capacity grows if it must, at least to twice what it was. Raises ValueError for a negative count.
        """
        if count < 0:
            raise ValueError(f"count must not be negative, got {count}")
        if not count:
            return np.zeros(0, dtype=np.int64)
        lengths = self._ends - self._starts
        if self.num_free < count or (contiguous and lengths.max(initial=0) < count):
            self._grow(count, contiguous)
            lengths = self._ends - self._starts
        fits = (lengths >= count).nonzero()[0]
        if len(fits):
            runs, taken = fits[[lengths[fits].argmin()]], np.array([count])
        else:
            runs, taken = _longest(lengths, count)
        slots = concatenate_ranges(self._starts[runs], taken)
        self._starts[runs] += taken
        self._drop_empty_runs()
        self.num_free -= count
        return slots

    def release(self, slots: IntArray) -> None:
        """Gives slots back. slots: (n,), int64, in any order.

        Raises ValueError, and takes none, if one is out of range, given twice or free already.
        """
        if not len(slots):
            return
        ordered = np.sort(slots)
        if ordered[0] < 0 or ordered[-1] >= self.capacity:
            wrong = ordered[0] if ordered[0] < 0 else ordered[-1]
            raise ValueError(f"slot {wrong} does not exist: there are {self.capacity}")
        steps = ordered[1:] - ordered[:-1]
        _raise_for_first(ordered[:-1][steps == 0], "is released twice at once")
        breaks = (steps != 1).nonzero()[0]
        starts = np.append(ordered[:1], ordered[breaks + 1])
        ends = np.append(ordered[breaks], ordered[-1:]) + 1
        self._add_runs(starts, ends)
        self.num_free += len(slots)

    def _add_runs(self, starts: IntArray, ends: IntArray) -> None:
        """Adds runs, sorted, and merges those that touch. ValueError for one that overlaps a free run."""
        starts, ends = np.append(self._starts, starts), np.append(self._ends, ends)
        order = starts.argsort(kind="stable")
        starts, ends = starts[order], ends[order]
        _raise_for_first(starts[1:][starts[1:] < ends[:-1]], "is free already")
        apart = starts[1:] != ends[:-1]
        self._starts, self._ends = starts[np.append(True, apart)], ends[np.append(apart, True)]

    def _grow(self, count: int, contiguous: bool) -> None:
        """Raises the capacity until `count` slots are free, in one run if `contiguous`."""
        usable = self._free_at_the_end() if contiguous else self.num_free
        capacity = max(2 * self.capacity, self.capacity + count - usable)
        self._add_runs(np.array([self.capacity]), np.array([capacity]))
        self.num_free += capacity - self.capacity
        self.capacity = capacity

    def _free_at_the_end(self) -> int:
        ends_there = len(self._ends) and self._ends[-1] == self.capacity
        return int(self._ends[-1] - self._starts[-1]) if ends_there else 0

    def _drop_empty_runs(self) -> None:
        filled = self._starts < self._ends
        self._starts, self._ends = self._starts[filled], self._ends[filled]


def _longest(lengths: IntArray, count: int) -> tuple[IntArray, IntArray]:
    """The fewest runs that hold `count` slots, ascending, and how many slots to take from each."""
    order = (-lengths).argsort(kind="stable")
    bounds = cumulative(lengths[order])
    num_runs = int(np.searchsorted(bounds, count))
    taken = lengths[order[:num_runs]]
    taken[-1] = count - bounds[num_runs - 1]
    ascending = order[:num_runs].argsort()
    return order[:num_runs][ascending], taken[ascending]


def _raise_for_first(slots: IntArray, what: str) -> None:
    if len(slots):
        raise ValueError(f"slot {slots[0]} {what}")
