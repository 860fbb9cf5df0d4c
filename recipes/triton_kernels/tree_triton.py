"""Tree attention in one Triton kernel per direction, for deep trees: `cascade` would make a call for each level.

U rows in depth-first pre-order, N query heads, K key/value heads, N / K query heads to a group, H head dim. Query q
sees key k iff `k <= q < subtree_ends[k]`. The tiles that hold anything, and which of them need no mask, were listed on
the host (`tree_tiles.py`); no other tile is touched, and nothing waits for the device. The kernels of each direction
walk their full tiles without a mask and then the others; Q and J are the queries and keys of a tile.

- Forward: a program holds a block of queries of one head, walks its blocks of keys, and rescales as the maximum grows.
- Backward: `p = exp(s - lse)`, `ds = p (dout v^T - delta)`, `delta = rowsum(dout * out)`. One kernel walks keys
  for dq, another queries, of all heads of the group, for dk and dv. Each result is added up by one program in float32
  in a fixed order and rounded once: no atomics, the same bits every time.

Products take operands in the dtype of q (float32 as it is, not TF32) and add in float32. Weights and score gradients
are rounded to that dtype in between, as in flash-attention. If a row holds a NaN, rows that share a tile with it get
one, whether they see it or not.
Source: FlashAttention-2 (algorithms 1 and 2); the lists of tiles are FlexAttention's idea.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor
from triton import language as tl

from triton_kernels.tree_tiles import TreeTiles

__all__ = ["attention_on_tiles"]

MIN_BLOCK = 16  # rows and columns of the smallest product of matrices
LOG2_E = tl.constexpr(1.4426950408889634)  # the hardware has a power of two: exp(x) = 2^(x log2 e)
# Queries that dk and dv walk at once, at most. With 64 their kernel, which holds two results, spills registers in
# bfloat16 and head dim 128: 128 bytes a thread on sm_90, 180 on sm_120; with 32 none and 72 (ptxas of Triton 3.7.1).
DKDV_QUERIES = 32


def attention_on_tiles(q: Tensor, k: Tensor, v: Tensor, tiles: TreeTiles, scale: float) -> Tensor:
    """Attention of every row over itself and its ancestors, differentiable once.

    q: (U, N, H), bfloat16, float16 or float32, H up to 256. any strides, as for k and v.
    k, v: (U, K, H), the dtype of q, N a multiple of K.
    tiles: on the device of q; `held` and `walked` powers of two, at least 16.
    scale: factor on the products of queries and keys.
    Returns (U, N, H), contiguous, the dtype of q.
    """
    assert tiles.num_rows == len(q), "the lists are of another batch"
    return _forward(q, k, v, *_lists(tiles), tiles.held, tiles.walked, scale)[0]


def _lists(tiles: TreeTiles) -> tuple[Tensor, ...]:
    lists = tiles.subtree_ends, tiles.key_starts, tiles.num_full, tiles.key_blocks, tiles.query_runs
    return tuple(x.contiguous() for x in lists)


def _options(q: Tensor, held: int) -> dict[str, Any]:
    """Constants for the compiler beside the tile sizes. Warps and stages follow ptxas' count of registers for sm_90."""
    head_dim = q.shape[2]
    block_h = max(MIN_BLOCK, triton.next_power_of_2(head_dim))
    return {
        "HEAD_DIM": head_dim,
        "BLOCK_H": block_h,
        "PRECISION": "ieee" if q.dtype == torch.float32 else "tf32",
        "num_warps": 8 if held * block_h * q.itemsize >= 128 * 64 * 2 else 4,
        "num_stages": 2,
    }


@torch.library.custom_op("radixtrain::tree_attention", mutates_args=())
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    subtree_ends: Tensor,
    key_starts: Tensor,
    num_full: Tensor,
    key_blocks: Tensor,
    query_runs: Tensor,
    held: int,
    walked: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    num_rows, num_heads, _ = q.shape
    out, lse = q.new_empty(q.shape), q.new_empty(num_heads, num_rows, dtype=torch.float32)
    if out.numel():
        with torch.cuda.device_of(q):
            _forward_kernel[(num_full.shape[0], num_heads)](
                q, k, v, out, lse, subtree_ends, key_starts, num_full, key_blocks,
                num_rows, num_heads // k.shape[1], scale,
                *q.stride(), *k.stride(), *v.stride(), *out.stride()[:2],
                BLOCK_Q=held, BLOCK_K=walked, **_options(q, held),
            )  # fmt: skip
    return out, lse


@torch.library.custom_op("radixtrain::tree_attention_backward", mutates_args=())
def _backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    subtree_ends: Tensor,
    key_starts: Tensor,
    num_full: Tensor,
    key_blocks: Tensor,
    query_runs: Tensor,
    held: int,
    walked: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    num_rows, num_heads, _ = q.shape
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    if not q.numel():
        return dq, dk, dv
    options, delta = _options(q, held), (dout.float() * out.float()).sum(-1).t().contiguous()
    num_groups, heads_in_group = k.shape[1], num_heads // k.shape[1]
    strides = (*q.stride(), *k.stride(), *v.stride(), *dout.stride())
    with torch.cuda.device_of(q):
        _dq_kernel[(num_full.shape[0], num_heads)](
            q, k, v, dout, lse, delta, dq, subtree_ends, key_starts, num_full, key_blocks,
            num_rows, heads_in_group, scale, *strides, *dq.stride()[:2],
            BLOCK_Q=held, BLOCK_K=walked, **options,
        )  # fmt: skip
        _dkdv_kernel[(query_runs.shape[0], num_groups)](
            q, k, v, dout, lse, delta, dk, dv, subtree_ends, query_runs,
            num_rows, heads_in_group, scale, *strides, *dk.stride()[:2],
            BLOCK_Q=min(walked, DKDV_QUERIES), BLOCK_K=held, PARTS=max(1, walked // DKDV_QUERIES), **options,
        )  # fmt: skip
    return dq, dk, dv


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)


@_backward.register_fake
def _(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, *lists = inputs[:8]
    ctx.save_for_backward(q, k, v, *output, *lists)
    ctx.options = inputs[8:]


def _gradients(ctx: Any, dout: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    """The log-sum-exp is for the backward pass only, and has no gradient."""
    return *_backward(dout, *ctx.saved_tensors, *ctx.options), *[None] * 8


_forward.register_autograd(_gradients, setup_context=_keep)


@triton.jit
def _load_rows(
    x, row_R, row_stride, dim_stride, num_rows, HEAD_DIM: tl.constexpr, BLOCK_H: tl.constexpr, INSIDE: tl.constexpr
):
    """(R, H) of x; 0 past the last row, unless all are INSIDE, and past the last dim."""
    dim_H = tl.arange(0, BLOCK_H).to(tl.int64)
    at = x + row_R.to(tl.int64)[:, None] * row_stride + dim_H[None, :] * dim_stride
    if INSIDE and HEAD_DIM == BLOCK_H:
        tile = tl.load(at)
    elif INSIDE:
        tile = tl.load(at, mask=(dim_H < HEAD_DIM)[None, :], other=0)
    else:
        tile = tl.load(at, mask=(row_R < num_rows)[:, None] & (dim_H < HEAD_DIM)[None, :], other=0)
    return tile


@triton.jit
def _store_rows(x, tile, row_R, row_stride, num_rows, HEAD_DIM: tl.constexpr, BLOCK_H: tl.constexpr):
    dim_H = tl.arange(0, BLOCK_H)
    at = x + row_R.to(tl.int64)[:, None] * row_stride + dim_H[None, :]
    inside = (row_R < num_rows)[:, None] & (dim_H < HEAD_DIM)[None, :]
    tl.store(at, tile.to(x.dtype.element_ty), mask=inside)


@triton.jit
def _forward_kernel(
    q, k, v, out, lse, subtree_ends, key_starts, num_full, key_blocks, num_rows, heads_in_group, scale,
    q_row, q_head, q_dim, k_row, k_head, k_dim, v_row, v_head, v_dim, out_row, out_head,
    HEAD_DIM: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_H: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """A block of queries of one head: first its full tiles, then the others."""
    block, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    query_Q = block * BLOCK_Q + tl.arange(0, BLOCK_Q)
    q_QH = _load_rows(q + head * q_head, query_Q, q_row, q_dim, num_rows, HEAD_DIM, BLOCK_H, False)
    k += head // heads_in_group * k_head
    v += head // heads_in_group * v_head
    first, last = tl.load(key_starts + block), tl.load(key_starts + block + 1)
    middle = first + tl.load(num_full + block)
    top_Q = tl.full((BLOCK_Q,), float("-inf"), tl.float32)
    sum_Q = tl.full((BLOCK_Q,), 0, tl.float32)
    out_QH = tl.full((BLOCK_Q, BLOCK_H), 0, tl.float32)
    out_QH, top_Q, sum_Q = _forward_tiles(
        out_QH, top_Q, sum_Q, q_QH, query_Q, k, v, subtree_ends, key_blocks, first, middle, num_rows, scale,
        k_row, k_dim, v_row, v_dim, HEAD_DIM, BLOCK_K, BLOCK_H, PRECISION, True,
    )  # fmt: skip
    out_QH, top_Q, sum_Q = _forward_tiles(
        out_QH, top_Q, sum_Q, q_QH, query_Q, k, v, subtree_ends, key_blocks, middle, last, num_rows, scale,
        k_row, k_dim, v_row, v_dim, HEAD_DIM, BLOCK_K, BLOCK_H, PRECISION, False,
    )  # fmt: skip
    sum_Q = tl.where(sum_Q == 0, 1, sum_Q)  # rows past the last, which are not stored
    _store_rows(out + head * out_head, out_QH / sum_Q[:, None], query_Q, out_row, num_rows, HEAD_DIM, BLOCK_H)
    tl.store(lse + head * num_rows + query_Q, (top_Q + tl.log2(sum_Q)) / LOG2_E, mask=query_Q < num_rows)


@triton.jit
def _forward_tiles(
    out_QH, top_Q, sum_Q, q_QH, query_Q, k, v, subtree_ends, key_blocks, first, last, num_rows, scale,
    k_row, k_dim, v_row, v_dim,
    HEAD_DIM: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_H: tl.constexpr, PRECISION: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """Output, maximum and sum after the tiles [first, last) of the list."""
    for index in range(first, last):
        key_J = tl.load(key_blocks + index) * BLOCK_K + tl.arange(0, BLOCK_K)
        k_JH = _load_rows(k, key_J, k_row, k_dim, num_rows, HEAD_DIM, BLOCK_H, FULL)
        scores_QJ = tl.dot(q_QH, tl.trans(k_JH), input_precision=PRECISION) * (scale * LOG2_E)
        if not FULL:
            end_J = tl.load(subtree_ends + key_J, mask=key_J < num_rows, other=0)
            seen_QJ = (key_J[None, :] <= query_Q[:, None]) & (query_Q[:, None] < end_J[None, :])
            scores_QJ = tl.where(seen_QJ, scores_QJ, float("-inf"))
        before_Q = top_Q
        top_Q = tl.maximum(before_Q, tl.max(scores_QJ, 1))
        base_Q = top_Q
        if not FULL:
            base_Q = tl.where(top_Q == float("-inf"), 0, top_Q)  # nothing seen yet: -inf - -inf would be NaN
        shrink_Q = tl.exp2(before_Q - base_Q)
        p_QJ = tl.exp2(scores_QJ - base_Q[:, None])
        v_JH = _load_rows(v, key_J, v_row, v_dim, num_rows, HEAD_DIM, BLOCK_H, FULL)
        sum_Q = sum_Q * shrink_Q + tl.sum(p_QJ, 1)
        out_QH = tl.dot(p_QJ.to(v_JH.dtype), v_JH, out_QH * shrink_Q[:, None], input_precision=PRECISION)
    return out_QH, top_Q, sum_Q


@triton.jit
def _dq_kernel(
    q, k, v, dout, lse, delta, dq, subtree_ends, key_starts, num_full, key_blocks,
    num_rows, heads_in_group, scale,
    q_row, q_head, q_dim, k_row, k_head, k_dim, v_row, v_head, v_dim, dout_row, dout_head, dout_dim, dq_row, dq_head,
    HEAD_DIM: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_H: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """A block of queries of one head."""
    block, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    query_Q = block * BLOCK_Q + tl.arange(0, BLOCK_Q)
    q_QH = _load_rows(q + head * q_head, query_Q, q_row, q_dim, num_rows, HEAD_DIM, BLOCK_H, False)
    dout_QH = _load_rows(dout + head * dout_head, query_Q, dout_row, dout_dim, num_rows, HEAD_DIM, BLOCK_H, False)
    inside_Q = query_Q < num_rows
    lse_Q = tl.load(lse + head * num_rows + query_Q, mask=inside_Q, other=0) * LOG2_E
    delta_Q = tl.load(delta + head * num_rows + query_Q, mask=inside_Q, other=0)
    k += head // heads_in_group * k_head
    v += head // heads_in_group * v_head
    first, last = tl.load(key_starts + block), tl.load(key_starts + block + 1)
    middle = first + tl.load(num_full + block)
    dq_QH = tl.full((BLOCK_Q, BLOCK_H), 0, tl.float32)
    dq_QH = _dq_tiles(
        dq_QH, q_QH, dout_QH, lse_Q, delta_Q, query_Q, k, v, subtree_ends, key_blocks, first, middle,
        num_rows, scale, k_row, k_dim, v_row, v_dim, HEAD_DIM, BLOCK_K, BLOCK_H, PRECISION, True,
    )  # fmt: skip
    dq_QH = _dq_tiles(
        dq_QH, q_QH, dout_QH, lse_Q, delta_Q, query_Q, k, v, subtree_ends, key_blocks, middle, last,
        num_rows, scale, k_row, k_dim, v_row, v_dim, HEAD_DIM, BLOCK_K, BLOCK_H, PRECISION, False,
    )  # fmt: skip
    _store_rows(dq + head * dq_head, dq_QH * scale, query_Q, dq_row, num_rows, HEAD_DIM, BLOCK_H)


@triton.jit
def _dq_tiles(
    dq_QH, q_QH, dout_QH, lse_Q, delta_Q, query_Q, k, v, subtree_ends, key_blocks, first, last, num_rows, scale,
    k_row, k_dim, v_row, v_dim,
    HEAD_DIM: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_H: tl.constexpr, PRECISION: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """dq, but for the scale, after the tiles [first, last) of the list."""
    for index in range(first, last):
        key_J = tl.load(key_blocks + index) * BLOCK_K + tl.arange(0, BLOCK_K)
        k_JH = _load_rows(k, key_J, k_row, k_dim, num_rows, HEAD_DIM, BLOCK_H, FULL)
        v_JH = _load_rows(v, key_J, v_row, v_dim, num_rows, HEAD_DIM, BLOCK_H, FULL)
        scores_QJ = tl.dot(q_QH, tl.trans(k_JH), input_precision=PRECISION) * (scale * LOG2_E)
        if not FULL:
            end_J = tl.load(subtree_ends + key_J, mask=key_J < num_rows, other=0)
            seen_QJ = (key_J[None, :] <= query_Q[:, None]) & (query_Q[:, None] < end_J[None, :])
            scores_QJ = tl.where(seen_QJ, scores_QJ, float("-inf"))
        p_QJ = tl.exp2(scores_QJ - lse_Q[:, None])
        dp_QJ = tl.dot(dout_QH, tl.trans(v_JH), input_precision=PRECISION)
        ds_QJ = p_QJ * (dp_QJ - delta_Q[:, None])
        dq_QH = tl.dot(ds_QJ.to(k_JH.dtype), k_JH, dq_QH, input_precision=PRECISION)
    return dq_QH


@triton.jit
def _dkdv_kernel(
    q, k, v, dout, lse, delta, dk, dv, subtree_ends, query_runs, num_rows, heads_in_group, scale,
    q_row, q_head, q_dim, k_row, k_head, k_dim, v_row, v_head, v_dim, dout_row, dout_head, dout_dim, dk_row, dk_head,
    HEAD_DIM: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_H: tl.constexpr,
    PRECISION: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """A block of keys of one key/value head: of each head of the group the full tiles, then those on either side.

    PARTS: a block of `query_runs` is walked as so many blocks of BLOCK_Q queries.
    """
    block, group = tl.program_id(0), tl.program_id(1).to(tl.int64)
    key_J = block * BLOCK_K + tl.arange(0, BLOCK_K)
    k_JH = _load_rows(k + group * k_head, key_J, k_row, k_dim, num_rows, HEAD_DIM, BLOCK_H, False)
    v_JH = _load_rows(v + group * v_head, key_J, v_row, v_dim, num_rows, HEAD_DIM, BLOCK_H, False)
    end_J = tl.load(subtree_ends + key_J, mask=key_J < num_rows, other=0)
    first, last = tl.load(query_runs + 4 * block) * PARTS, tl.load(query_runs + 4 * block + 1) * PARTS
    first_full, last_full = tl.load(query_runs + 4 * block + 2) * PARTS, tl.load(query_runs + 4 * block + 3) * PARTS
    dk_JH = tl.full((BLOCK_K, BLOCK_H), 0, tl.float32)
    dv_JH = tl.full((BLOCK_K, BLOCK_H), 0, tl.float32)
    for head in range(group * heads_in_group, (group + 1) * heads_in_group):
        dk_JH, dv_JH = _dkdv_tiles(
            dk_JH, dv_JH, k_JH, v_JH, key_J, end_J, q + head * q_head, dout + head * dout_head,
            lse + head * num_rows, delta + head * num_rows, first_full, last_full, last_full, last_full,
            num_rows, scale, q_row, q_dim, dout_row, dout_dim, HEAD_DIM, BLOCK_Q, BLOCK_H, PRECISION, True,
        )  # fmt: skip
        dk_JH, dv_JH = _dkdv_tiles(
            dk_JH, dv_JH, k_JH, v_JH, key_J, end_J, q + head * q_head, dout + head * dout_head,
            lse + head * num_rows, delta + head * num_rows, first, first_full, last_full, last,
            num_rows, scale, q_row, q_dim, dout_row, dout_dim, HEAD_DIM, BLOCK_Q, BLOCK_H, PRECISION, False,
        )  # fmt: skip
    _store_rows(dk + group * dk_head, dk_JH * scale, key_J, dk_row, num_rows, HEAD_DIM, BLOCK_H)
    _store_rows(dv + group * dk_head, dv_JH, key_J, dk_row, num_rows, HEAD_DIM, BLOCK_H)


@triton.jit
def _dkdv_tiles(
    dk_JH, dv_JH, k_JH, v_JH, key_J, end_J, q, dout, lse, delta, first, gap, after_gap, last, num_rows, scale,
    q_row, q_dim, dout_row, dout_dim,
    HEAD_DIM: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_H: tl.constexpr, PRECISION: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """dk, but for the scale, and dv after the query blocks [first, gap) and [after_gap, last) of one head."""
    for index in range(first, last - after_gap + gap):
        block = tl.where(index < gap, index, index - gap + after_gap)
        query_Q = block * BLOCK_Q + tl.arange(0, BLOCK_Q)
        q_QH = _load_rows(q, query_Q, q_row, q_dim, num_rows, HEAD_DIM, BLOCK_H, FULL)
        dout_QH = _load_rows(dout, query_Q, dout_row, dout_dim, num_rows, HEAD_DIM, BLOCK_H, FULL)
        lse_Q = tl.load(lse + query_Q, mask=query_Q < num_rows, other=0) * LOG2_E
        delta_Q = tl.load(delta + query_Q, mask=query_Q < num_rows, other=0)
        scores_JQ = tl.dot(k_JH, tl.trans(q_QH), input_precision=PRECISION) * (scale * LOG2_E)
        if not FULL:
            seen_JQ = (key_J[:, None] <= query_Q[None, :]) & (query_Q[None, :] < end_J[:, None])
            scores_JQ = tl.where(seen_JQ, scores_JQ, float("-inf"))
        p_JQ = tl.exp2(scores_JQ - lse_Q[None, :])
        dv_JH = tl.dot(p_JQ.to(dout_QH.dtype), dout_QH, dv_JH, input_precision=PRECISION)
        dp_JQ = tl.dot(v_JH, tl.trans(dout_QH), input_precision=PRECISION)
        ds_JQ = p_JQ * (dp_JQ - delta_Q[None, :])
        dk_JH = tl.dot(ds_JQ.to(q_QH.dtype), q_QH, dk_JH, input_precision=PRECISION)
    return dk_JH, dv_JH
