"""Rows by index, with a backward that adds: the routing between packed and compact space.

T packed tokens, U unique rows. `expand` is `x_T = x_U[inverse_indices]`, `compact` is `x_U = x_T[gather_indices]`;
both are `gather_rows`, whose adjoint adds up the rows that were read more than once.

A sum over k duplicates in bfloat16 loses up to k/2 of its last bits, so 16-bit gradients are added in float32. On CPU
`index_add_` adds in the order of the indices; on CUDA it would use atomics, and `index_put_` copies the rows to float32
and sorts the indices in every call. There torch's embedding bags add, after one sort (`Readers`): a thread for each
number of the result reads the rows in order and rounds once. So both give the same bits every time.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag


class Readers(NamedTuple):
    """Who reads each row, for sums on a device: one sort for all that is gathered with the same indices.

    places: (T,), int64. places of the indices, by the row that they name, ascending in each.
    starts: (U+1,), int64. where those of each row begin.
    """

    places: Tensor
    starts: Tensor

    @classmethod
    def of(cls, indices: Tensor, num_rows: int) -> Readers:
        """indices: (T,), int64 or int32, in [0, num_rows). It does not wait for the device."""
        rows, places = indices.sort(stable=True)
        return cls(places, torch.searchsorted(rows, torch.arange(num_rows + 1, device=rows.device, dtype=rows.dtype)))

    def sums(self, x: Tensor) -> Tensor:
        """`sum_rows` of x, (T, ...)."""
        flat = x[..., None].flatten(1)
        sums = embedding_bag(self.places, flat, self.starts, mode="sum", include_last_offset=True)
        return sums.reshape(sums.shape[0], *x.shape[1:])


def gather_rows(x: Tensor, indices: Tensor, readers: Readers | None = None) -> Tensor:
    """`x[indices]` along the first axis, differentiable in x; repeated indices are expected.

    x: (U, ...), any floating dtype.
    indices: (T,), int64 or int32, in [0, U).
    readers: of the indices, if others are gathered with them on a device.
    Returns (T, ...), the dtype of x.
    """
    return _GatherRows.apply(x, indices, readers)


def sum_rows(x: Tensor, indices: Tensor, num_rows: int, readers: Readers | None = None) -> Tensor:
    """The adjoint of `gather_rows`: row u of the result is the sum of the rows t of x with `indices[t] == u`.

    x: (T, ...), any floating dtype; 16-bit rows are added in float32 and rounded once.
    Returns (num_rows, ...), the dtype of x; rows that no index names are zero.
    """
    if x.device.type == "cuda":
        return (readers or Readers.of(indices, num_rows)).sums(x)
    wide = torch.promote_types(x.dtype, torch.float32)
    total = x.new_zeros(num_rows, *x.shape[1:], dtype=wide)  # batched if x is, as under `is_grads_batched`
    return total.index_add_(0, indices, x.to(wide)).to(x.dtype)


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, indices: Tensor, readers: Readers | None) -> Tensor:
        ctx.save_for_backward(indices)
        ctx.num_rows, ctx.readers = x.shape[0], readers
        return x.index_select(0, indices)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (indices,) = ctx.saved_tensors
        return _SumRows.apply(grad, indices, ctx.num_rows, ctx.readers), None, None


class _SumRows(torch.autograd.Function):
    """So that `gather_rows` can be differentiated twice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, indices: Tensor, num_rows: int, readers: Readers | None) -> Tensor:
        ctx.save_for_backward(indices)
        ctx.readers = readers
        return sum_rows(x, indices, num_rows, readers)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (indices,) = ctx.saved_tensors
        return _GatherRows.apply(grad, indices, ctx.readers), None, None, None
