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

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from operator import itemgetter
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
    """

    q_rows: Rows
    k_rows: Rows
    ragged: Ragged


Call = tuple[Piece, Sequence[Tensor]]  # with the keys and values, (J, K, H) each, of which it reads rows


class Route(NamedTuple):
    """How attention of U rows is computed: by pieces, perhaps on gathered copies of the rows.

    pieces: the first covers every query and every key; the others may cover any. No query sees a key in two pieces.
    kernel, scoring: of every piece. A window needs whole sequences as entries of the first, and hides no key of others.
    keys: (J,), int64. the rows of k and v that pieces have as keys, which may repeat; None for all, uncopied.
    outputs: (U,), int64. If given, the queries are copies too, of the same rows as the keys, and each row is this one.
    """

    pieces: Sequence[Piece]
    kernel: VarlenKernel
    scoring: Scoring
    keys: Tensor | None = None
    outputs: Tensor | None = None


def routed_attention(
    q_UNH: Tensor, k_UKH: Tensor, v_UKH: Tensor, route: Route, sinks_N: Tensor | None = None
) -> Tensor:
    """Compute attention of every query over the keys of all its pieces, differentiable once.

    sinks_N: (N,), any floating dtype; differentiable like the others.
    Returns (U, N, H), the dtype of q. 16-bit outputs and gradients are merged and added in float32 and rounded once.
    """
    if not torch.is_grad_enabled():
        return route_forward(q_UNH, k_UKH, v_UKH, sinks_N, route)[0]
    return _Routed.apply(q_UNH, k_UKH, v_UKH, sinks_N, route)


class _Routed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, route: Route) -> Tensor:
        out, lse = route_forward(q, k, v, sinks, route)
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        ctx.route = route
        return out

    @staticmethod
    @first_order
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        refuse_batched(dout)
        q, k, v, sinks, out, lse = ctx.saved_tensors
        return *route_backward(dout, q, k, v, sinks, out, lse, ctx.route), None


def route_forward(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, route: Route) -> tuple[Tensor, Tensor]:
    """Compute the output, (U, N, H), in the dtype of q, and the log-sum-exp, (N, U). Without a gradient."""
    first, *rest = route.pieces
    if route.keys is not None:
        k, v = k.index_select(0, route.keys), v.index_select(0, route.keys)
        if route.outputs is not None:
            q = q.index_select(0, route.keys)
    own = route.kernel.forward(q, k, v, first.ragged, route.scoring)
    calls = [*zip(rest, repeat((k, v)), strict=False)]
    out, lse = merged_pieces(q, own, calls, route.kernel, route.scoring, sinks)
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
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Compute the gradients of q, k, v and the sinks. Copies of rows are made again, and their gradients added up."""
    dsinks = None if sinks is None else _sinks_gradient(dout, out, lse, sinks)
    copies, num_rows = route.keys, len(k)
    if copies is None:
        return *_backward_in_pieces(dout, q, k, v, out, lse, route), dsinks
    k, v = k.index_select(0, copies), v.index_select(0, copies)
    if route.outputs is not None:
        dout = sum_rows(dout, route.outputs, len(copies))
        q, out, lse = q.index_select(0, copies), out.index_select(0, copies), lse.index_select(1, copies)
    dq, dk, dv = _backward_in_pieces(dout, q, k, v, out, lse, route)
    if route.outputs is not None:
        dq = sum_rows(dq, copies, num_rows)
    return dq, sum_rows(dk, copies, num_rows), sum_rows(dv, copies, num_rows), dsinks


def _backward_in_pieces(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, route: Route
) -> tuple[Tensor, Tensor, Tensor]:
    """Add up the shares of the pieces, each given the merged out and lse. Returns the gradients of q, k and v."""
    first, *rest = route.pieces
    grads = route.kernel.backward(dout, q, k, v, out, lse, first.ragged, route.scoring)
    # One more share is one sum a number, which torch adds in float32 and rounds once.
    wide = lse.dtype if len(rest) > 1 else q.dtype
    totals = [grad.to(wide) for grad in grads]
    unlimited = route.scoring.without_window
    for piece in rest:
        dout_piece, q_piece, out_piece, lse_piece = rows_of(piece.q_rows, dout, q, out, lse.t())
        k_piece, v_piece = rows_of(piece.k_rows, k, v)
        of_piece = dout_piece, q_piece, k_piece, v_piece, out_piece, lse_piece.t()
        shares = route.kernel.backward(*of_piece, piece.ragged, unlimited)
        for total, rows, share in zip(totals, (piece.q_rows, piece.k_rows, piece.k_rows), shares, strict=True):
            _add(total, rows, share)
    dq, dk, dv = totals
    return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype)


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
    for piece, keys in rest:
        (q,), (k, v) = rows_of(piece.q_rows, q_UNH), rows_of(piece.k_rows, *keys)
        merge_piece(merged, lse, piece.q_rows, *kernel.forward(q, k, v, piece.ragged, scoring.without_window))
    if sinks_N is not None:
        fused(fold_sinks, merged, lse.t(), sinks_N)
    return merged.to(q_UNH.dtype), lse


def fold_sinks(out_UNH: Tensor, lse_UN: Tensor, sinks_N: Tensor) -> None:
    """Fold the sinks into outputs and log-sum-exps, in place."""
    sinks_N = sinks_N.to(lse_UN.dtype)
    weight_UN1 = _once(torch.sigmoid(lse_UN - sinks_N))[..., None]
    lse_UN.copy_(torch.logaddexp(lse_UN, sinks_N))
    out_UNH.copy_(out_UNH.to(lse_UN.dtype).mul_(weight_UN1))


def _sinks_gradient(dout: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    delta_NU = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1).t()
    return -(torch.exp(sinks[:, None].to(lse.dtype) - lse) * delta_NU).sum(1).to(sinks.dtype)


def rows_of(rows: Rows, *tensors: Tensor) -> Iterator[Tensor]:
    """Yield these rows of each tensor."""
    take: Callable[[Tensor], Tensor]
    take = itemgetter(rows) if isinstance(rows, slice) else partial(torch.index_select, dim=0, index=rows)
    return map(take, tensors)


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
