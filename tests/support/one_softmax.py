"""One softmax over the keys that each query sees, by autograd: what every kernel and strategy of attention must equal.

T queries, J keys, N query heads, K key/value heads, H head dim. What a query sees is a matrix of distances, (T, J),
int64: how many tokens before the query a key is, or -1 if it is not seen.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from radixtrain.testing import flash_attention_by_the_book
from radixtrain.tree.plan import PrefixPlan

NAMES = ("out", "dq", "dk", "dv")


def random_tensors(
    sizes: tuple[int, int],
    dtype: torch.dtype = torch.float64,
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 8,
    seed: int = 0,
) -> list[Tensor]:
    """q, k, v and dout. sizes: how many queries and keys."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(sizes[side], heads[side], head_dim) for side in (0, 1, 1, 0)]
    return [torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def distances_of_plan(plan: PrefixPlan) -> Tensor:
    """(U, U), from the rows of each sequence and not from the tree. Rows of padding follow one another."""
    found = torch.full((plan.num_rows, plan.num_rows), -1)
    rows = torch.tensor(plan.inverse_indices).split(np.diff(plan.cu_seqlens).tolist())
    for path in (*rows, torch.arange(plan.num_unique_tokens, plan.num_rows)):
        places = torch.arange(len(path))
        found[path[:, None], path] = (places[:, None] - places).clamp(min=-1)
    return found


def softmax_and_lse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None = None,
    *,
    distances: Tensor,
    scale: float | None = None,
    softcap: float | None = None,
    window: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The output (T, N, H) and the log-sum-exp (N, T), as Hugging Face's eager functions write them.

    A query that sees nothing has an output of zeros and a log-sum-exp of -inf.
    """
    seen = (distances >= 0) & (distances < (window or distances.numel() + 1))
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = torch.einsum("tnh,jnh->ntj", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    hidden = ~seen & seen.any(1, keepdim=True)
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(-1, len(q), 1)], -1)
    weights = scores.softmax(-1)[..., : len(k)] * seen
    lse = scores.logsumexp(-1).masked_fill(~seen.any(1), float("-inf"))
    return torch.einsum("ntj,jnh->tnh", weights, v), lse


def one_softmax(*tensors: Tensor | None, **options: Any) -> Tensor:
    """The output of `softmax_and_lse`."""
    return softmax_and_lse(*tensors, **options)[0]  # type: ignore[arg-type]


def with_gradients(attend: Callable[..., Tensor], tensors: Sequence[Tensor], *sinks: Tensor) -> list[Tensor]:
    """out where dout has something, dq, dk, dv, and dsinks if there are sinks.

    attend: called with q, k, v and the sinks. tensors: q, k, v, dout.
    """
    leaves = [x.detach().clone().requires_grad_() for x in (*tensors[:3], *sinks)]
    out = attend(*leaves)
    return [out.detach() * (tensors[3] != 0), *torch.autograd.grad(out, leaves, tensors[3])]


def by_the_book(tensors: Sequence[Tensor], distances: Tensor, scale: float) -> list[Tensor]:
    """out, dq, dk, dv as flash-attention's arithmetic has them in the dtype of q: the reference of 16 bits."""
    out, _, *grads = flash_attention_by_the_book(*tensors, distances >= 0, scale)
    return [out * (tensors[3] != 0), *grads]


def assert_exact(found: Sequence[Tensor], truth: Sequence[Tensor], what: object = "") -> None:
    """Assert equality in float64: for each tensor a relative L2 error of at most 1e-12.

    A tensor whose true value is zero but for rounding has no relative error: its bar is that of numbers near one.
    """
    for number, (x, y) in enumerate(zip(found, truth, strict=True)):
        assert x.shape == y.shape, f"{what}, tensor {number}: {tuple(x.shape)} for {tuple(y.shape)}"
        error = float((x - y).norm()) / max(float(y.norm()), 0.1)
        assert error <= 1e-12, f"{what}, tensor {number}: {error:.2g}"
