"""Blocks of rows that attend in both directions, such as the tokens of an image in Gemma 3.

Causal attention gives every row the earlier ones of its block. What remains is attention of each row to the later ones,
which is causal too if the rows of a block are reversed:

    block  3 4 5 6    queries  5 4 3    keys  6 5 4    5 sees 6; 4 sees 6, 5; 3 sees 6, 5, 4

A block is shared as a whole or not at all, so its rows are consecutive. NumPy only, as for the plan.
"""

from __future__ import annotations

import numpy as np

from radixtrain.tree.arrays import IntArray, cumulative

WITH_BLOCKS = ("cascade", "path", "reference")  # the attention strategies that compute them


def reversed_blocks(block_of_row: IntArray) -> tuple[IntArray, IntArray]:
    """Return the queries of the blocks that have two rows or more, back to back, and their bounds.

    block_of_row: (U,), int64. the number of each row's block; -1 for a row that only attends backwards.
    """
    starts = np.flatnonzero(np.diff(block_of_row, prepend=-1))
    ends = np.append(starts[1:], len(block_of_row))
    is_block = (block_of_row[starts] >= 0) & (ends - starts > 1)
    last, lengths = (ends - 2)[is_block], (ends - starts - 1)[is_block]
    bounds = cumulative(lengths)
    queries: IntArray = (last + bounds[:-1]).repeat(lengths) - np.arange(bounds[-1])
    return queries, bounds
