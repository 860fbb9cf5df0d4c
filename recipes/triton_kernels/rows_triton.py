"""Rows in Triton: a piece of attention merged into its rows, and rows summed by index. One pass over memory each.

U rows, N query heads, H head dim; Q rows of a piece; T rows that are summed, of D elements.

`merge_rows_` is `merge_attention.merge_piece` with gather and scatter in one kernel. A side that saw no key has a
log-sum-exp of -inf and counts for nothing, whatever its output; if neither saw one, the result is 0 and -inf.
Source: Hydragen (section 3.1); FlashInfer's "merge of attention states".

`sum_rows` is a segment sum over the sorted indices: one program for each row of the result walks that row's terms in
the order of the batch, adds them in float32 and rounds once. So it has the bits of `rows.sum_rows` on CPU, every time.
16-bit atomics would lose bits, and would add up the terms of a popular row one after the other.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton import language as tl

from radixtrain.kernels.merge_attention import Rows

__all__ = ["merge_rows_", "sum_rows"]

BLOCK_Q = 16  # rows of one program of a merge: 16 x 128 elements of float32 for four warps
MAX_COLUMNS = 1024  # of one program of a sum: 8 each, one load of 16 bytes a row
UNROLL = 4  # rows that a sum loads at once; it still adds them one after the other


def merge_rows_(out: Tensor, lse: Tensor, rows: Rows, piece_out: Tensor, piece_lse: Tensor) -> None:
    """Fold a piece into `out` and `lse`, in place. Any strides. Not differentiable.

    out: (U, N, H), float32 (float64 for float64 pieces).
    lse: (N, U), the dtype of out.
    rows: a slice without a step, or (Q,), int64 or int32, no row twice.
    piece_out: (Q, N, H), any floating dtype.
    piece_lse: (N, Q), the dtype of lse.
    """
    if isinstance(rows, slice):
        _merge_rows_(out, lse, piece_out, piece_lse, None, rows.indices(out.shape[0])[0])
    else:
        _merge_rows_(out, lse, piece_out, piece_lse, rows, 0)


@torch.library.custom_op("radixtrain::merge_rows_", mutates_args=("out", "lse"))
def _merge_rows_(
    out: Tensor, lse: Tensor, piece_out: Tensor, piece_lse: Tensor, indices: Tensor | None, start: int
) -> None:
    num_queries, num_heads, head_dim = piece_out.shape
    if not piece_out.numel():
        return
    with torch.cuda.device_of(out):
        _merge_kernel[(triton.cdiv(num_queries, BLOCK_Q), num_heads)](
            out, lse, piece_out, piece_lse, indices, start, num_queries, head_dim,
            *out.stride(), *lse.stride(), *piece_out.stride(), *piece_lse.stride(),
            1 if indices is None else indices.stride(0),
            BLOCK_Q=BLOCK_Q, BLOCK_H=triton.next_power_of_2(head_dim), num_warps=4,
        )  # fmt: skip


@_merge_rows_.register_fake
def _(out: Tensor, lse: Tensor, piece_out: Tensor, piece_lse: Tensor, indices: Tensor | None, start: int) -> None:
    return None


def sum_rows(x: Tensor, indices: Tensor, num_rows: int) -> Tensor:
    """Row u of the result is the sum of the rows t of x with `indices[t] == u`. Not differentiable.

    x: (T, ...), any floating dtype and strides; 16-bit rows are added in float32 and rounded once.
    indices: (T,), int64 or int32, in [0, num_rows).
    Returns (num_rows, ...), contiguous, the dtype of x; rows that no index names are zero.
    """
    ordered, order = indices.sort(stable=True)
    rows = torch.arange(num_rows + 1, dtype=indices.dtype, device=indices.device)
    return _sum_rows(x, order, torch.searchsorted(ordered, rows))


@torch.library.custom_op("radixtrain::sum_rows", mutates_args=())
def _sum_rows(x: Tensor, order: Tensor, starts: Tensor) -> Tensor:
    """order: (T,). the rows of x that are summed to row 0, to row 1, ... starts: where each begins in it, and T."""
    out = x.new_empty(starts.shape[0] - 1, *x.shape[1:])
    if out.numel():
        row_size = out.numel() // len(out)
        x_TD = x.reshape(x.shape[0], row_size)
        columns = min(triton.next_power_of_2(row_size), MAX_COLUMNS)
        with torch.cuda.device_of(x):
            _sum_kernel[(len(out), triton.cdiv(row_size, columns))](
                x_TD, order, starts, out, row_size, *x_TD.stride(),
                WIDE=tl.float64 if x.dtype == torch.float64 else tl.float32,
                UNROLL=UNROLL, BLOCK_D=columns, num_warps=max(1, columns // 256),
            )  # fmt: skip
    return out


@_sum_rows.register_fake
def _(x: Tensor, order: Tensor, starts: Tensor) -> Tensor:
    return x.new_empty(starts.shape[0] - 1, *x.shape[1:])


@triton.jit
def _merge_kernel(
    out, lse, piece_out, piece_lse, indices, start, num_queries, head_dim,
    out_row, out_head, out_dim, lse_head, lse_row,
    piece_row, piece_head, piece_dim, piece_lse_head, piece_lse_row, index_step,
    BLOCK_Q: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """BLOCK_Q rows of one head. Without indices the rows are those from `start`."""
    query_Q = tl.program_id(0).to(tl.int64) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    head = tl.program_id(1).to(tl.int64)
    dim_H = tl.arange(0, BLOCK_H).to(tl.int64)
    inside_Q = query_Q < num_queries
    inside_QH = inside_Q[:, None] & (dim_H < head_dim)[None, :]
    row_Q = start + query_Q
    if indices is not None:
        row_Q = tl.load(indices + query_Q * index_step, mask=inside_Q, other=0).to(tl.int64)

    lse_at = lse + head * lse_head + row_Q * lse_row
    old_Q = tl.load(lse_at, mask=inside_Q, other=0)
    new_Q = tl.load(piece_lse + head * piece_lse_head + query_Q * piece_lse_row, mask=inside_Q, other=0)
    top_Q = tl.maximum(old_Q, new_Q)
    top_Q = tl.where(top_Q == float("-inf"), 0, top_Q)  # -inf - -inf would be NaN
    old_Q, new_Q = tl.exp(old_Q - top_Q), tl.exp(new_Q - top_Q)
    sum_Q = old_Q + new_Q
    empty_Q = sum_Q == 0
    sum_Q = tl.where(empty_Q, 1, sum_Q)
    tl.store(lse_at, tl.where(empty_Q, float("-inf"), top_Q + tl.log(sum_Q)), mask=inside_Q)

    out_at = out + row_Q[:, None] * out_row + head * out_head + dim_H[None, :] * out_dim
    piece_at = piece_out + query_Q[:, None] * piece_row + head * piece_head + dim_H[None, :] * piece_dim
    old_QH = tl.load(out_at, mask=inside_QH & (old_Q > 0)[:, None], other=0)
    new_QH = tl.load(piece_at, mask=inside_QH & (new_Q > 0)[:, None], other=0).to(old_QH.dtype)
    merged_QH = old_QH * (old_Q / sum_Q)[:, None] + new_QH * (new_Q / sum_Q)[:, None]
    tl.store(out_at, merged_QH, mask=inside_QH)


@triton.jit
def _sum_kernel(
    x, order, starts, out, row_size, x_row, x_column,
    WIDE: tl.constexpr, UNROLL: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """BLOCK_D columns of one row of the result."""
    row = tl.program_id(0).to(tl.int64)
    column_D = (tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)).to(tl.int64)  # times any stride
    inside_D = column_D < row_size
    end = tl.load(starts + row + 1)
    total_D = tl.full((BLOCK_D,), 0, WIDE)
    for first in range(tl.load(starts + row), end, UNROLL):
        for i in tl.static_range(UNROLL):
            token = tl.load(order + first + i, mask=first + i < end, other=0).to(tl.int64)
            inside_term_D = inside_D & (first + i < end)
            total_D += tl.load(x + token * x_row + column_D * x_column, mask=inside_term_D, other=0).to(WIDE)
    tl.store(out + row * row_size + column_D, total_D.to(out.dtype.element_ty), mask=inside_D)
