"""Varlen kernels that loop over rectangles of queries and keys: eager matmuls, and torch's flash attention for CPUs.

Legend as in `varlen_args.py`; b counts sequences of a batch, 1 for a rectangle; g the query heads of a key/value head.

torch's CPU flash kernel computes whole rectangles: below 512 keys its `is_causal` hides half of what it has computed.
So a causal entry is cut into strips of queries, each with the keys that any of its queries sees and a mask for the
corner; a long entry is left to the kernel, which then skips most of what it would hide. Short entries are put together
under a mask: hiding pairs costs less than a call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from radixtrain.kernels.functions import wide
from radixtrain.kernels.varlen_args import Ragged, Scoring, added_to_scores

aten = torch.ops.aten
Entry = tuple[int, int, int, int]  # first query, last + 1, first key, last + 1
STRIP = 64  # queries of a strip: with more of them more is computed and hidden, with fewer there are more calls
# Most queries and keys of a bundle of entries. 64 rows of banking77 have 84 segments, most of them of a few tokens.
BUNDLE = 48
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

    On CUDA this waits for the device unless there is only one entry: only the eager kernel comes here.
    """
    assert ragged.causal or window is None, "a window counts from the last key"
    if window not in ragged.rectangles:
        ragged.rectangles[window] = list(_rectangles(ragged, window))
    return ragged.rectangles[window]


def _rectangles(ragged: Ragged, window: int | None) -> Iterator[Rectangle]:
    entries, causal, device = _entries(ragged), ragged.causal, ragged.cu_seqlens_q.device
    corner = _corner(max((k1 - k0 for _, _, k0, k1 in entries if causal), default=0), window, device)
    for bundle in _bundled(entries, causal):
        queries, keys = slice(bundle[0][0], bundle[-1][1]), slice(bundle[0][2], bundle[-1][3])
        if len(bundle) > 1:
            yield Rectangle(queries, keys, _mask_of_bundle(bundle, causal, window, device))
        elif not causal:
            yield Rectangle(queries, keys, ragged.mask)
        elif window is None and _number(queries) == _number(keys) >= LONG:
            yield Rectangle(queries, keys, causal=True)
        else:
            yield from _strips(queries, keys, corner, window)


def _entries(ragged: Ragged) -> list[Entry]:
    """Return the entries that have queries and keys."""
    if len(ragged.cu_seqlens_q) == 2:
        entries = [(0, ragged.max_seqlen_q, 0, ragged.max_seqlen_k)]
    else:
        q, k = ragged.cu_seqlens_q.tolist(), ragged.cu_seqlens_k.tolist()
        entries = [(*queries, *keys) for queries, keys in zip(pairwise(q), pairwise(k), strict=True)]
    return [(q0, q1, k0, k1) for q0, q1, k0, k1 in entries if q0 < q1 and k0 < k1]


def _bundled(entries: list[Entry], causal: bool) -> Iterator[list[Entry]]:
    """Put short entries together that follow each other; causal ones if they have as many keys as queries."""
    bundle: list[Entry] = []
    for entry in entries:
        if bundle:
            (q0, _, k0, _), (_, q_end, _, k_end) = bundle[0], bundle[-1]
            are_short = max(entry[1] - q0, entry[3] - k0) <= BUNDLE
            are_square = q0 - k0 == q_end - k_end == entry[1] - entry[3]
            if (q_end, k_end) != (entry[0], entry[2]) or not are_short or (causal and not are_square):
                yield bundle
                bundle = []
        bundle.append(entry)
    if bundle:
        yield bundle


def _mask_of_bundle(bundle: list[Entry], causal: bool, window: int | None, device: torch.device) -> Tensor:
    """Hide the keys of other entries, and what causality and the window hide in each."""
    number = torch.arange(len(bundle), device=device)
    of_query, of_key = (
        number.repeat_interleave(torch.tensor([entry[side + 1] - entry[side] for entry in bundle], device=device))
        for side in (0, 2)
    )
    seen = of_query[:, None] == of_key
    if causal:
        seen = seen.tril() if window is None else seen.tril().triu(1 - window)
    return added_to_scores(~seen)


def _strips(queries: slice, keys: slice, corner: Tensor, window: int | None) -> Iterator[Rectangle]:
    """Cut a causal entry into strips of about equal height, each with the keys that its queries see.

    Queries that come before the first key see none, and are left out.
    """
    num_queries = min(_number(queries), _number(keys))
    number = -(-num_queries // STRIP)
    for above, below in pairwise(num_queries * n // number for n in range(number, -1, -1)):
        height, last = above - below, keys.stop - below
        first = keys.start if window is None else max(keys.start, last - height - window + 1)
        rows = slice(queries.stop - above, queries.stop - below)
        yield Rectangle(rows, slice(first, last), corner[-height:, first - last :])


def _corner(width: int, window: int | None, device: torch.device) -> Tensor:
    """Make the causal mask of the last `STRIP` queries onto so many keys: all strips agree from the bottom right on."""
    seen = torch.ones(STRIP, width, dtype=torch.bool, device=device).tril(width - STRIP)
    return added_to_scores(~seen if window is None else ~seen.triu(width - STRIP - window + 1))


class LoopingKernel:
    """A kernel that runs one rectangle of a call at a time, as a batch of one.

    part_forward: q (b, N, T, H), k, v (b, K, J, H), the rectangle, scoring -> output (b, N, T, H), log-sum-exp (b, N,
        T).
    part_backward: dout, q, k, v, output, log-sum-exp, the rectangle, scoring -> its shares of dq, dk and dv; of the
        keys perhaps in a wider dtype.
    """

    part_forward: Callable[..., tuple[Tensor, Tensor]]
    part_backward: Callable[..., tuple[Tensor, Tensor, Tensor]]

    def forward(self, q: Tensor, k: Tensor, v: Tensor, ragged: Ragged, scoring: Scoring) -> tuple[Tensor, Tensor]:
        out = q.new_zeros(*q.shape[:2], v.shape[-1])
        lse = q.new_full((q.shape[1], len(q)), float("-inf"), dtype=wide(q))
        q, k, v, whole = map(_heads_first, (q, k, v, out))
        for part in self.parts(ragged, q, scoring):
            keys = k[:, :, part.keys], v[:, :, part.keys]
            out_part, lse_part = self.part_forward(q[:, :, part.queries], *keys, part, scoring)
            whole[:, :, part.queries], lse[:, part.queries] = out_part, lse_part[0]
        return out, lse

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, ragged: Ragged, scoring: Scoring
    ) -> tuple[Tensor, Tensor, Tensor]:
        grads = q.new_zeros(q.shape), *(x.new_zeros(x.shape, dtype=wide(x)) for x in (k, v))
        dq, dk, dv = map(_heads_first, grads)
        dtype = k.dtype
        dout, q, k, v, out = map(_heads_first, (dout, q, k, v, out))
        for part in self.parts(ragged, q, scoring):
            dout_part, q_part, out_part = (x[:, :, part.queries] for x in (dout, q, out))
            of_part = dout_part, q_part, k[:, :, part.keys], v[:, :, part.keys], out_part, lse[None, :, part.queries]
            dq_part, dk_part, dv_part = self.part_backward(*of_part, part, scoring)
            dq[:, :, part.queries] = dq_part
            dk[:, :, part.keys] += dk_part
            dv[:, :, part.keys] += dv_part
        return grads[0], grads[1].to(dtype), grads[2].to(dtype)

    def parts(self, ragged: Ragged, q_1NTH: Tensor, scoring: Scoring) -> list[Rectangle]:
        """Return the parts of a call as this kernel takes them."""
        return rectangles_of(ragged, scoring.window)


class EagerKernel(LoopingKernel):
    """Explicit matmuls: the specification of the other kernels. Any dtype and device; 16 bits are computed in float32.

    Queries take turns, so that memory does not grow with queries times keys.
    """

    def parts(self, ragged: Ragged, q_1NTH: Tensor, scoring: Scoring) -> list[Rectangle]:
        """Cut the rectangles further, and write causal masks out."""
        return [turn for part in rectangles_of(ragged, scoring.window) for turn in _turns(part, q_1NTH)]

    def part_forward(
        self, q_bNTH: Tensor, k_bKJH: Tensor, v_bKJH: Tensor, part: Rectangle, scoring: Scoring
    ) -> tuple[Tensor, Tensor]:
        q, k, v = (x.to(wide(x)) for x in (q_bNTH, k_bKJH, v_bKJH))
        scores_bKgTJ, _ = self._scores(q, k, part.mask, scoring)
        lse_bKgT = scores_bKgTJ.logsumexp(-1)
        out_bKgTH = torch.einsum("bkgtj,bkjh->bkgth", _exp_minus(scores_bKgTJ, lse_bKgT), v)
        return out_bKgTH.flatten(1, 2).to(q_bNTH.dtype), lse_bKgT.flatten(1, 2)

    def part_backward(
        self,
        dout_bNTH: Tensor,
        q_bNTH: Tensor,
        k_bKJH: Tensor,
        v_bKJH: Tensor,
        out_bNTH: Tensor,
        lse_bNT: Tensor,
        part: Rectangle,
        scoring: Scoring,
    ) -> tuple[Tensor, Tensor, Tensor]:
        dout, q, k, v, out = (x.to(wide(x)) for x in (dout_bNTH, q_bNTH, k_bKJH, v_bKJH, out_bNTH))
        scores, slope = self._scores(q, k, part.mask, scoring)
        dout, q, out, lse = (x.unflatten(1, (k.shape[1], -1)) for x in (dout, q, out, lse_bNT))
        p = _exp_minus(scores, lse)
        dv = torch.einsum("bkgtj,bkgth->bkjh", p, dout)
        dp = torch.einsum("bkgth,bkjh->bkgtj", dout, v)
        ds = p * (dp - (dout * out).sum(-1, keepdim=True)) * slope
        dq = torch.einsum("bkgtj,bkjh->bkgth", ds, k).flatten(1, 2)
        return dq.to(q_bNTH.dtype), torch.einsum("bkgtj,bkgth->bkjh", ds, q), dv

    def _scores(
        self, q_bNTH: Tensor, k_bKJH: Tensor, mask: Tensor | None, scoring: Scoring
    ) -> tuple[Tensor, Tensor | float]:
        """Compute scores, -inf for what is hidden, and their slope: the derivative by the product of query and key."""
        q_bKgTH = q_bNTH.unflatten(1, (k_bKJH.shape[1], -1))
        scores_bKgTJ = scoring.of(torch.einsum("bkgth,bkjh->bkgtj", q_bKgTH, k_bKJH))
        slope: Tensor | float = scoring.scale
        if scoring.softcap is not None:
            slope = scoring.scale * (1 - (scores_bKgTJ / scoring.softcap).square())
        if mask is not None:
            scores_bKgTJ = scores_bKgTJ + (mask if mask.ndim == 2 else mask[:, None]).to(scores_bKgTJ.dtype)
        return scores_bKgTJ, slope


class TorchCPUKernel(LoopingKernel):
    """`aten._scaled_dot_product_flash_attention_for_cpu`, which takes grouped heads and strided views."""

    def part_forward(
        self, q_bNTH: Tensor, k_bKJH: Tensor, v_bKJH: Tensor, part: Rectangle, scoring: Scoring
    ) -> tuple[Tensor, Tensor]:
        options = self._options(q_bNTH, part, scoring)
        return aten._scaled_dot_product_flash_attention_for_cpu(q_bNTH, k_bKJH, v_bKJH, 0.0, **options)

    def part_backward(
        self,
        dout_bNTH: Tensor,
        q_bNTH: Tensor,
        k_bKJH: Tensor,
        v_bKJH: Tensor,
        out_bNTH: Tensor,
        lse_bNT: Tensor,
        part: Rectangle,
        scoring: Scoring,
    ) -> tuple[Tensor, Tensor, Tensor]:
        rows = dout_bNTH, q_bNTH, k_bKJH, v_bKJH, out_bNTH
        options = self._options(q_bNTH, part, scoring)
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(*rows, lse_bNT, 0.0, **options)

    def _options(self, q: Tensor, part: Rectangle, scoring: Scoring) -> dict[str, Any]:
        assert scoring.softcap is None, "`tree_attention` refuses a soft-cap on this kernel"
        mask = part.mask
        if mask is not None:  # it may be of a layout that was made for another dtype
            mask = mask.double() if q.dtype == torch.float64 else mask.float()
        return {"is_causal": part.causal, "attn_mask": mask, "scale": scoring.scale}


def _turns(part: Rectangle, q_1NTH: Tensor) -> Iterator[Rectangle]:
    """Cut a part into those with at most `MOST_SCORES` scores, or of one query. A causal mask is written out."""
    first, end, num_keys = part.queries.start, part.queries.stop, _number(part.keys)
    height = max(1, MOST_SCORES // (q_1NTH.shape[1] * num_keys))
    for start in range(first, end, height):
        stop, mask = min(start + height, end), part.mask
        if part.causal:
            seen = torch.ones(stop - start, num_keys, dtype=torch.bool, device=q_1NTH.device).tril(start - first)
            mask = added_to_scores(~seen)
        elif mask is not None:
            mask = mask[start - first : stop - first]
        yield Rectangle(slice(start, stop), part.keys, mask)


def _number(rows: slice) -> int:
    number: int = rows.stop - rows.start
    return number


def _heads_first(x: Tensor) -> Tensor:
    """Return (T, N, H) as (1, N, T, H), without a copy unless the last axis has gaps, which the CPU kernel ignores."""
    return (x if x.stride(-1) == 1 else x.contiguous()).transpose(0, 1)[None]


def _exp_minus(scores: Tensor, lse: Tensor) -> Tensor:
    """Return `exp(scores - lse)`, with 0 if a query sees nothing (lse = -inf) instead of exp(-inf + inf)."""
    return torch.exp(scores - lse.masked_fill(lse == float("-inf"), 0)[..., None])
