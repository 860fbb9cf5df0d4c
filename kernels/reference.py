"""Tree attention in eager torch with an explicit mask: the specification that every other strategy is tested against.

U unique rows, N query heads, K key/value heads, G = N / K query heads to a group, H head dim.
Memory is N x U x U, so this is for tests, for small batches and for reading.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["reference_attention", "tree_mask"]


def tree_mask(row_subtree_ends: Tensor) -> Tensor:
    """(U, U), bool: query q (row of the mask) sees key k (column) iff `k <= q < row_subtree_ends[k]`.

    row_subtree_ends: (U,), integer. one past the last descendant of each row's segment.
    """
    rows = torch.arange(len(row_subtree_ends), device=row_subtree_ends.device)
    return (rows[None, :] <= rows[:, None]) & (rows[:, None] < row_subtree_ends[None, :])


def reference_attention(q_UNH: Tensor, k_UKH: Tensor, v_UKH: Tensor, row_subtree_ends: Tensor, scale: float) -> Tensor:
    """`softmax(scale * q k^T + mask) v`, heads in groups, differentiable by autograd alone.

    Any floating dtype; 16-bit inputs are computed in float32 and rounded once.
    Returns (U, N, H), the dtype of q.
    """
    num_rows, num_heads, _ = q_UNH.shape
    num_groups = k_UKH.shape[1]
    wide = torch.promote_types(q_UNH.dtype, torch.float32)
    q_UKGH = q_UNH.to(wide).unflatten(1, (num_groups, num_heads // num_groups))
    scores_KGUU = torch.einsum("qkgh,ukh->kgqu", q_UKGH, k_UKH.to(wide)) * scale
    scores_KGUU = scores_KGUU.masked_fill(~tree_mask(row_subtree_ends), float("-inf"))
    out_UKGH = torch.einsum("kgqu,ukh->qkgh", scores_KGUU.softmax(-1), v_UKH.to(wide))
    return out_UKGH.reshape(num_rows, num_heads, v_UKH.shape[-1]).to(q_UNH.dtype)
