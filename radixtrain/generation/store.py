"""Keys and values of stored rows, for every call of the attention function in a pass: mostly one a layer.

C slots, K key/value heads, H head dim. A `SlotPool` says which slots are free; here they are only rows of tensors. The
tensors appear with the first pass, which tells their shapes and dtype, and grow with the pool.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from radixtrain.generation.slots import SlotPool
from radixtrain.tree.cached_layout import CachedLayout

__all__ = ["KeyValueStore"]

# Narrower heads get their slots side by side in memory, wider ones the heads of a slot. On a CPU, 32 lanes of 230 then
# take 0.43 of the time with 2 heads of 32; with 8 heads of 128 it would be 1.1 of it.
WIDE_HEAD = 128


@dataclass(eq=False)
class KeyValueStore:
    """Implements `radixtrain.hf.attention.Store`.

    pool: of the slots.
    calls: for each call of the attention function in a pass, keys and values, (C, K, H) each.
    """

    pool: SlotPool
    calls: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def write(self, call: int, key: Tensor, value: Tensor, layout: CachedLayout) -> tuple[Tensor, Tensor]:
        """Put the new rows of a layer into their slots. Returns all that is stored for this call.

        call: which one of the pass. key, value: (U, K, H).
        """
        if call == len(self.calls):
            self.calls.append((self._empty(key), self._empty(value)))
        stored = self._of_capacity(call)
        for rows, new in zip(stored, (key, value), strict=True):
            written = new if layout.written_rows is None else new.index_select(0, layout.written_rows)
            rows.index_copy_(0, layout.slots, written)
        return stored

    def copy(self, from_slots: np.ndarray, to_slots: np.ndarray) -> None:
        """Copy rows to other slots, in every layer. No slot is in both."""
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

    def clear(self) -> None:
        """Give the memory back."""
        self.calls.clear()

    @property
    def device(self) -> torch.device:
        return self.calls[0][0].device

    @property
    def bytes_per_slot(self) -> int:
        """What one token takes in all layers; 0 before the first pass."""
        return sum(rows[:1].numel() * rows.element_size() for rows in self._tensors())

    @property
    def num_bytes(self) -> int:
        """Of all slots, free ones too."""
        return sum(rows.numel() * rows.element_size() for rows in self._tensors())

    def _tensors(self) -> list[Tensor]:
        return [rows for stored in self.calls for rows in stored]

    def _empty(self, like: Tensor) -> Tensor:
        _, num_heads, head_dim = like.shape
        with torch.inference_mode(False):  # a later call may write outside of inference mode
            if head_dim >= WIDE_HEAD:
                return like.new_zeros(self.pool.capacity, num_heads, head_dim)
            return like.new_zeros(num_heads, self.pool.capacity, head_dim).transpose(0, 1)

    def _of_capacity(self, call: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a call, with a row for every slot that the pool has by now."""
        if len(self.calls[call][0]) < self.pool.capacity:
            key, value = self.calls[call]
            self.calls[call] = self._grown(key), self._grown(value)
        return self.calls[call]

    def _grown(self, rows: Tensor) -> Tensor:
        grown = self._empty(rows)
        grown[: len(rows)] = rows
        return grown
