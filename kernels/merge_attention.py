"""Attention over keys in pieces: the forward merges them by log-sum-exp, the backward is one stock call per piece.

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
from typing import Any, NamedTuple

import torch
from torch import Tensor

from radixtrain.kernels.functions import first_order, fused, refuse_batched
from radixtrain.kernels.rows import sum_rows
from radixtrain.kernels.varlen_args import Ragged, Scoring, VarlenKernel

Rows = slice | Tensor


@dataclass(frozen=True, eq=False)
class Piece:
    """One varlen call on some rows.

    q_rows, k_rows: which rows of q, and of k and v. A slice is free; an index tensor (int64, no repeats) is gathered.
    in_window: no window hides any of its keys.
    of_further: whether `k_rows` index the further keys and values of the call, not its own.
    """

    q_rows: Rows
    k_rows: Rows
    ragged: Ragged
    in_window: bool = False
    of_further: bool = False


Call = tuple[Piece, Sequence[Tensor]]  # with the keys and values, (J, K, H) each, of which it reads rows


class Route(NamedTuple):
    """How attention of U rows is computed: by pieces, perhaps on gathered copies of the rows.

    pieces: the first covers every query and every key; the others may cover any. No query sees a key in two pieces.
    keys: (J,), int64. the rows of k and v that pieces have as keys, which may repeat; None for all, uncopied. With
        copies, pieces `of_further` index the rows themselves.
    queries: (T,), int64. the same of q. outputs: (U,), int64. which of these queries each row is.
    """

    pieces: Sequence[Piece]
    keys: Tensor | None = None
    queries: Tensor | None = None
    outputs: Tensor | None = None


def routed_attention(
    q_UNH: Tensor,
    k_UKH: Tensor,
    v_UKH: Tensor,
    route: Route,
    kernel: VarlenKernel,
    scoring: Scoring,
    sinks_N: Tensor | None = None,
) -> Tensor:
    """Compute attention of every query over the keys of all its pieces, differentiable once.

    scoring: of every piece; a window needs whole sequences as entries of the first, and the others `in_window`.
    sinks_N: (N,), any floating dtype; differentiable like the others.
    Returns (U, N, H), the dtype of q. 16-bit outputs and gradients are merged and added in float32 and rounded once.
    """
    return _Routed.apply(q_UNH, k_UKH, v_UKH, sinks_N, route, kernel, scoring)


class _Routed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *how: Any) -> Tensor:
        out, lse = route_forward(q, k, v, sinks, *how)
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        ctx.how = how
        return out

    @staticmethod
    @first_order
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        refuse_batched(dout)
        return *route_backward(dout, *ctx.saved_tensors, *ctx.how), None, None, None


def route_forward(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, route: Route, kernel: VarlenKernel, scoring: Scoring
) -> tuple[Tensor, Tensor]:
    """Compute the output, (U, N, H), and the log-sum-exp, (N, U)."""
    queries = q if route.queries is None else q.index_select(0, route.queries)
    out, lse = attention_in_pieces(queries, _keys(route, k, v), route.pieces, kernel, scoring, sinks)
    if route.outputs is None:
        return out, lse
    return out.index_select(0, route.outputs), lse.index_select(1, route.outputs)


def route_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    out: Tensor,
    lse: Tensor,
    route: Route,
    kernel: VarlenKernel,
    scoring: Scoring,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Compute the gradients of q, k, v and the sinks. Copies of rows are made again, and their gradients added up."""
    dsinks = None if sinks is None else _sinks_gradient(dout, out, lse, sinks)
    queries, keys = q, _keys(route, k, v)
    if route.queries is not None:
        assert route.outputs is not None
        queries, out = (x.index_select(0, route.queries) for x in (q, out))
        lse = lse.index_select(1, route.queries)
        dout = sum_rows(dout, route.outputs, len(route.queries))
    dq, dkeys = _backward_in_pieces(dout, queries, keys, out, lse, route.pieces, kernel, scoring)
    if route.queries is not None:
        dq = sum_rows(dq, route.queries, len(q))
    if route.keys is None:
        dk, dv = dkeys
    else:
        dk, dv = (sum_rows(grad, route.keys, len(k)) for grad in dkeys[:2])
        if len(dkeys) > 2:
            dk, dv = dk + dkeys[2], dv + dkeys[3]
    return dq, dk, dv, dsinks


def _keys(route: Route, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    if route.keys is None:
        return k, v
    copies = k.index_select(0, route.keys), v.index_select(0, route.keys)
    return (*copies, k, v) if any(piece.of_further for piece in route.pieces) else copies


def attention_in_pieces(
    q_UNH: Tensor,
    keys: Sequence[Tensor],
    pieces: Sequence[Piece],
    kernel: VarlenKernel,
    scoring: Scoring,
    sinks_N: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Compute attention over pieces, without a gradient. keys: and values, (J, K, H) each; perhaps further ones.

    Returns (U, N, H), the dtype of q, and the log-sum-exp (N, U).
    """
    assert scoring.window is None or all(piece.in_window for piece in pieces[1:]), (
        "a window needs the distance from a query to its keys, which a piece does not know"
    )
    first, *rest = pieces
    own = kernel.forward(q_UNH, keys[0], keys[1], first.ragged, scoring)
    return merged_pieces(q_UNH, own, [(piece, _keys_of(piece, keys)) for piece in rest], kernel, scoring, sinks_N)


def _backward_in_pieces(
    dout: Tensor,
    q: Tensor,
    keys: Sequence[Tensor],
    out: Tensor,
    lse: Tensor,
    pieces: Sequence[Piece],
    kernel: VarlenKernel,
    scoring: Scoring,
) -> tuple[Tensor, list[Tensor]]:
    """Add up the shares of the pieces, each given the merged out and lse. Returns the gradients of q and of `keys`."""
    first, *rest = pieces
    grads = kernel.backward(dout, q, keys[0], keys[1], out, lse, first.ragged, scoring)
    # One more share is one sum a number, which torch adds in float32 and rounds once.
    wide = lse.dtype if len(rest) > 1 else q.dtype
    dq, dkeys = grads[0].to(wide), [grad.to(wide) for grad in grads[1:]]
    dkeys += [torch.zeros_like(x, dtype=wide) for x in keys[2:]]
    unlimited = replace(scoring, window=None)
    for piece in rest:
        dout_piece, q_piece, out_piece = (rows_of(x, piece.q_rows) for x in (dout, q, out))
        k_piece, v_piece = (rows_of(x, piece.k_rows) for x in _keys_of(piece, keys))
        lse_piece = rows_of(lse.t(), piece.q_rows).t()
        shares = kernel.backward(dout_piece, q_piece, k_piece, v_piece, out_piece, lse_piece, piece.ragged, unlimited)
        rows = piece.q_rows, piece.k_rows, piece.k_rows
        for total, of_piece, share in zip((dq, *_keys_of(piece, dkeys)), rows, shares, strict=True):
            _add(total, of_piece, share)
    return dq.to(q.dtype), [grad.to(q.dtype) for grad in dkeys]


def _keys_of(piece: Piece, keys: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the keys and values that a piece reads: those of the call, or the further ones after them."""
    return keys[-2:] if piece.of_further else keys[:2]


def merged_pieces(
    q_UNH: Tensor,
    first: tuple[Tensor, Tensor],
    rest: Sequence[Call],
    kernel: VarlenKernel,
    scoring: Scoring,
    sinks_N: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Compute the other pieces, and merge them with the first, which covers every query.

    first: its output (U, N, H) and log-sum-exp (N, U); they may be overwritten.
    rest: the others.
    Returns (U, N, H), the dtype of q, and (N, U).
    """
    out, lse = first
    # One merge computes in float32 and rounds once, whatever `out` is. Between several, nothing is rounded.
    merged = out.to(lse.dtype) if len(rest) + (sinks_N is not None) > 1 else out
    unlimited = replace(scoring, window=None)
    for piece, keys in rest:
        q, (k, v) = rows_of(q_UNH, piece.q_rows), (rows_of(x, piece.k_rows) for x in keys)
        merge_piece(merged, lse, piece.q_rows, *kernel.forward(q, k, v, piece.ragged, unlimited))
    if sinks_N is not None:
        merge_sinks(merged, lse, sinks_N)
    return merged.to(q_UNH.dtype), lse


def merge_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> None:
    """Fold the sinks (N,) into `out` (U, N, H) and `lse` (N, U), in place."""
    fused(_fold_sinks, out, lse.t(), sinks)


def _fold_sinks(out_UNH: Tensor, lse_UN: Tensor, sinks_N: Tensor) -> None:
    sinks_N = sinks_N.to(lse_UN.dtype)
    weight_UN1 = _once(torch.sigmoid(lse_UN - sinks_N))[..., None]
    lse_UN.copy_(torch.logaddexp(lse_UN, sinks_N))
    out_UNH.copy_(out_UNH.to(lse_UN.dtype).mul_(weight_UN1))


def _sinks_gradient(dout: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    delta_NU = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1).t()
    return -(torch.exp(sinks[:, None].to(lse.dtype) - lse) * delta_NU).sum(1).to(sinks.dtype)


def rows_of(x: Tensor, rows: Rows) -> Tensor:
    return x[rows] if isinstance(rows, slice) else x.index_select(0, rows)


def _add(total: Tensor, rows: Rows, share: Tensor) -> None:
    if isinstance(rows, slice):
        total[rows] += share
    else:
        total.index_add_(0, rows, share.to(total.dtype))  # rows do not repeat, so the order of additions is defined


def merge_piece(out: Tensor, lse: Tensor, rows: Rows, piece_out: Tensor, piece_lse: Tensor) -> None:
    """Fold a piece into `out` (U, N, H) and `lse` (N, U), in place.

    On CUDA one kernel reads two 16-bit numbers and writes one: 6 bytes, 26 when `out` was copied to float32 and back.
    """
    if isinstance(rows, slice):
        fused(_fold, out[rows], lse.t()[rows], piece_out, piece_lse.t())
    else:
        fused(_fold_rows, out, lse.t(), rows, piece_out, piece_lse.t())


def _fold(out_TNH: Tensor, lse_TN: Tensor, piece_out_TNH: Tensor, piece_lse_TN: Tensor) -> None:
    """Fold a piece into some rows, in place, in the dtype of the log-sum-exps.

    `exp(lse_2 - logaddexp(lse_1, lse_2))` is a sigmoid, and the two weights add up to 1: one pass over the rows.
    """
    weight_TN1 = _once(torch.sigmoid(piece_lse_TN - lse_TN))[..., None]
    lse_TN.copy_(torch.logaddexp(lse_TN, piece_lse_TN))
    out_TNH.copy_(out_TNH.to(lse_TN.dtype).lerp_(piece_out_TNH.to(lse_TN.dtype), weight_TN1))


def _once(x: Tensor) -> Tensor:
    """Have a compiler store x. Computed again for every number it is multiplied with, it would decide their order.

    The log-sum-exps lie the other way round than the outputs, which would then be read and written once more.
    """
    return x.as_strided(x.shape, x.stride())


def _fold_rows(out_UNH: Tensor, lse_UN: Tensor, rows_T: Tensor, piece_out_TNH: Tensor, piece_lse_TN: Tensor) -> None:
    """Fold a piece into the rows of these indices, which do not repeat."""
    out_TNH, lse_TN = out_UNH.index_select(0, rows_T), lse_UN.index_select(0, rows_T)
    _fold(out_TNH, lse_TN, piece_out_TNH, piece_lse_TN)
    out_UNH.index_copy_(0, rows_T, out_TNH)
    lse_UN.index_copy_(0, rows_T, lse_TN)


def onto_copies(own: Piece, later: Piece | None) -> list[Piece]:
    """List a call of all queries onto keys gathered for them, and perhaps one more onto keys that were not."""
    return [own, *([replace(later, of_further=True)] if later else [])]
