"""Rows by index, with a backward that adds: the routing between packed and compact space.

T packed tokens, U unique rows. `expand` is `x_T = x_U[inverse_indices]`, `compact` is `x_U = x_T[gather_indices]`;
both are `gather_rows`, whose adjoint adds up the rows that were read more than once.

A sum over k duplicates in bfloat16 loses up to k/2 of its last bits, so 16-bit gradients are added in float32. On CPU
`index_add_` adds in the order of the indices. On CUDA `index_put_` sorts first, while `index_add_` would use atomics.
So both give the same bits every time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from radixtrain.kernels.functions import wide


def gather_rows(x: Tensor, indices: Tensor) -> Tensor:
    """Return `x[indices]` along the first axis, differentiable in x; indices may repeat.

    x: (U, ...), any floating dtype.
    indices: (T,), int64 or int32, in [0, U).
    Returns (T, ...), the dtype of x.
    """
    return _GatherRows.apply(x, indices)


def sum_rows(x: Tensor, indices: Tensor, num_rows: int) -> Tensor:
    """Add rows up, the adjoint of `gather_rows`: row u of the result is the sum of the rows t with `indices[t] == u`.

    x: (T, ...), any floating dtype; 16-bit rows are added in float32 and rounded once.
    Returns (num_rows, ...), the dtype of x; rows that no index names are zero.
    """
    total = x.new_zeros(num_rows, *x.shape[1:], dtype=wide(x))  # batched if x is, as under `is_grads_batched`
    if x.device.type == "cuda":
        total.index_put_((indices,), x.to(total.dtype), accumulate=True)
    else:
        total.index_add_(0, indices, x.to(total.dtype))
    return total.to(x.dtype)


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, indices: Tensor) -> Tensor:
        ctx.save_for_backward(indices)
        ctx.num_rows = x.shape[0]
        return x.index_select(0, indices)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (indices,) = ctx.saved_tensors
        return sum_rows(grad, indices, ctx.num_rows), None  # of torch's own operators, so it has a gradient too
