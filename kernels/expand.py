"""Expand: back to the packed layout, ordinary causal varlen attention there, and back to unique rows.

RadixMLP's algorithm (section 3.3): only attention runs on all T tokens. It saves nothing in attention, and every
modifier that a varlen kernel knows keeps its meaning.
"""

from __future__ import annotations

from torch import Tensor

from radixtrain.kernels.pieces import Piece, attention_in_pieces
from radixtrain.kernels.ragged import Ragged, VarlenKernel
from radixtrain.kernels.rows import gather_rows
from radixtrain.kernels.scoring import Scoring

__all__ = ["expand_attention"]


def expand_attention(
    q_UNH: Tensor,
    k_UKH: Tensor,
    v_UKH: Tensor,
    inverse_indices: Tensor,
    gather_indices: Tensor,
    ragged: Ragged,
    kernel: VarlenKernel,
    scoring: Scoring,
    sinks_N: Tensor | None = None,
) -> Tensor:
    """Attention of the T packed tokens, read at their first occurrences.

    inverse_indices: (T,), int64. packed token -> unique row.
    gather_indices: (U,), int64. unique row -> packed token.
    ragged: the sequences, causal.
    sinks_N: (N,). logits without a value, one for each head, or None.
    Returns (U, N, H).
    """
    q, k, v = (gather_rows(x, inverse_indices) for x in (q_UNH, k_UKH, v_UKH))
    everything = Piece(slice(None), slice(None), ragged)
    out_TNH = attention_in_pieces(q, k, v, (everything,), kernel, scoring, sinks_N)
    return gather_rows(out_TNH, gather_indices)
