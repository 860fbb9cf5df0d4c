"""Tree attention in eager torch with an explicit mask: the specification that every other strategy is tested against.

U unique rows, N query heads, K key/value heads, G = N / K query heads to a group, H head dim.
Memory is N x U x U, so this is for tests, for small batches and for reading.
"""

from __future__ import annotations

import torch
from torch import Tensor

from radixtrain.kernels.functions import wide
from radixtrain.kernels.varlen_args import Scoring


def tree_mask(row_subtree_ends: Tensor, row_depths: Tensor, window: int | None) -> Tensor:
    """Return the mask (U, U), bool: query q (row of the mask) sees key k (column) iff `k <= q < row_subtree_ends[k]`.

    row_subtree_ends: (U,), integer. one past the last descendant of each row's segment.
    row_depths: (U,), integer. place of each row in its sequence, in tokens from 0.
    window: None, or w: `row_depths[q] - w < row_depths[k]` as well.
    """
    rows = torch.arange(len(row_subtree_ends), device=row_subtree_ends.device)
    seen = (rows[None, :] <= rows[:, None]) & (rows[:, None] < row_subtree_ends[None, :])
    return seen if window is None else seen & (row_depths[:, None] - window < row_depths[None, :])


def reference_attention(
    q_UNH: Tensor, k_UKH: Tensor, v_UKH: Tensor, mask_UU: Tensor, scoring: Scoring, sinks_N: Tensor | None = None
) -> Tensor:
    """Compute `softmax(scores + mask) v`, heads in groups, in operations that autograd differentiates.

    mask_UU: (U, U), bool, True if seen; from `tree_mask`, which applied the window.
    sinks_N: (N,). one more logit for every query of a head, without a value.
    Any floating dtype; 16-bit inputs are computed in float32 and rounded once.
    Returns (U, N, H), the dtype of q.
    """
    num_rows, num_heads, _ = q_UNH.shape
    num_groups = k_UKH.shape[1]
    dtype = wide(q_UNH)
    q_UKGH = q_UNH.to(dtype).unflatten(1, (num_groups, num_heads // num_groups))
    scores_KGUU = scoring.of(torch.einsum("qkgh,ukh->kgqu", q_UKGH, k_UKH.to(dtype)))
    scores_KGUU = scores_KGUU.masked_fill(~mask_UU, float("-inf"))
    if sinks_N is not None:
        sinks_KGU1 = sinks_N.to(dtype).view(num_groups, -1, 1, 1).expand(*scores_KGUU.shape[:-1], 1)
        weights_KGUU = torch.cat([scores_KGUU, sinks_KGU1], -1).softmax(-1)[..., :-1]
    else:
        weights_KGUU = scores_KGUU.softmax(-1)
    out_UKGH = torch.einsum("kgqu,ukh->qkgh", weights_KGUU, v_UKH.to(dtype))
    return out_UKGH.reshape(num_rows, num_heads, v_UKH.shape[-1]).to(q_UNH.dtype)
