"""Blocks of rows that attend in both directions, such as the tokens of an image in Gemma 3.

Causal attention gives every row the earlier ones of its block. What remains is attention of each row to the later ones,
which is causal too if the rows of a block are reversed:

    block  3 4 5 6    queries  5 4 3    keys  6 5 4    5 sees 6; 4 sees 6, 5; 3 sees 6, 5, 4

A block is shared as a whole or not at all, so its rows are consecutive.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from radixtrain.kernels.merge_attention import Piece
from radixtrain.kernels.varlen_args import Ragged
from radixtrain.tree.arrays import IntArray, cumulative

WITH_BLOCKS = ("cascade", "path", "reference")  # the attention strategies that compute them


@dataclass(frozen=True, eq=False, kw_only=True)
class BlockLayout:
    """The blocks of U rows, on a device.

    block_of_row: (U,), int64. The number of its block; -1 for a row that only attends backwards.
    queries, keys: (L,), int64. Rows of each block in reverse order, back to back: all but its last, all but its first.
    lengths: of each block, how many queries it has. Host ints.
    """

    block_of_row: Tensor
    queries: Tensor
    keys: Tensor
    lengths: tuple[int, ...]

    @classmethod
    def of(cls, block_of_row: IntArray) -> BlockLayout | None:
        """Find the blocks with two rows or more; None without any."""
        starts = np.flatnonzero(np.diff(block_of_row, prepend=-1))
        ends = np.append(starts[1:], len(block_of_row))
        is_block = (block_of_row[starts] >= 0) & (ends - starts > 1)
        bounds = list(zip(starts[is_block].tolist(), ends[is_block].tolist(), strict=True))
        if not bounds:
            return None
        queries = np.concatenate([np.arange(end - 2, start - 1, -1) for start, end in bounds])
        return cls(
            block_of_row=torch.from_numpy(block_of_row),
            queries=torch.from_numpy(queries),
            keys=torch.from_numpy(queries + 1),
            lengths=tuple(end - start - 1 for start, end in bounds),
        )

    @cached_property
    def later(self) -> Piece:
        """Make the call of every row onto the later ones of its block."""
        bounds = cumulative(np.array(self.lengths))
        cu_seqlens = torch.from_numpy(bounds.astype(np.int32)).to(self.queries.device, non_blocking=True)
        longest = max(self.lengths)
        ragged = Ragged(cu_seqlens, cu_seqlens, longest, longest, causal=True)
        return Piece(self.queries, self.keys, ragged)

    def mask(self) -> Tensor:
        """Return the mask (U, U), bool, by which query q sees the later key k because both are in one block."""
        of_row = self.block_of_row
        return ((of_row[:, None] == of_row[None, :]) & (of_row[:, None] >= 0)).triu(1)
