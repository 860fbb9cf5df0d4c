"""Tree attention in one Triton kernel per direction, for deep trees: `cascade` would make a call for each level.

U rows in depth-first pre-order, N query heads, K key/value heads, N / K query heads to a group, H head dim. Query q
sees key k iff `k <= q < subtree_ends[k]`. The tiles that hold anything, and which of them need no mask, were listed on
the host (`tree_tiles.py`); no other tile is touched, and nothing waits for the device.

- Forward: a program holds a block of queries of one head, walks its blocks of keys, and rescales as the maximum grows.
- Backward: `p = exp(s - lse)`, `ds = p (dout v^T - delta)`, `delta = rowsum(dout * out) - dlse`. One kernel walks keys
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
from torch import Tensor

from radixtrain.kernels.tree_tiles import DTYPES, MAX_HEAD_DIM, MIN_BLOCK, TreeTiles, check_tile_sizes
from radixtrain.kernels.tree_triton_kernels import delta_kernel, dkdv_kernel, dq_kernel, forward_kernel
from radixtrain.kernels.triton_runtime import triton

__all__ = ["tiled_tree_attention"]

DELTA_ROWS = 32  # of one program for delta, whatever the tiles
# Queries that dk and dv walk at once, at most. With 64 their kernel, which holds two results, spills registers in
# bfloat16 and head dim 128: 128 bytes a thread on sm_90, 180 on sm_120; with 32 none and 72 (ptxas of Triton 3.7.1).
DKDV_QUERIES = 32


def tiled_tree_attention(q: Tensor, k: Tensor, v: Tensor, tiles: TreeTiles, scale: float) -> tuple[Tensor, Tensor]:
    """Attention of every row over itself and its ancestors, and its log-sum-exp, both differentiable once.

    q: (U, N, H), bfloat16, float16 or float32. any strides, as for k and v.
    k, v: (U, K, H), the dtype of q, N a multiple of K.
    tiles: on the device of q; `held` and `walked` powers of two, at least 16.
    scale: factor on the products of queries and keys.
    Returns out (U, N, H), contiguous, the dtype of q, and lse (N, U), float32. ValueError for other shapes and dtypes.
    """
    _check(q, k, v, tiles)
    return _forward(q, k, v, *_lists(tiles), tiles.held, tiles.walked, scale)


def _check(q: Tensor, k: Tensor, v: Tensor, tiles: TreeTiles) -> None:
    num_rows, num_heads, head_dim = q.shape
    if q.dtype not in DTYPES or {k.dtype, v.dtype} != {q.dtype}:
        dtypes = ", ".join(str(x.dtype) for x in (q, k, v))
        raise ValueError(f"tiled_tree_attention: q, k and v must share one of {DTYPES}, got {dtypes}")
    if k.shape != v.shape or k.shape[0] != num_rows or k.shape[2] != head_dim or not _divides(k.shape[1], num_heads):
        shapes = ", ".join(str(tuple(x.shape)) for x in (q, k, v))
        raise ValueError(f"tiled_tree_attention: q (U, N, H), k and v (U, K, H), K a divisor of N, got {shapes}")
    if not 0 < head_dim <= MAX_HEAD_DIM:
        raise ValueError(f"tiled_tree_attention: head dim must be in [1, {MAX_HEAD_DIM}], got {head_dim}")
    if tiles.num_rows != num_rows:
        raise ValueError(f"tiled_tree_attention: tiles are of {tiles.num_rows} rows, q has {num_rows}")
    check_tile_sizes(tiles.held, tiles.walked)


def _divides(part: int, whole: int) -> bool:
    return part > 0 and whole % part == 0


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
            forward_kernel[(num_full.shape[0], num_heads)](
                q, k, v, out, lse, subtree_ends, key_starts, num_full, key_blocks,
                num_rows, num_heads // k.shape[1], scale,
                *q.stride(), *k.stride(), *v.stride(), *out.stride()[:2],
                BLOCK_Q=held, BLOCK_K=walked, **_options(q, held),
            )  # fmt: skip
    return out, lse


@torch.library.custom_op("radixtrain::tree_attention_backward", mutates_args=())
def _backward(
    dout: Tensor,
    dlse: Tensor,
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
    options, delta = _options(q, held), torch.empty_like(lse)
    num_groups, heads_in_group = k.shape[1], num_heads // k.shape[1]
    strides = (*q.stride(), *k.stride(), *v.stride(), *dout.stride())
    with torch.cuda.device_of(q):
        delta_kernel[(triton.cdiv(num_rows, DELTA_ROWS), num_heads)](
            dout, out, dlse, delta, num_rows, *dout.stride(), *out.stride(), *dlse.stride(),
            HEAD_DIM=options["HEAD_DIM"], BLOCK_Q=DELTA_ROWS, BLOCK_H=options["BLOCK_H"], num_warps=4,
        )  # fmt: skip
        dq_kernel[(num_full.shape[0], num_heads)](
            q, k, v, dout, lse, delta, dq, subtree_ends, key_starts, num_full, key_blocks,
            num_rows, heads_in_group, scale, *strides, *dq.stride()[:2],
            BLOCK_Q=held, BLOCK_K=walked, **options,
        )  # fmt: skip
        dkdv_kernel[(query_runs.shape[0], num_groups)](
            q, k, v, dout, lse, delta, dk, dv, subtree_ends, query_runs,
            num_rows, heads_in_group, scale, *strides, *dk.stride()[:2],
            BLOCK_Q=min(walked, DKDV_QUERIES), BLOCK_K=held, PARTS=max(1, walked // DKDV_QUERIES), **options,
        )  # fmt: skip
    return dq, dk, dv


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)


@_backward.register_fake
def _(dout: Tensor, dlse: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, *lists = inputs[:8]
    ctx.save_for_backward(q, k, v, *output, *lists)
    ctx.options = inputs[8:]


def _gradients(ctx: Any, dout: Tensor, dlse: Tensor) -> tuple[Tensor | None, ...]:
    return *_backward(dout, dlse, *ctx.saved_tensors, *ctx.options), *[None] * 8


_forward.register_autograd(_gradients, setup_context=_keep)
