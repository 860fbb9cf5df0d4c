"""Attention over keys that come in pieces: forward pieces merge by log-sum-exp, the backward is one stock call a piece.

U rows, N query heads, K key/value heads, H head dim. A piece is a varlen call on some of the rows.

Forward (Hydragen, section 3.1; FlashInfer's "merge of attention states"): with out_i and lse_i of each piece,
`lse = logaddexp(lse_1, lse_2)` and `out = out_1 exp(lse_1 - lse) + out_2 exp(lse_2 - lse)`.

Backward: flash-attention recomputes `p = exp(s - lse)` and `ds = p (dp - delta)` with `delta = rowsum(dout * out)` from
q, k, v, dout and the final out and lse. Every key belongs to one piece, and out and lse of the whole row enter only as
those two numbers per row. So the stock backward of a piece, given the **merged** out and lse, returns exactly
that piece's share of dq and its dk and dv; the shares add up. (Ring attention rests on the same identity.)

Sinks (gpt-oss): a logit s_n of every head, which takes part in the softmax and has no value. It is one more piece, with
log-sum-exp s_n and output 0, merged last: `lse' = logaddexp(lse, s_n)` and `out' = out exp(lse - lse')`. The identity
above holds for out' and lse', and `ds_n = -sum_q exp(s_n - lse') delta`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from radixtrain.kernels.first_order import first_order
from radixtrain.kernels.rows import gather_rows
from radixtrain.kernels.varlen_args import Ragged, Scoring, VarlenKernel

Rows = slice | Tensor


@dataclass(frozen=True, eq=False)
class Piece:
    """One varlen call on some rows.

    q_rows, k_rows: which rows of q, and of k and v. A slice is free; an index tensor (int64, no repeats) is gathered.
    in_window: no window hides any of its keys.
    of_further: whether `k_rows` are of the further keys and values of the call, not of its own.
    """

    q_rows: Rows
    k_rows: Rows
    ragged: Ragged
    in_window: bool = False
    of_further: bool = False


def attention_in_pieces(
    q_UNH: Tensor,
    k_UKH: Tensor,
    v_UKH: Tensor,
    pieces: Sequence[Piece],
    kernel: VarlenKernel,
    scoring: Scoring,
    sinks_N: Tensor | None = None,
    further: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Attention of every query over the keys of all its pieces.

    pieces: the first covers every row of q and of k; the others may cover any. No query sees a key in two pieces.
    scoring: of every piece; a window needs whole sequences as entries of the first, and the others `in_window`.
    sinks_N: (N,), any floating dtype; differentiable like the others.
    further: keys and values of other rows, (C, K, H) each, such as of those that were computed before.
    Returns (U, N, H), the dtype of q. 16-bit outputs and gradients are merged and added in float32 and rounded once.
    """
    assert scoring.window is None or all(piece.in_window for piece in pieces[1:]), (
        "a window needs the distance from a query to its keys, which a piece does not know"
    )
    return _Pieces.apply(q_UNH, sinks_N, tuple(pieces), kernel, scoring, k_UKH, v_UKH, *(further or ()))


class _Pieces(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        sinks: Tensor | None,
        pieces: tuple[Piece, ...],
        kernel: VarlenKernel,
        scoring: Scoring,
        *keys: Tensor,  # and values; perhaps further ones after them
    ) -> Tensor:
        first, *rest = pieces
        parts = kernel.forward(q, keys[0], keys[1], first.ragged, scoring)
        out, lse = merged_pieces(q, parts, rest, keys, kernel, scoring, sinks)
        ctx.save_for_backward(q, sinks, out, lse, *keys)
        ctx.pieces, ctx.kernel, ctx.scoring = pieces, kernel, scoring
        return out

    @staticmethod
    @first_order
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, sinks, out, lse, *keys = ctx.saved_tensors
        first, *rest = ctx.pieces
        grads = ctx.kernel.backward(dout, q, keys[0], keys[1], out, lse, first.ragged, ctx.scoring)
        # One more share is one sum a number, which torch adds in float32 and rounds once.
        wide = lse.dtype if len(rest) > 1 else q.dtype
        dq, dkeys = grads[0].to(wide), [grad.to(wide) for grad in grads[1:]]
        dkeys += [torch.zeros_like(x, dtype=wide) for x in keys[2:]]
        unlimited = replace(ctx.scoring, window=None)
        for piece in rest:
            dout_piece, q_piece, out_piece = (rows_of(x, piece.q_rows) for x in (dout, q, out))
            k_piece, v_piece = (rows_of(x, piece.k_rows) for x in _keys_of(piece, keys))
            lse_piece = rows_of(lse.t(), piece.q_rows).t()
            shares = ctx.kernel.backward(
                dout_piece, q_piece, k_piece, v_piece, out_piece, lse_piece, piece.ragged, unlimited
            )
            rows = piece.q_rows, piece.k_rows, piece.k_rows
            for total, of_piece, share in zip((dq, *_keys_of(piece, dkeys)), rows, shares, strict=True):
                _add(total, of_piece, share)
        dsinks = None if sinks is None else _sinks_gradient(dout, out, lse, sinks)
        return dq.to(q.dtype), dsinks, None, None, None, *(grad.to(q.dtype) for grad in dkeys)


def _keys_of(piece: Piece, keys: Sequence[Tensor]) -> Sequence[Tensor]:
    """The keys and values that a piece reads, of those of a call and perhaps further ones after them."""
    return keys[-2:] if piece.of_further else keys[:2]


def merged_pieces(
    q_UNH: Tensor,
    first: tuple[Tensor, Tensor],
    rest: Sequence[Piece],
    keys: Sequence[Tensor],
    kernel: VarlenKernel,
    scoring: Scoring,
    sinks_N: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Compute the other pieces, and merge them with a first one that covers every query.

    first: its output (U, N, H) and log-sum-exp (N, U); they may be overwritten.
    rest: the others. keys: and values, (J, K, H) each; perhaps further ones after them.
    Returns (U, N, H), the dtype of q, and (N, U).
    """
    out, lse = first
    merged = out.to(lse.dtype) if rest or sinks_N is not None else out
    unlimited = replace(scoring, window=None)
    for piece in rest:
        q, (k, v) = rows_of(q_UNH, piece.q_rows), (rows_of(x, piece.k_rows) for x in _keys_of(piece, keys))
        merge_piece(merged, lse, piece.q_rows, *kernel.forward(q, k, v, piece.ragged, unlimited))
    if sinks_N is not None:
        merge_sinks(merged, lse, sinks_N)
    return merged.to(q_UNH.dtype), lse


def merge_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> None:
    """Fold the sinks (N,) into `out` (U, N, H) and `lse` (N, U), in place."""
    total = torch.logaddexp(lse, sinks[:, None].to(lse.dtype))
    out.mul_(torch.exp(lse - total).t()[..., None])
    lse.copy_(total)


def _sinks_gradient(dout: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    delta_NU = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1).t()
    return -(torch.exp(sinks[:, None].to(lse.dtype) - lse) * delta_NU).sum(1).to(sinks.dtype)


def rows_of(x: Tensor, rows: Rows) -> Tensor:
    return x[rows] if isinstance(rows, slice) else x.index_select(0, rows)


def _add(total: Tensor, rows: Rows, share: Tensor) -> None:
    if isinstance(rows, slice):
        total[rows] += share
    else:
        total.index_add_(0, rows, share.to(total.dtype))  # no repeats: nothing to add up in an undefined order


def merge_piece(out: Tensor, lse: Tensor, rows: Rows, piece_out: Tensor, piece_lse: Tensor) -> None:
    """Fold a piece into `out` (U, N, H) and `lse` (N, U), in place.

    `exp(lse_2 - logaddexp(lse_1, lse_2))` is a sigmoid, and the two weights add up to 1: one pass over the rows.
    """
    lse_rows = rows_of(lse.t(), rows).t()
    weight = torch.sigmoid(piece_lse - lse_rows).t()[..., None]
    total, piece_out = torch.logaddexp(lse_rows, piece_lse), piece_out.to(out.dtype)
    if isinstance(rows, slice):
        out[rows].lerp_(piece_out, weight)
        lse[:, rows] = total
    else:
        out.index_copy_(0, rows, torch.lerp(out.index_select(0, rows), piece_out, weight))
        lse.index_copy_(1, rows, total)


def path_attention(
    q_UNH: Tensor,
    k_UKH: Tensor,
    v_UKH: Tensor,
    path_keys: Tensor,
    ragged: Ragged,
    kernel: VarlenKernel,
    scoring: Scoring,
    sinks_N: Tensor | None = None,
    later: Piece | None = None,
) -> Tensor:
    """Tree attention as one varlen call: the new rows of each sequence onto its root path, which is gathered.

    The new rows of a sequence are the last of its path, so bottom-right causal attention is exact for any trie, and a
    sliding window keeps its meaning. One entry per sequence gathers fewer keys than one per segment.

    path_keys: (T',), int64. unique rows of every path, back to back.
    ragged: new rows of each path onto the path, causal.
    sinks_N: (N,). logits without a value, one for each head, or None.
    later: one more call, on rows of q onto rows of k and v that are not on their paths, by an index tensor.
    Returns (U, N, H).
    """
    k_path, v_path = gather_rows(k_UKH, path_keys), gather_rows(v_UKH, path_keys)
    further = None if later is None else (k_UKH, v_UKH)
    return attention_in_pieces(q_UNH, k_path, v_path, onto_copies(ragged, later), kernel, scoring, sinks_N, further)


def onto_copies(ragged: Ragged, later: Piece | None) -> list[Piece]:
    """All queries onto keys that were gathered for them, and perhaps one more call onto those that were not."""
    return [Piece(slice(None), slice(None), ragged), *([replace(later, of_further=True)] if later else [])]


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
    """Ordinary causal attention of the T packed tokens, read at their first occurrences (RadixMLP, section 3.3).

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
