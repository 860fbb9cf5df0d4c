"""Keys and values of stored rows, and which slots of the store are free.

A *slot* is a row of the store, under the same number in every layer. Free slots are kept as sorted runs, merged when
they touch, so that what is computed together can be stored together. The tensors appear with the first pass, which has
their shapes and dtype, grow with the pool, and shrink with it when a call has given its slots back.
"""

# Axes: C slots, K key/value heads, H head dim.

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from radixtrain.tree.arrays import IntArray, concatenate_ranges, cumulative
from radixtrain.tree.cached_layout import CachedLayout

# Narrower heads get their slots side by side in memory, wider ones the heads of a slot. On a CPU, 32 lanes of 230 then
# take 0.43 of the time with 2 heads of 32; with 8 heads of 128 it would be 1.1 of it.
WIDE_HEAD = 128


class SlotPool:
    """The free slots of a store.

    capacity: number of slots, free or not.
    num_free: slots without an owner.
    """

    def __init__(self) -> None:
        self.capacity = self.num_free = 0
        self._starts = self._ends = np.zeros(0, dtype=np.int64)  # run i is [start, end); sorted; no two runs touch

    def allocate(self, count: int, contiguous: bool = False, ahead: int = 0) -> IntArray:
        """Take free slots, (count,), int64, ascending: one run if one is long enough, else as few as possible.

        contiguous: always one run.
        ahead: slots by which the capacity grows beyond what is needed, if it must grow.
        """
        if not count:
            return np.zeros(0, dtype=np.int64)
        lengths = self._ends - self._starts
        if self.num_free < count or (contiguous and lengths.max(initial=0) < count):
            self._grow(count, contiguous, ahead)
            lengths = self._ends - self._starts
        fits = (lengths >= count).nonzero()[0]
        if len(fits):
            runs, taken = fits[[lengths[fits].argmin()]], np.array([count])
        else:
            runs, taken = _longest(lengths, count)
        return self._take(runs, taken)

    def allocate_lowest(self, count: int, below: int) -> IntArray:
        """Take the lowest free slots below a bound, (n,), int64, ascending: `count`, or all if there are fewer."""
        lengths = np.minimum(self._ends, below) - self._starts
        taken = np.clip(count - (lengths.cumsum() - lengths), 0, lengths.clip(0))
        runs = taken.nonzero()[0]
        return self._take(runs, taken[runs])

    def release(self, slots: IntArray) -> None:
        """Give slots back. slots: (n,), int64, in any order; none of them is free."""
        if len(slots):
            ordered = np.sort(slots)
            breaks = (np.diff(ordered) != 1).nonzero()[0]
            self._add_runs(np.append(ordered[0], ordered[breaks + 1]), np.append(ordered[breaks], ordered[-1]) + 1)
            self.num_free += len(slots)

    def _add_runs(self, starts: IntArray, ends: IntArray) -> None:
        """Add sorted runs, and merge those that touch."""
        starts, ends = np.append(self._starts, starts), np.append(self._ends, ends)
        order = starts.argsort(kind="stable")
        starts, ends = starts[order], ends[order]
        assert (starts[1:] >= ends[:-1]).all() and starts[0] >= 0, "a slot is free already, or released twice"
        apart = starts[1:] != ends[:-1]
        self._starts, self._ends = starts[np.append(True, apart)], ends[np.append(apart, True)]

    def trim(self, capacity: int) -> None:
        """Lower the capacity to this, or as far as the slots in use allow."""
        free = min(self._free_at_the_end(), self.capacity - capacity)
        if free > 0:
            self._ends[-1] -= free
            self._drop_empty_runs()
            self.num_free -= free
            self.capacity -= free

    def _take(self, runs: IntArray, taken: IntArray) -> IntArray:
        """Take the first slots of several runs."""
        slots = concatenate_ranges(self._starts[runs], taken)
        self._starts[runs] += taken
        self._drop_empty_runs()
        self.num_free -= len(slots)
        return slots

    def _grow(self, count: int, contiguous: bool, ahead: int) -> None:
        """Raise the capacity until `count` slots are free, in one run if `contiguous`, and `ahead` more."""
        usable = self._free_at_the_end() if contiguous else self.num_free
        capacity = self.capacity + count - usable + ahead
        self._add_runs(np.array([self.capacity]), np.array([capacity]))
        self.num_free += capacity - self.capacity
        self.capacity = capacity

    def _free_at_the_end(self) -> int:
        ends_there = len(self._ends) and self._ends[-1] == self.capacity
        return int(self._ends[-1] - self._starts[-1]) if ends_there else 0

    def _drop_empty_runs(self) -> None:
        filled = self._starts < self._ends
        self._starts, self._ends = self._starts[filled], self._ends[filled]


@dataclass(eq=False)
class KeyValueStore:
    """The keys and values of every slot.

    pool: of the slots.
    calls: for each call of the attention function in a pass, keys and values, (C, K, H) each.
    """

    pool: SlotPool
    calls: list[tuple[Tensor, ...]] = field(default_factory=list)

    def write(self, call: int, new_rows: tuple[Tensor, ...], layout: CachedLayout) -> tuple[Tensor, ...]:
        """Put the new rows of a layer into their slots, and return everything stored for this call.

        call: which one of the pass. new_rows: keys and values, (U, K, H) each.
        """
        if call == len(self.calls):
            self.calls.append(tuple(map(self._empty, new_rows)))
        stored = self._of_capacity(call)
        for rows, new in zip(stored, new_rows, strict=True):
            written = new if layout.written_rows is None else new.index_select(0, layout.written_rows)
            rows.index_copy_(0, layout.slots, written)
        return stored

    def copy(self, from_slots: np.ndarray, to_slots: np.ndarray) -> None:
        """Copy rows to other slots, in every layer. A slot may be in both."""
        if len(from_slots) and self.calls:
            source, target = (
                torch.from_numpy(slots).to(self.device, non_blocking=True) for slots in (from_slots, to_slots)
            )
            for call in range(len(self.calls)):
                for rows in self._of_capacity(call):  # the target may be new in the pool
                    rows.index_copy_(0, target, rows.index_select(0, source))

    def zero(self, slots: np.ndarray) -> None:
        """Make rows zero: what a mask hides has to be finite."""
        if len(slots) and self.calls:
            indices = torch.from_numpy(slots).to(self.device, non_blocking=True)
            for rows in self._tensors():
                if len(rows) == self.pool.capacity:
                    rows.index_fill_(0, indices, 0)
                else:  # slots that are new in the pool are zero once the tensor has grown
                    rows.index_fill_(0, indices[indices < len(rows)], 0)

    def shrink(self) -> None:
        """Give back the memory of the slots that the pool no longer has."""
        if not self.pool.capacity:
            self.calls.clear()
        for call in range(len(self.calls)):
            if len(self.calls[call][0]) > self.pool.capacity:
                self.calls[call] = tuple(map(self._resized, self.calls[call]))

    @property
    def device(self) -> torch.device:
        return self.calls[0][0].device

    def _tensors(self) -> list[Tensor]:
        return [rows for stored in self.calls for rows in stored]

    def _empty(self, like: Tensor) -> Tensor:
        _, num_heads, head_dim = like.shape
        with torch.inference_mode(False):  # a later call may write outside of inference mode
            if head_dim >= WIDE_HEAD:
                return like.new_zeros(self.pool.capacity, num_heads, head_dim)
            return like.new_zeros(num_heads, self.pool.capacity, head_dim).transpose(0, 1)

    def _of_capacity(self, call: int) -> tuple[Tensor, ...]:
        """Return keys and values of a call, with a row for every slot that the pool has by now."""
        if len(self.calls[call][0]) < self.pool.capacity:
            self.calls[call] = tuple(map(self._resized, self.calls[call]))
        return self.calls[call]

    def _resized(self, rows: Tensor) -> Tensor:
        resized, kept = self._empty(rows), min(len(rows), self.pool.capacity)
        resized[:kept] = rows[:kept]
        return resized


def _longest(lengths: IntArray, count: int) -> tuple[IntArray, IntArray]:
    """Choose the fewest runs that hold `count` slots, ascending, and how many slots to take from each."""
    order = (-lengths).argsort(kind="stable")
    bounds = cumulative(lengths[order])
    num_runs = int(np.searchsorted(bounds, count))
    taken = lengths[order[:num_runs]]
    taken[-1] = count - bounds[num_runs - 1]
    ascending = order[:num_runs].argsort()
    return order[:num_runs][ascending], taken[ascending]
