"""Path: each sequence's new rows attend to its whole root path, one ordinary varlen call.

The new rows of a sequence are consecutive, and they are the last of its path, so bottom-right causal attention from
them to the gathered path is exact for any trie, with any varlen kernel. Keys and values are copied (T rows at most),
queries are not. The keys of an entry are a whole sequence in order, so whatever the kernel does by distance, such as a
sliding window, keeps its meaning.

There is one entry per sequence, not per segment: a segment's root path is part of the path of the sequence that brings
it, so fewer keys are gathered.
"""

from __future__ import annotations

from torch import Tensor

from radixtrain.kernels.pieces import Piece, attention_in_pieces
from radixtrain.kernels.ragged import Ragged, VarlenKernel
from radixtrain.kernels.rows import gather_rows
from radixtrain.kernels.scoring import Scoring

__all__ = ["path_attention"]


def path_attention(
    q_UNH: Tensor,
    k_UKH: Tensor,
    v_UKH: Tensor,
    path_keys: Tensor,
    ragged: Ragged,
    kernel: VarlenKernel,
    scoring: Scoring,
    sinks_N: Tensor | None = None,
) -> Tensor:
    """Tree attention from unique queries to gathered root paths.

    path_keys: (T',), int64. unique rows of every path, back to back.
    ragged: new rows of each path onto the path, causal.
    sinks_N: (N,). logits without a value, one for each head, or None.
    Returns (U, N, H).
    """
    everything = Piece(slice(None), slice(None), ragged)
    k_path, v_path = gather_rows(k_UKH, path_keys), gather_rows(v_UKH, path_keys)
    return attention_in_pieces(q_UNH, k_path, v_path, (everything,), kernel, scoring, sinks_N)
