"""One forward pass of generation as attention needs it: new rows, and the stored rows that they see.

U new rows, C slots of the store of keys and values. A pass either computes what a prompt adds to the cache (`prompts`
is its tree), or one token of every active sequence (`lanes`).

A sliding window that binds cuts through shared rows, so then every query gets its own last slots, copied (`windows`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from radixtrain.kernels.cached import Lanes
from radixtrain.kernels.pieces import Piece
from radixtrain.kernels.ragged import Ragged
from radixtrain.tree.arrays import cumulative, lengths_of
from radixtrain.tree.layout import TreeLayout

__all__ = ["CachedLayout", "Paths", "shared_piece"]


@dataclass(frozen=True, eq=False)
class Paths:
    """The new rows as runs, each the end of one sequence. Host only.

    cu_seqlens: (E+1,), int64. where each run of new rows begins.
    slots_of: run -> the slots of its whole sequence, its new rows last.
    """

    cu_seqlens: np.ndarray
    slots_of: Callable[[int], np.ndarray]

    def within(self, window: int) -> tuple[np.ndarray, np.ndarray]:
        """The slots that the runs see through a window of that many tokens, back to back, and their bounds (E+1,)."""
        new = lengths_of(self.cu_seqlens)
        slots = [self.slots_of(run)[-(window - 1 + int(count)) :] for run, count in enumerate(new)]
        return np.concatenate(slots), cumulative(np.array([len(each) for each in slots]))


@dataclass(eq=False)
class CachedLayout:
    """A pass on the device of its tensors.

    num_rows: U. max_seqlen: the longest sequence at the end of this pass, in tokens.
    written_rows: (W,), int64, or None for all rows in order. slots: (W,), int64. which row is stored in which slot;
        a row may be stored in several.
    shared: stored rows that several queries see whole; `k_rows` are slots.
    paths: the same for a window that binds.
    prompts: the tree of the new rows; None for a pass with lanes.
    lanes: of the new rows, one each; None for a pass with prompts.
    """

    num_rows: int
    max_seqlen: int
    written_rows: Tensor | None
    slots: Tensor
    shared: tuple[Piece, ...]
    paths: Paths
    prompts: TreeLayout | None = None
    lanes: Lanes | None = None

    _windows: dict[int, tuple[Tensor, Ragged]] = field(default_factory=dict, init=False, repr=False)

    def windowed(self, window: int) -> tuple[Tensor, Ragged]:
        """(slots, call) of a layer whose window binds: the slots to copy, and a causal varlen call on them."""
        if window not in self._windows:
            device = self.slots.device
            slots, cu_seqlens_k = self.paths.within(window)
            bounds = self.paths.cu_seqlens, cu_seqlens_k
            q, k = (torch.from_numpy(each.astype(np.int32)).to(device) for each in bounds)
            longest_q, longest_k = (int(lengths_of(each).max(initial=0)) for each in bounds)
            entries = zip(*(pairs for each in bounds for pairs in (each[:-1].tolist(), each[1:].tolist())), strict=True)
            call = Ragged(q, k, longest_q, longest_k, True, tuple(entries) if device.type == "cpu" else None)
            self._windows[window] = torch.from_numpy(slots).to(device), call
        return self._windows[window]


def shared_piece(q_rows: Sequence[int] | np.ndarray, slots: np.ndarray, device: torch.device) -> Piece:
    """Queries that see stored rows whole. Rows and slots that follow each other become slices, which are not copied."""
    num_queries, num_keys = len(q_rows), len(slots)
    q, k = (torch.tensor([0, count], dtype=torch.int32, device=device) for count in (num_queries, num_keys))
    call = Ragged(q, k, num_queries, num_keys, False, ((0, num_queries, 0, num_keys),))
    return Piece(_slice_or_indices(np.asarray(q_rows), device), _slice_or_indices(slots, device), call)


def _slice_or_indices(rows: np.ndarray, device: torch.device) -> slice | Tensor:
    first, last = int(rows[0]), int(rows[-1])
    follow = last - first + 1 == len(rows) and bool((np.diff(rows) == 1).all())
    return slice(first, last + 1) if follow else torch.from_numpy(rows.astype(np.int64)).to(device)
