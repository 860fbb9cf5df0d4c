"""Varlen kernels that loop over rectangles of queries and keys: eager matmuls, and torch's flash attention for CPUs.

Legend as in `varlen_args.py`; b counts the rectangles of a part, g the query heads of a key/value head.

torch's CPU flash kernel computes whole rectangles: below 512 keys its `is_causal` hides half of what it has computed.
So a causal entry is cut into strips of queries, each with the keys that any of its queries sees and a mask for the
corner; a long entry is left to the kernel, which then skips most of what it would hide. Rectangles of one shape whose
rows lie equally far apart are one call with a batch axis, as views: nothing is copied, and 16 suffixes of one length
cost one call.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from radixtrain.kernels.varlen_args import Ragged, Scoring

aten = torch.ops.aten
STRIP = 64  # queries of a strip: with more of them more is computed and hidden, with fewer there are more calls
# Queries at which `is_causal` is as fast as strips, which take 0.66 of its time at 512, 0.80 at 1024, 0.99 at 2304.
LONG = 1536
# Scores that the eager kernel writes at once, 256 MB in float32: about six such tensors are alive in its backward.
MOST_SCORES = 2**26


@dataclass(frozen=True, eq=False)
class Rectangles:
    """`number` rectangles of `num_queries` x `num_keys`, the first at `first_query`, `first_key`.

    query_step, key_step: rows from one rectangle to the next.
    mask: None if every query sees every key; (queries, keys) or (number, 1, queries, keys), float32, 0 or -inf.
    causal: without a mask, of as many keys as queries: a query sees no later key.
    """

    first_query: int
    num_queries: int
    first_key: int
    num_keys: int
    mask: Tensor | None = None
    causal: bool = False
    number: int = 1
    query_step: int = 0
    key_step: int = 0

    def queries(self, x: Tensor) -> Tensor:
        """Return a view, (number, num_queries, ...), of the rows of a query-side tensor (T, ...)."""
        return _equal_runs(x, self.number, self.query_step, self.first_query, self.num_queries)

    def keys(self, x: Tensor) -> Tensor:
        """Return a view, (number, num_keys, ...), of the rows of a key-side tensor (J, ...)."""
        return _equal_runs(x, self.number, self.key_step, self.first_key, self.num_keys)


class Schedule(NamedTuple):
    """A call, cut into rectangles.

    parts: no query is in two, but keys may be.
    num_queries: queries covered by some part; the rest see no key.
    """

    parts: list[Rectangles]
    num_queries: int


def schedule_of(ragged: Ragged, window: int | None = None) -> Schedule:
    """Return the rectangles of a call; kept in the call, because every layer asks.

    Without `bounds` this waits for the device: only the eager kernel on CUDA comes here.
    """
    assert ragged.causal or window is None, "a window counts from the last key"
    if window not in ragged.schedules:
        ragged.schedules[window] = _schedule(ragged, window)
    return ragged.schedules[window]


def _schedule(ragged: Ragged, window: int | None) -> Schedule:
    bounds = ragged.bounds
    if bounds is None:
        q, k = ragged.cu_seqlens_q.tolist(), ragged.cu_seqlens_k.tolist()
        bounds = tuple((*queries, *keys) for queries, keys in zip(pairwise(q), pairwise(k), strict=True))
    masks = ragged.masks or (None,) * len(bounds)
    filled = [
        (*entry, mask) for entry, mask in zip(bounds, masks, strict=True) if entry[1] > entry[0] and entry[3] > entry[2]
    ]
    masked = [Rectangles(q0, q1 - q0, k0, k1 - k0, mask) for q0, q1, k0, k1, mask in filled if mask is not None]
    plain = [Rectangles(q0, q1 - q0, k0, k1 - k0) for q0, q1, k0, k1, mask in filled if mask is None]
    strips = [strip for entry in plain for strip in _strips(entry, window)] if ragged.causal else plain
    parts = list(_batched(strips))
    if ragged.causal:
        parts = _with_corners(parts, window, ragged.cu_seqlens_q.device)
    parts += _batched(masked)
    return Schedule(parts, sum(part.number * part.num_queries for part in parts))


def _strips(entry: Rectangles, window: int | None) -> Iterator[Rectangles]:
    """Cut a causal entry into strips of about equal height, each with the keys that its queries see; not a long one.

    Queries that come before the first key see none, and are left out.
    """
    if window is None and entry.num_queries == entry.num_keys >= LONG:
        yield replace(entry, causal=True)
        return
    num_queries, num_keys = min(entry.num_queries, entry.num_keys), entry.num_keys
    first_query = entry.first_query + entry.num_queries - num_queries
    number = -(-num_queries // STRIP)
    bounds = [num_queries * n // number for n in range(number + 1)]
    for start, stop in pairwise(bounds):
        last_key = num_keys - (num_queries - stop)
        first_key = 0 if window is None else max(0, last_key - (stop - start) - window + 1)
        yield Rectangles(first_query + start, stop - start, entry.first_key + first_key, last_key - first_key)


def _batched(parts: list[Rectangles]) -> Iterator[Rectangles]:
    """Join single rectangles of one shape whose rows lie equally far apart."""
    by_shape = sorted(parts, key=lambda part: (part.num_keys, part.num_queries))  # stable: rows stay in order
    run: list[Rectangles] = []
    for part in by_shape:
        if run and not _extends(run, part):
            yield _joined(run)
            run = []
        run.append(part)
    if run:
        yield _joined(run)


def _extends(run: list[Rectangles], part: Rectangles) -> bool:
    last = run[-1]
    if part.causal or (last.num_keys, last.num_queries) != (part.num_keys, part.num_queries):
        return False  # a single long one keeps all cores busy, and the eager kernel materialises its scores
    steps = part.first_query - last.first_query, part.first_key - last.first_key
    return min(steps) >= 0 and (len(run) == 1 or steps == _steps(run))


def _steps(run: list[Rectangles]) -> tuple[int, int]:
    return run[1].first_query - run[0].first_query, run[1].first_key - run[0].first_key


def _joined(run: list[Rectangles]) -> Rectangles:
    if len(run) == 1:
        return run[0]
    masks = [part.mask for part in run if part.mask is not None]
    query_step, key_step = _steps(run)
    mask = torch.stack(masks)[:, None] if masks else None
    return replace(run[0], mask=mask, number=len(run), query_step=query_step, key_step=key_step)


def _with_corners(parts: list[Rectangles], window: int | None, device: torch.device) -> list[Rectangles]:
    """Give the parts causal masks, which are views of one mask: they agree from the bottom right corner on."""
    masked = [part for part in parts if not part.causal]
    height = max((part.num_queries for part in masked), default=0)
    width = max((part.num_keys for part in masked), default=0)
    seen = torch.ones(height, width, dtype=torch.bool, device=device).tril(width - height)
    if window is not None:
        seen = seen.triu(width - height - window + 1)
    mask = torch.zeros(height, width, device=device).masked_fill_(~seen, float("-inf"))
    return [
        part if part.causal else replace(part, mask=mask[height - part.num_queries :, width - part.num_keys :])
        for part in parts
    ]


def _equal_runs(x: Tensor, number: int, step: int, first: int, length: int) -> Tensor:
    if number == 1:
        return x[None, first : first + length]
    row = x.stride(0)
    return x.as_strided((number, length, *x.shape[1:]), (step * row, *x.stride()), x.storage_offset() + first * row)


class LoopingKernel:
    """A kernel that runs one part of a call at a time: equal rectangles, along the first axis b."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, ragged: Ragged, scoring: Scoring) -> tuple[Tensor, Tensor]:
        schedule = schedule_of(ragged, scoring.window)
        parts = self.parts(schedule, q)
        if _is_one_call(parts, q, k):
            out_1TNH, lse_1NT = self.part_forward(q[None], k[None], v[None], parts[0], scoring)
            return out_1TNH[0], lse_1NT[0]
        out = q.new_empty(*q.shape[:2], v.shape[-1])
        lse = q.new_empty(q.shape[1], len(q), dtype=_wide(q))
        if schedule.num_queries < len(q):
            out.zero_()
            lse.fill_(float("-inf"))
        for part in parts:
            out_bTNH, lse_bNT = self.part_forward(part.queries(q), part.keys(k), part.keys(v), part, scoring)
            part.queries(out).copy_(out_bTNH)
            part.queries(lse.t()).copy_(lse_bNT.transpose(1, 2))
        return out, lse

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, ragged: Ragged, scoring: Scoring
    ) -> tuple[Tensor, Tensor, Tensor]:
        schedule = schedule_of(ragged, scoring.window)
        parts = self.parts(schedule, q)
        if _is_one_call(parts, q, k):
            whole = dout[None], q[None], k[None], v[None], out[None], lse[None]
            dq, dk, dv = self.part_backward(*whole, parts[0], scoring)
            return dq[0], dk[0].to(k.dtype), dv[0].to(v.dtype)
        dq = torch.zeros_like(q) if schedule.num_queries < len(q) else torch.empty_like(q)
        dk, dv = (torch.zeros_like(x, dtype=_wide(x)) for x in (k, v))
        for part in parts:
            dout_part, q_part, out_part = map(part.queries, (dout, q, out))
            lse_part = part.queries(lse.t()).transpose(1, 2)
            keys = part.keys(k), part.keys(v)
            grads = self.part_backward(dout_part, q_part, *keys, out_part, lse_part, part, scoring)
            part.queries(dq).copy_(grads[0])
            _add_to_keys(dk, part, grads[1])
            _add_to_keys(dv, part, grads[2])
        return dq, dk.to(k.dtype), dv.to(v.dtype)

    def parts(self, schedule: Schedule, q: Tensor) -> list[Rectangles]:
        """Return the parts of a call as this kernel takes them."""
        return schedule.parts

    def part_forward(
        self, q_bTNH: Tensor, k_bJKH: Tensor, v_bJKH: Tensor, part: Rectangles, scoring: Scoring
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
        part: Rectangles,
        scoring: Scoring,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the shares of a part in dq, dk and dv; of the keys perhaps in a wider dtype."""
        raise NotImplementedError


class EagerKernel(LoopingKernel):
    """Explicit matmuls: the specification of the other kernels. Any dtype and device; 16 bits are computed in float32.

    Queries take turns, so that memory does not grow with queries times keys.
    """

    def parts(self, schedule: Schedule, q: Tensor) -> list[Rectangles]:
        """Cut the parts further, and write causal masks out."""
        return [turn for part in schedule.parts for turn in _turns(part, q)]

    def part_forward(
        self, q_bTNH: Tensor, k_bJKH: Tensor, v_bJKH: Tensor, part: Rectangles, scoring: Scoring
    ) -> tuple[Tensor, Tensor]:
        q, k, v = (x.to(_wide(x)) for x in (q_bTNH, k_bJKH, v_bJKH))
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
        part: Rectangles,
        scoring: Scoring,
    ) -> tuple[Tensor, Tensor, Tensor]:
        dout, q, k, v, out = (x.to(_wide(x)) for x in (dout_bTNH, q_bTNH, k_bJKH, v_bJKH, out_bTNH))
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
        self, q_bTNH: Tensor, k_bJKH: Tensor, v_bJKH: Tensor, part: Rectangles, scoring: Scoring
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
        part: Rectangles,
        scoring: Scoring,
    ) -> tuple[Tensor, Tensor, Tensor]:
        rows = map(_heads_first, (dout_bTNH, q_bTNH, k_bJKH, v_bJKH, out_bTNH))
        grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *rows, lse_bNT, 0.0, **self._options(q_bTNH, part, scoring)
        )
        dq, dk, dv = [grad.transpose(1, 2) for grad in grads]
        return dq, dk, dv

    def _options(self, q: Tensor, part: Rectangles, scoring: Scoring) -> dict[str, Any]:
        assert scoring.softcap is None, "`tree_attention` refuses a soft-cap on this kernel"
        mask = part.mask
        if mask is not None:  # it may be of a layout that was made for another dtype
            mask = mask.double() if q.dtype == torch.float64 else mask.float()
        return {"is_causal": part.causal, "attn_mask": mask, "scale": scoring.scale}


def _is_one_call(parts: list[Rectangles], q: Tensor, k: Tensor) -> bool:
    """Return whether one rectangle covers the call, so that its results need no copy."""
    if len(parts) != 1 or parts[0].number != 1:
        return False
    return parts[0].num_queries == len(q) and parts[0].num_keys == len(k)


def _turns(part: Rectangles, q: Tensor) -> Iterator[Rectangles]:
    """Cut a part into those with at most `MOST_SCORES` scores, or of one query. A causal mask is written out."""
    height = max(1, MOST_SCORES // (part.number * q.shape[1] * part.num_keys))
    for start in range(0, part.num_queries, height):
        stop, mask = min(start + height, part.num_queries), part.mask
        if part.causal:
            hidden = torch.ones(stop - start, part.num_keys, dtype=torch.bool, device=q.device).triu(1 + start)
            mask = torch.zeros(hidden.shape, device=q.device).masked_fill_(hidden, float("-inf"))
        elif mask is not None:
            mask = mask[..., start:stop, :]
        yield replace(part, first_query=part.first_query + start, num_queries=stop - start, mask=mask, causal=False)


def _add_to_keys(total: Tensor, part: Rectangles, share_bJKH: Tensor) -> None:
    """Add the share of each rectangle to its keys, one after the other if rectangles of a part overlap."""
    if part.key_step >= part.num_keys or part.number == 1:
        part.keys(total).add_(share_bJKH)
    else:
        for n, share_JKH in enumerate(share_bJKH):
            first = part.first_key + n * part.key_step
            total[first : first + part.num_keys] += share_JKH


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _heads_first(x_bTNH: Tensor) -> Tensor:
    x = x_bTNH if x_bTNH.stride(-1) == 1 else x_bTNH.contiguous()  # the CPU kernel ignores the last stride
    return x.transpose(1, 2)


def _exp_minus(scores: Tensor, lse: Tensor) -> Tensor:
    """Return `exp(scores - lse)`, with 0 if a query sees nothing (lse = -inf) instead of exp(-inf + inf)."""
    return torch.exp(scores - lse.masked_fill(lse == float("-inf"), 0)[..., None])
