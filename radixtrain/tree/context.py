"""The context of a micro-batch: rows that earlier passes of an optimizer step computed, and this one attends to.

U rows of the micro-batch, C rows of its context. Keys and values are those of the micro-batch, then those of the
context: (U + C, K, H). The rows of the step are numbered in depth-first order, so the descendants of a row are the
numbers up to an end (`radixtrain/tree/plan.py`), and what attends to a context row is a range of the micro-batch.

    step    0 1 2 3 4 5 6    context  0 1      micro-batch  2 3 5 6      0 is seen by all four rows
            |---------- 0                                                1 is seen by 2 and 3
              |---- 1     (1 ends before 5)
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from radixtrain.kernels.merge_attention import Piece
from radixtrain.kernels.varlen_args import Bounds, Ragged
from radixtrain.tree.arrays import IntArray
from radixtrain.tree.movable import Movable
from radixtrain.tree.plan import PrefixPlan

WITH_CONTEXT = ("cascade", "path")  # the attention strategies that can read one


@dataclass(frozen=True, eq=False, kw_only=True)
class ContextLayout(Movable):
    """Which rows of a micro-batch attend to which rows of its context, on a device.

    num_rows: C. bounds: of each call, the queries and the context rows that each of them sees: first query, last + 1,
        first context row, last + 1. Host ints.
    cu_seqlens: (number of calls, 2, 2), int32. 0 and the number of queries; 0 and that of context rows.
    """

    num_rows: int
    bounds: tuple[Bounds, ...]
    cu_seqlens: Tensor

    @classmethod
    def of(cls, plan: PrefixPlan, rows: IntArray, context: IntArray, subtree_ends: IntArray) -> ContextLayout:
        """plan: of the micro-batch, whose tokens are rows of the step. rows: (U,), int64, those of the step, by number.

        context: (C,), int64. the same, ascending. subtree_ends: (rows of the step,), one past the last descendant.
        """
        # A row that is computed twice stands after its twin's descendants; the maximum puts it there in order.
        last = np.maximum.accumulate(rows[: plan.num_unique_tokens])
        first_query, end = last.searchsorted(context), last.searchsorted(subtree_ends[context])
        changes = (np.diff(first_query) != 0) | (np.diff(end) != 0)
        runs = [0, *(np.flatnonzero(changes) + 1).tolist(), len(context)]
        bounds = tuple((int(first_query[k0]), int(end[k0]), k0, k1) for k0, k1 in pairwise(runs))
        bounds = tuple(each for each in bounds if each[0] < each[1])
        lengths = [[[0, q1 - q0], [0, k1 - k0]] for q0, q1, k0, k1 in bounds]
        cu_seqlens = torch.tensor(lengths, dtype=torch.int32).reshape(-1, 2, 2)
        return cls(num_rows=len(context), bounds=bounds, cu_seqlens=cu_seqlens)

    def pieces(self, num_own: int) -> tuple[Piece, ...]:
        """The calls of `cascade` onto the context, whose keys come after `num_own` others."""
        return tuple(
            Piece(slice(q0, q1), slice(num_own + k0, num_own + k1), _whole(cu_seqlens, q1 - q0, k1 - k0))
            for (q0, q1, k0, k1), cu_seqlens in zip(self.bounds, self.cu_seqlens, strict=True)
        )


def _whole(cu_seqlens: Tensor, num_queries: int, num_keys: int) -> Ragged:
    """Queries that see all keys."""
    bounds = ((0, num_queries, 0, num_keys),)
    return Ragged(cu_seqlens[0], cu_seqlens[1], num_queries, num_keys, causal=False, bounds=bounds)
