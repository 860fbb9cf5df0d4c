"""Cascade: every segment attends to itself causally, and its descendants attend to it without a mask.

U rows in depth-first pre-order. The descendants of segment v are the rows right behind it, so for one segment the
queries `[end, subtree_end)` and the keys `[start, end)` are plain slices. Segments of one level of the tree touch
disjoint rows.

- On CUDA a level is one varlen call; a level with a single segment needs no gather.
- On CPU every segment is its own call, since a slice costs nothing and a gather copies.

A sliding window shorter than the longest sequence is not for it: a segment is cut off from its distance to the query.

Sources: Hydragen (section 3) and FlashInfer's cascade for the forward; `pieces.py` for the backward.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from radixtrain.kernels.pieces import Piece, attention_in_pieces
from radixtrain.kernels.scoring import Scoring
from radixtrain.kernels.varlen import VarlenKernel

__all__ = ["cascade_attention"]


def cascade_attention(
    q_UNH: Tensor,
    k_UKH: Tensor,
    v_UKH: Tensor,
    self_piece: Piece,
    levels: Sequence[Piece],
    kernel: VarlenKernel,
    scoring: Scoring,
    sinks_N: Tensor | None = None,
) -> Tensor:
    """Tree attention without a copy of a row.

    self_piece: all rows, one causal entry per segment.
    levels: descendants onto their ancestor's keys, without a mask.
    sinks_N: (N,). logits without a value, one a head, or None.
    Returns (U, N, H).
    """
    return attention_in_pieces(q_UNH, k_UKH, v_UKH, (self_piece, *levels), kernel, scoring, sinks_N)
