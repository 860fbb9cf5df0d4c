"""Varlen kernels that loop over rectangles of queries and keys: eager matmuls, and torch's flash attention for CPUs.

Legend as in `varlen_args.py`; b counts sequences of a batch, 1 for a rectangle; g the query heads of a key/value head.

torch's CPU flash kernel computes whole rectangles: below 512 keys its `is_causal` hides half of what it has computed.
So a causal entry is cut into strips of queries, each with the keys that any of its queries sees and a mask for the
corner; a long entry is left to the kernel, which then skips most of what it would hide.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from radixtrain.kernels.functions import wide
from radixtrain.kernels.varlen_args import Ragged, Scoring, added_to_scores

aten = torch.ops.aten
STRIP = 64  # queries of a strip: with more of them more is computed and hidden, with fewer there are more calls
# Queries at which `is_causal` is as fast as strips, which take 0.66 of its time at 512, 0.80 at 1024, 0.99 at 2304.
LONG = 1536
# Scores that the eager kernel writes at once, 256 MB in float32: about six such tensors are alive in its backward.
MOST_SCORES = 2**26


@dataclass(frozen=True, eq=False)
class Rectangle:
    """Queries, and keys that they see.

    queries, keys: their rows.
    mask: None if every query sees every key; (queries, keys) or (b, 1, queries, keys), float32, 0 or -inf.
    causal: without a mask, of as many keys as queries: a query sees no later key.
    """

    queries: slice
    keys: slice
    mask: Tensor | None = None
    causal: bool = False


def rectangles_of(ragged: Ragged, window: int | None = None) -> list[Rectangle]:
    """Cut a call into rectangles, no query of which is in two; kept in the call, because every layer asks.

    Without `bounds` this waits for the device: only the eager kernel on CUDA comes here.
    """
    assert ragged.causal or window is None, "a window counts from the last key"
    if window not in ragged.rectangles:
        ragged.rectangles[window] = list(_rectangles(ragged, window))
    return ragged.rectangles[window]


def _rectangles(ragged: Ragged, window: int | None) -> Iterator[Rectangle]:
    bounds = ragged.bounds
    if bounds is None:
        q, k = ragged.cu_seqlens_q.tolist(), ragged.cu_seqlens_k.tolist()
        bounds = tuple((*queries, *keys) for queries, keys in zip(pairwise(q), pairwise(k), strict=True))
    corner = _corner(max((k1 - k0 for _, _, k0, k1 in bounds), default=0), window, ragged.cu_seqlens_q.device)
    for (q0, q1, k0, k1), mask in zip(bounds, ragged.masks or (None,) * len(bounds), strict=True):
        if q0 == q1 or k0 == k1:
            continue
        if not ragged.causal or mask is not None:
            yield Rectangle(slice(q0, q1), slice(k0, k1), mask)
        elif window is None and q1 - q0 == k1 - k0 >= LONG:
            yield Rectangle(slice(q0, q1), slice(k0, k1), causal=True)
        else:
            yield from _strips(q1, min(q1 - q0, k1 - k0), k0, k1, corner, window)


def _strips(
    last_query: int, num_queries: int, first_key: int, last_key: int, corner: Tensor, window: int | None
) -> Iterator[Rectangle]:
    """Cut a causal entry into strips of about equal height, each with the keys that its queries see.

    num_queries: that see a key, the last ones of the entry.
    """
    number = -(-num_queries // STRIP)
    for above, below in pairwise(num_queries * n // number for n in range(number, -1, -1)):
        height, last = above - below, last_key - below
        first = first_key if window is None else max(first_key, last - height - window + 1)
        queries = slice(last_query - above, last_query - below)
        yield Rectangle(queries, slice(first, last), corner[-height:, first - last :])


def _corner(width: int, window: int | None, device: torch.device) -> Tensor:
    """Make the causal mask of the last `STRIP` queries onto so many keys: all strips agree from the bottom right on."""
    seen = torch.ones(STRIP, width, dtype=torch.bool, device=device).tril(width - STRIP)
    return added_to_scores(~seen if window is None else ~seen.triu(width - STRIP - window + 1))


class LoopingKernel:
    """A kernel that runs one rectangle of a call at a time, as a batch of one, along the first axis b."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, ragged: Ragged, scoring: Scoring) -> tuple[Tensor, Tensor]:
        parts = self.parts(ragged, q, scoring)
        if _is_one_call(parts, q, k):
            out_1TNH, lse_1NT = self.part_forward(q[None], k[None], v[None], parts[0], scoring)
            return out_1TNH[0], lse_1NT[0]
        out = q.new_zeros(*q.shape[:2], v.shape[-1])
        lse = q.new_full((q.shape[1], len(q)), float("-inf"), dtype=wide(q))
        for part in parts:
            keys = k[None, part.keys], v[None, part.keys]
            out_1TNH, lse_1NT = self.part_forward(q[None, part.queries], *keys, part, scoring)
            out[part.queries], lse[:, part.queries] = out_1TNH[0], lse_1NT[0]
        return out, lse

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, ragged: Ragged, scoring: Scoring
    ) -> tuple[Tensor, Tensor, Tensor]:
        parts = self.parts(ragged, q, scoring)
        if _is_one_call(parts, q, k):
            whole = dout[None], q[None], k[None], v[None], out[None], lse[None]
            dq, dk, dv = self.part_backward(*whole, parts[0], scoring)
            return dq[0], dk[0].to(k.dtype), dv[0].to(v.dtype)
        dq = torch.zeros_like(q)
        dk, dv = (torch.zeros_like(x, dtype=wide(x)) for x in (k, v))
        for part in parts:
            dout_part, q_part, out_part = (x[None, part.queries] for x in (dout, q, out))
            k_part, v_part = (x[None, part.keys] for x in (k, v))
            of_part = dout_part, q_part, k_part, v_part, out_part, lse[None, :, part.queries]
            grads = self.part_backward(*of_part, part, scoring)
            dq[part.queries] = grads[0][0]
            dk[part.keys] += grads[1][0]
            dv[part.keys] += grads[2][0]
        return dq, dk.to(k.dtype), dv.to(v.dtype)

    def parts(self, ragged: Ragged, q: Tensor, scoring: Scoring) -> list[Rectangle]:
        """Return the parts of a call as this kernel takes them."""
        return rectangles_of(ragged, scoring.window)

    def part_forward(
        self, q_bTNH: Tensor, k_bJKH: Tensor, v_bJKH: Tensor, part: Rectangle, scoring: Scoring
    ) -> tuple[Tensor, Tensor]:
        """Compute the output (b, T, N, H) and log-sum-exp (b, N, T) of a part."""
        raise NotImplementedError

    def part_backward(
        self,
        dout_bTNH: Tensor,
        q_bTNH: Tensor,
        k_bJKH: Tensor,
        v_bJKH: Tensor,
        out_bTNH: Tensor,
        lse_bNT: Tensor,
        part: Rectangle,
        scoring: Scoring,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the shares of a part in dq, dk and dv; of the keys perhaps in a wider dtype."""
        raise NotImplementedError


class EagerKernel(LoopingKernel):
    """Explicit matmuls: the specification of the other kernels. Any dtype and device; 16 bits are computed in float32.

    Queries take turns, so that memory does not grow with queries times keys.
    """

    def parts(self, ragged: Ragged, q: Tensor, scoring: Scoring) -> list[Rectangle]:
        """Cut the rectangles further, and write causal masks out."""
        return [turn for part in rectangles_of(ragged, scoring.window) for turn in _turns(part, q)]

    def part_forward(
        self, q_bTNH: Tensor, k_bJKH: Tensor, v_bJKH: Tensor, part: Rectangle, scoring: Scoring
    ) -> tuple[Tensor, Tensor]:
        q, k, v = (x.to(wide(x)) for x in (q_bTNH, k_bJKH, v_bJKH))
        scores_bKgTJ, _ = self._scores(q, k, part.mask, scoring)
        lse_bKgT = scores_bKgTJ.logsumexp(-1)
        out_bTKgH = torch.einsum("bkgtj,bjkh->btkgh", _exp_minus(scores_bKgTJ, lse_bKgT), v)
        return out_bTKgH.flatten(2, 3).to(q_bTNH.dtype), lse_bKgT.flatten(1, 2)

    def part_backward(
        self,
        dout_bTNH: Tensor,
        q_bTNH: Tensor,
        k_bJKH: Tensor,
        v_bJKH: Tensor,
        out_bTNH: Tensor,
        lse_bNT: Tensor,
        part: Rectangle,
        scoring: Scoring,
    ) -> tuple[Tensor, Tensor, Tensor]:
        dout, q, k, v, out = (x.to(wide(x)) for x in (dout_bTNH, q_bTNH, k_bJKH, v_bJKH, out_bTNH))
        scores, slope = self._scores(q, k, part.mask, scoring)
        groups = k.shape[2], q.shape[2] // k.shape[2]
        dout, out, q = (x.unflatten(2, groups) for x in (dout, out, q))
        p = _exp_minus(scores, lse_bNT.unflatten(1, groups))
        dv = torch.einsum("bkgtj,btkgh->bjkh", p, dout)
        dp = torch.einsum("btkgh,bjkh->bkgtj", dout, v)
        delta_bKgT = (dout * out).sum(-1).permute(0, 2, 3, 1)
        ds = p * (dp - delta_bKgT[..., None]) * slope
        dq = torch.einsum("bkgtj,bjkh->btkgh", ds, k).flatten(2, 3)
        return dq.to(q_bTNH.dtype), torch.einsum("bkgtj,btkgh->bjkh", ds, q), dv

    def _scores(
        self, q_bTNH: Tensor, k_bJKH: Tensor, mask: Tensor | None, scoring: Scoring
    ) -> tuple[Tensor, Tensor | float]:
        """Compute scores, -inf for what is hidden, and their slope: the derivative by the product of query and key."""
        q_bTKgH = q_bTNH.unflatten(2, (k_bJKH.shape[2], -1))
        scores_bKgTJ = scoring.of(torch.einsum("btkgh,bjkh->bkgtj", q_bTKgH, k_bJKH))
        slope: Tensor | float = scoring.scale
        if scoring.softcap is not None:
            slope = scoring.scale * (1 - (scores_bKgTJ / scoring.softcap).square())
        if mask is not None:
            scores_bKgTJ = scores_bKgTJ + (mask if mask.ndim == 2 else mask[:, None]).to(scores_bKgTJ.dtype)
        return scores_bKgTJ, slope


class TorchCPUKernel(LoopingKernel):
    """`aten._scaled_dot_product_flash_attention_for_cpu`, which takes grouped heads and strided views."""

    def part_forward(
        self, q_bTNH: Tensor, k_bJKH: Tensor, v_bJKH: Tensor, part: Rectangle, scoring: Scoring
    ) -> tuple[Tensor, Tensor]:
        out_bNTH, lse_bNT = aten._scaled_dot_product_flash_attention_for_cpu(
            *map(_heads_first, (q_bTNH, k_bJKH, v_bJKH)), 0.0, **self._options(q_bTNH, part, scoring)
        )
        return out_bNTH.transpose(1, 2), lse_bNT

    def part_backward(
        self,
        dout_bTNH: Tensor,
        q_bTNH: Tensor,
        k_bJKH: Tensor,
        v_bJKH: Tensor,
        out_bTNH: Tensor,
        lse_bNT: Tensor,
        part: Rectangle,
        scoring: Scoring,
    ) -> tuple[Tensor, Tensor, Tensor]:
        rows = map(_heads_first, (dout_bTNH, q_bTNH, k_bJKH, v_bJKH, out_bTNH))
        grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *rows, lse_bNT, 0.0, **self._options(q_bTNH, part, scoring)
        )
        dq, dk, dv = [grad.transpose(1, 2) for grad in grads]
        return dq, dk, dv

    def _options(self, q: Tensor, part: Rectangle, scoring: Scoring) -> dict[str, Any]:
        assert scoring.softcap is None, "`tree_attention` refuses a soft-cap on this kernel"
        mask = part.mask
        if mask is not None:  # it may be of a layout that was made for another dtype
            mask = mask.double() if q.dtype == torch.float64 else mask.float()
        return {"is_causal": part.causal, "attn_mask": mask, "scale": scoring.scale}


def _is_one_call(parts: list[Rectangle], q: Tensor, k: Tensor) -> bool:
    """Return whether one rectangle covers the call, so that its results need no copy."""
    return len(parts) == 1 and (parts[0].queries, parts[0].keys) == (slice(0, len(q)), slice(0, len(k)))


def _turns(part: Rectangle, q: Tensor) -> Iterator[Rectangle]:
    """Cut a part into those with at most `MOST_SCORES` scores, or of one query. A causal mask is written out."""
    first, end, num_keys = part.queries.start, part.queries.stop, part.keys.stop - part.keys.start
    height = max(1, MOST_SCORES // (q.shape[1] * num_keys))
    for start in range(first, end, height):
        stop, mask = min(start + height, end), part.mask
        if part.causal:
            seen = torch.ones(stop - start, num_keys, dtype=torch.bool, device=q.device).tril(start - first)
            mask = added_to_scores(~seen)
        elif mask is not None:
            mask = mask[start - first : stop - first]
        yield Rectangle(slice(start, stop), part.keys, mask)


def _heads_first(x_bTNH: Tensor) -> Tensor:
    x = x_bTNH if x_bTNH.stride(-1) == 1 else x_bTNH.contiguous()  # the CPU kernel ignores the last stride
    return x.transpose(1, 2)


def _exp_minus(scores: Tensor, lse: Tensor) -> Tensor:
    """Return `exp(scores - lse)`, with 0 if a query sees nothing (lse = -inf) instead of exp(-inf + inf)."""
    return torch.exp(scores - lse.masked_fill(lse == float("-inf"), 0)[..., None])
