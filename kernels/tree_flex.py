"""Tree attention as one call of FlexAttention, with a mask of blocks that is made of two numbers for each block.

U rows in depth-first pre-order, I blocks of them. Query q sees key k iff `k <= q < subtree_ends[k]`, and every row sees
itself. So a block of queries sees something of an earlier block of keys iff its first query is below the largest end
there, and all of it iff its last query is below the smallest. No pair of rows is looked at.

    subtree_ends  6 6 3 4 6 6     blocks of 2     keys 0-1   keys 2-3   keys 4-5
    row 0  x                      queries 0-1     partial
    row 1  x x                    queries 2-3     full       partial
    row 2  x x x                  queries 4-5     full       .          partial
    row 3  x x . x                largest end     6          4          6
    row 4  x x . . x              smallest end    6          3          6
    row 5  x x . . x x

The numbers stay on the device, and nothing waits for it. Kernels are compiled once for any number of rows: one forward,
one backward, and its sums `delta`. There are none for a CPU, where FlexAttention has no backward pass.
Source: FlexAttention (Dong et al., 2024); the intervals are those of `tree_mask`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, FlexKernelOptions, flex_attention
from torch.nn.functional import pad

from radixtrain.kernels.varlen import KernelCall
from radixtrain.kernels.varlen_args import Scoring

BLOCK = 128  # rows; FlexAttention's tiles of queries and of keys divide it
# Not its kernel for fewer than 128 queries, which found no tile that divides the block (torch 2.11 on an H100).
OPTIONS: FlexKernelOptions = {"FORCE_USE_FLEX_ATTENTION": True}
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
HEAD_DIMS = (16, 256)  # Triton cannot multiply narrower ones, wider ones were not tried


def flex_refusal(call: KernelCall) -> str | None:
    """Say why FlexAttention cannot run the call, in the words of an error; None if it can."""
    if call.device.type != "cuda":
        return f"FlexAttention computes gradients on CUDA only, the tensors are on {call.device.type}"
    if importlib.util.find_spec("triton") is None:
        return "FlexAttention compiles with Triton, which is not installed (pip install triton)"
    if call.dtype not in DTYPES:
        return f"takes {', '.join(str(dtype).removeprefix('torch.') for dtype in DTYPES)}, got {call.dtype}"
    if not HEAD_DIMS[0] <= call.head_dim <= HEAD_DIMS[1]:
        return f"takes head dims from {HEAD_DIMS[0]} to {HEAD_DIMS[1]}, got {call.head_dim}"
    return "computes no soft-cap" if call.softcap else None


def tree_block_mask(subtree_ends: Tensor, depths: Tensor, window: int | None, block: int = BLOCK) -> BlockMask:
    """Make FlexAttention's tree mask, on the device of `subtree_ends`, for all layers with this window.

    subtree_ends: (U,), integer. one past the last descendant of each row's segment.
    depths: (U,), integer. place of each row in its sequence, in tokens from 0.
    window: None, or w: query q sees key k only if `depths[q] - w < depths[k]`.
    block: rows of a block.
    """
    first = torch.arange(0, len(subtree_ends), block, device=subtree_ends.device)
    ends, earlier = _in_blocks(subtree_ends, block), first[None, :] < first[:, None]
    some = earlier & (first[:, None] < ends.amax(1)) | (first[None, :] == first[:, None])
    full = earlier & (first[:, None] + block <= ends.amin(1))

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < subtree_ends[key])

    def sees_near(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return sees(batch, head, query, key) & (horizon[query] < depths[key])

    if window is not None:
        horizon = depths - window  # a number would become a compile-time constant
        keys, queries = _in_blocks(depths, block), _in_blocks(horizon, block)
        some &= queries.amin(1)[:, None] < keys.amax(1)
        full &= queries.amax(1)[:, None] < keys.amin(1)
    return BlockMask.from_kv_blocks(
        *_listed(some & ~full),
        *_listed(full),
        BLOCK_SIZE=block,
        mask_mod=sees if window is None else sees_near,
        seq_lengths=(len(subtree_ends), len(subtree_ends)),
    )


def _in_blocks(x: Tensor, block: int) -> Tensor:
    """Reshape to (I, block). The fill of the last block makes none full, since that takes a later block of queries."""
    return pad(x, (0, -len(x) % block)).view(-1, block)


def _listed(blocks_II: Tensor) -> tuple[Tensor, Tensor]:
    """Count the blocks of keys of each block of queries, (1, 1, I), and list them first in (1, 1, I, I); int32."""
    order = blocks_II.int().argsort(dim=1, descending=True, stable=True)
    return blocks_II.sum(1, dtype=torch.int32)[None, None], order.int()[None, None]


def flex_tree_attention(
    q_UNH: Tensor, k_UKH: Tensor, v_UKH: Tensor, mask: BlockMask, scoring: Scoring, sinks_N: Tensor | None = None
) -> Tensor:
    """Compute attention over what the mask shows, differentiable once.

    mask: of `tree_block_mask`, with the window of `scoring`.
    sinks_N: (N,), any floating dtype. logits without a value, which leave the share `sigmoid(lse - sinks)` to the keys.
    Returns (U, N, H), the dtype of q. `tree_attention` has checked shapes and dtypes.
    """
    q, k, v = (x.transpose(0, 1)[None] for x in (q_UNH, k_UKH, v_UKH))
    out, lse = _compiled()(q, k, v, mask, scoring.scale)
    if sinks_N is not None:
        out = (out * torch.sigmoid(lse - sinks_N.to(lse.dtype)[:, None])[..., None]).to(q.dtype)
    return out[0].transpose(0, 1)


@cache
def _compiled() -> Callable[..., tuple[Tensor, Tensor]]:
    """Compile as a whole or fail: without a compiler FlexAttention would keep a score for every pair of rows."""
    return torch.compile(_flex, dynamic=True, fullgraph=True)


def _flex(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, scale: float) -> tuple[Tensor, Tensor]:
    """Compute the output (1, N, U, H) and the log-sum-exp (1, N, U), which the backward pass keeps anyway."""
    lse = AuxRequest(lse=True)
    out, aux = flex_attention(
        q, k, v, block_mask=mask, scale=scale, enable_gqa=True, kernel_options=OPTIONS, return_aux=lse
    )
    assert aux.lse is not None
    return out, aux.lse
