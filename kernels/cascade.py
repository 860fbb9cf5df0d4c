"""Cascade: segments attend to themselves, and what descends from them attends to them without a mask.

U rows in depth-first pre-order. The descendants of segment v are the rows right behind it, so for one segment the
queries `[end, subtree_end)` and the keys `[start, end)` are plain slices. Segments of one level of the tree touch
disjoint rows. `radixtrain/tree_pieces.py` says which calls that makes on a device and on the host.

A sliding window shorter than the longest sequence is not for it: a segment is cut off from its distance to the query.

Sources: Hydragen (section 3) and FlashInfer's cascade for the forward; `pieces.py` for the backward.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from radixtrain.kernels.pieces import Piece, attention_in_pieces
from radixtrain.kernels.ragged import VarlenKernel
from radixtrain.kernels.scoring import Scoring

__all__ = ["cascade_attention"]


def cascade_attention(
    q_UNH: Tensor,
    k_UKH: Tensor,
    v_UKH: Tensor,
    pieces: Sequence[Piece],
    kernel: VarlenKernel,
    scoring: Scoring,
    sinks_N: Tensor | None = None,
) -> Tensor:
    """Tree attention without a copy of a row.

    pieces: the first meets every row, the others are descendants onto their ancestors; together every pair of the tree
        mask once.
    sinks_N: (N,). logits without a value, one a head, or None.
    Returns (U, N, H).
    """
    return attention_in_pieces(q_UNH, k_UKH, v_UKH, pieces, kernel, scoring, sinks_N)
