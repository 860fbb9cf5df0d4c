"""Tree attention as one call of cudnn.flex_attention, whose mask is a list of intervals for each query.

Its kernels are in CuTe DSL, for SM90, SM100 and SM103, and experimental: bfloat16 or float16, head dims of 8 to 128
that are multiples of 8, and 256; heads in groups; with a backward pass, deterministic if asked for. A mask is made of
an odd number of endpoints F0, F1, ... for each query, which sees the keys `[0, F0) u [F1, F2) u ...`.
There is no largest number, but time to plan and memory grow with it: 3 for one prompt, 2 L + 1 if a path has L gaps.
Planning waits for the device, so it is done once for each plan, and a step in training would pay for it.
Source: nvidia-cudnn-frontend 1.32.0, `cudnn/flex_attention`.
"""

from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from radixtrain.errors import UserError
from radixtrain.tree.plan import PrefixPlan

__all__ = ["cudnn_flex", "endpoints"]

_MASKS: WeakKeyDictionary[PrefixPlan, dict[Any, Any]] = WeakKeyDictionary()


def cudnn_flex(q: Tensor, k: Tensor, v: Tensor, plan: PrefixPlan, scale: float, deterministic: bool = False) -> Tensor:
    """Attention of every row over itself and its ancestors, differentiable once. Returns (U, N, H), the dtype of q.

    q: (U, N, H), bfloat16 or float16, on CUDA. k, v: (U, K, H), the dtype of q, N a multiple of K.

    Raises UserError without the package, and what the package raises for what it does not take.
    """
    try:
        from cudnn.flex_attention import create_mask_plan, flex_attn_func
    except ImportError as error:
        raise UserError(
            f"cudnn.flex_attention cannot be imported ({error}): pip install 'nvidia-cudnn-frontend>=1.29'"
        ) from error
    heads = [x[None] for x in (q, k, v)]
    made, kind = _MASKS.setdefault(plan, {}), (q.shape, k.shape, q.dtype, q.device)
    if kind not in made:
        mask = torch.from_numpy(endpoints(plan)).to(q.device)[None]
        made[kind] = create_mask_plan(mask, *heads, build_backward=True)
    return flex_attn_func(*heads, mask_plan=made[kind], softmax_scale=scale, deterministic=deterministic)[0]


def endpoints(plan: PrefixPlan) -> npt.NDArray[np.int32]:
    """(F, U). The root path of each row as intervals: where one ends, the next begins, ..., and the row itself.

    New rows of a sequence follow each other, so gaps are among their ancestors only, the same for all of them.
    """
    keys, bounds = plan.path_keys.astype(np.int64), plan.path_cu_seqlens_k
    before = np.append(-1, keys[:-1])
    before[bounds[:-1]] = -1
    (gaps,) = np.nonzero(keys != before + 1)
    path = np.searchsorted(bounds, gaps, side="right") - 1
    place = 2 * (np.arange(len(gaps)) - np.searchsorted(path, path))
    of_path = np.full((place.max(initial=-2) + 3, len(bounds) - 1), -1)
    of_path[place, path], of_path[place + 1, path] = before[gaps] + 1, keys[gaps]
    of_row = of_path.repeat(np.diff(plan.path_cu_seqlens_q), axis=1)
    return np.where(of_row < 0, np.arange(plan.num_rows) + 1, of_row).astype(np.int32)
