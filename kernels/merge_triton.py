"""Merging pieces of attention by log-sum-exp in Triton: one pass over the rows that a piece has.

U rows, Q of them in a piece, N query heads, H head dim. For each row with out and lse from two disjoint sets of keys:
`total = logaddexp(lse, piece_lse)` and `out = out exp(lse - total) + piece_out exp(piece_lse - total)`. A side that saw
no key has a log-sum-exp of -inf and counts for nothing, whatever its output; if neither saw one, the result is 0 and
-inf.

It is `pieces._merge` with gather and scatter in one kernel, for a forward that has its own backward.
Source: Hydragen (section 3.1); FlashInfer's "merge of attention states".
"""

from __future__ import annotations

import torch
from torch import Tensor

from radixtrain.kernels.triton_runtime import tl, triton

__all__ = ["merge_rows_"]

Rows = slice | Tensor
BLOCK_Q = 16  # rows of one program: 16 x 128 elements of float32 for four warps


def merge_rows_(out: Tensor, lse: Tensor, rows: Rows, piece_out: Tensor, piece_lse: Tensor) -> None:
    """Fold a piece into `out` and `lse`, in place. RuntimeError if autograd would have to record it.

    out: (U, N, H), float32 (float64 for float64 pieces). any strides, as for the other tensors.
    lse: (N, U), the dtype of out.
    rows: a slice without a step, or (Q,), int64 or int32, no row twice.
    piece_out: (Q, N, H), any floating dtype.
    piece_lse: (N, Q), the dtype of lse.
    ValueError if the shapes do not fit.
    """
    if torch.is_grad_enabled() and any(x.requires_grad for x in (out, lse, piece_out, piece_lse)):
        raise RuntimeError("merge_rows_ works in place and is not differentiable: call it under no_grad")
    start, indices = _start_and_indices(out, lse, rows, piece_out, piece_lse)
    _merge_rows_(out, lse, piece_out, piece_lse, indices, start)


def _start_and_indices(
    out: Tensor, lse: Tensor, rows: Rows, piece_out: Tensor, piece_lse: Tensor
) -> tuple[int, Tensor | None]:
    """The first row of a slice and None, or 0 and the indices."""
    start, stop, step = rows.indices(out.shape[0]) if isinstance(rows, slice) else (0, rows.shape[0], 1)
    num_heads, head_dim = out.shape[1:]
    shapes = {
        "lse": (lse, (num_heads, out.shape[0])),
        "piece_out": (piece_out, (max(stop - start, 0), num_heads, head_dim)),
        "piece_lse": (piece_lse, (num_heads, max(stop - start, 0))),
    }
    for name, (given, expected) in shapes.items():
        if given.shape != expected:
            raise ValueError(f"merge_rows_: {name} must have shape {expected}, got {tuple(given.shape)}")
    if step != 1:
        raise ValueError(f"merge_rows_: a slice of rows must not have a step, got {rows}")
    return start, None if isinstance(rows, slice) else rows


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
