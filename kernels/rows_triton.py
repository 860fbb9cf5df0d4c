"""Rows by index in Triton, for `rows.py` on CUDA, whose autograd functions differentiate them.

T packed tokens, U unique rows, D the elements of a row. `sum_rows` is a segment sum over the sorted indices: one
program for each row of the result walks that row's tokens in the order of the batch, adds them in float32 and rounds
once. So it has the bits of `rows.sum_rows` on CPU, every time, and moves each element once. 16-bit atomics would lose
bits, and would add up the tokens of a popular row one after the other.

`gather_rows` is `x_TD = x_UD[indices_T]`. `recipes/benchmarks/gpu.py` measures it beside `index_select`, which
`rows.py` uses.
"""

from __future__ import annotations

import torch
from torch import Tensor

from radixtrain.kernels.row_order import RowOrder
from radixtrain.kernels.triton_runtime import tl, triton

__all__ = ["gather_rows", "sum_rows"]

TILE = 2048  # elements of one program of a gather: 16 each for the 128 threads of four warps, two loads of 16 bytes
MAX_COLUMNS = 1024  # of one program of a sum: 8 each, one load of 16 bytes a token
UNROLL = 4  # tokens whose rows a sum loads at once; it still adds them one after the other


def gather_rows(x: Tensor, rows: RowOrder) -> Tensor:
    """`x[rows.indices]` along the first axis. Not differentiable.

    x: (U, ...), any floating dtype and strides.
    Returns (T, ...), contiguous, the dtype of x. ValueError if x has another number of rows than `rows`.
    """
    if x.shape[0] != rows.num_rows:
        raise ValueError(f"gather_rows: x must have {rows.num_rows} rows, got shape {tuple(x.shape)}")
    return _gather_rows(x, rows.indices)


def sum_rows(x: Tensor, rows: RowOrder) -> Tensor:
    """Row u of the result is the sum of the rows t of x with `rows.indices[t] == u`. Not differentiable.

    x: (T, ...), any floating dtype and strides; 16-bit rows are added in float32 and rounded once.
    Returns (U, ...), contiguous, the dtype of x; rows that no index names are zero. ValueError for another T.
    """
    if x.shape[0] != rows.indices.shape[0]:
        raise ValueError(f"sum_rows: x must have {rows.indices.shape[0]} rows, got shape {tuple(x.shape)}")
    return _sum_rows(x, rows.order, rows.starts)


@torch.library.custom_op("radixtrain::gather_rows", mutates_args=())
def _gather_rows(x: Tensor, indices: Tensor) -> Tensor:
    out = x.new_empty(indices.shape[0], *x.shape[1:])
    if out.numel():
        row_size = out.numel() // len(out)
        x_UD = x.reshape(x.shape[0], row_size)  # a view if one stride walks the trailing axes
        columns = min(triton.next_power_of_2(row_size), TILE)
        block = (TILE // columns, columns)
        grid = (triton.cdiv(len(out), block[0]), triton.cdiv(row_size, block[1]))
        with torch.cuda.device_of(x):
            _gather_kernel[grid](
                x_UD,
                indices,
                out,
                len(out),
                row_size,
                *x_UD.stride(),
                indices.stride(0),
                BLOCK_T=block[0],
                BLOCK_D=block[1],
                num_warps=4,
            )
    return out


@torch.library.custom_op("radixtrain::sum_rows", mutates_args=())
def _sum_rows(x: Tensor, order: Tensor, starts: Tensor) -> Tensor:
    out = x.new_empty(starts.shape[0] - 1, *x.shape[1:])
    if out.numel():
        row_size = out.numel() // len(out)
        x_TD = x.reshape(x.shape[0], row_size)
        columns = min(triton.next_power_of_2(row_size), MAX_COLUMNS)
        grid = (len(out), triton.cdiv(row_size, columns))
        with torch.cuda.device_of(x):
            _sum_kernel[grid](
                x_TD,
                order.contiguous(),
                starts.contiguous(),
                out,
                row_size,
                *x_TD.stride(),
                WIDE=tl.float64 if x.dtype == torch.float64 else tl.float32,
                UNROLL=UNROLL,
                BLOCK_D=columns,
                num_warps=max(1, columns // 256),
            )
    return out


@_gather_rows.register_fake
def _(x: Tensor, indices: Tensor) -> Tensor:
    return x.new_empty(indices.shape[0], *x.shape[1:])


@_sum_rows.register_fake
def _(x: Tensor, order: Tensor, starts: Tensor) -> Tensor:
    return x.new_empty(starts.shape[0] - 1, *x.shape[1:])


@triton.jit
def _gather_kernel(
    x,
    indices,
    out,
    num_out,
    row_size,
    x_row,
    x_column,
    index_step,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """A tile of BLOCK_T rows and BLOCK_D columns of the result."""
    row_T = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    column_D = (tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)).to(tl.int64)  # times any stride
    source_T = tl.load(indices + row_T.to(tl.int64) * index_step, mask=row_T < num_out, other=0).to(tl.int64)
    inside = (row_T < num_out)[:, None] & (column_D < row_size)[None, :]
    tile = tl.load(x + source_T[:, None] * x_row + column_D[None, :] * x_column, mask=inside)
    tl.store(out + row_T[:, None].to(tl.int64) * row_size + column_D[None, :], tile, mask=inside)


@triton.jit
def _sum_kernel(
    x,
    order,
    starts,
    out,
    row_size,
    x_row,
    x_column,
    WIDE: tl.constexpr,
    UNROLL: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """BLOCK_D columns of one row of the result."""
    row = tl.program_id(0).to(tl.int64)
    column_D = (tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)).to(tl.int64)  # times any stride
    inside_D = column_D < row_size
    end = tl.load(starts + row + 1)
    total_D = tl.full((BLOCK_D,), 0, WIDE)
    for first in range(tl.load(starts + row), end, UNROLL):
        for i in tl.static_range(UNROLL):
            token = tl.load(order + first + i, mask=first + i < end, other=0).to(tl.int64)
            here_D = inside_D & (first + i < end)
            total_D += tl.load(x + token * x_row + column_D * x_column, mask=here_D, other=0).to(WIDE)
    tl.store(out + row * row_size + column_D, total_D.to(out.dtype.element_ty), mask=inside_D)
