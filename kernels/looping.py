"""Varlen kernels that loop over the rectangles of a call: eager matmuls, and torch's flash attention for CPUs.

Legend as in `ragged.py`; b counts the rectangles of a part, g the query heads of a key/value head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from radixtrain.kernels.ragged import Ragged
from radixtrain.kernels.rectangles import Cut, Rectangles
from radixtrain.kernels.scoring import Scoring

__all__ = ["EagerKernel", "LoopingKernel", "TorchCPUKernel"]

aten = torch.ops.aten


class LoopingKernel:
    """A kernel that runs one part of a call at a time: some equal rectangles, which are the first axis b."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, ragged: Ragged, scoring: Scoring) -> tuple[Tensor, Tensor]:
        cut = ragged.rectangles(scoring.window)
        if _is_one_call(cut, q, k):
            (part,) = cut.parts
            out_1TNH, lse_1NT = self.part_forward(q[None], k[None], v[None], part, scoring)
            return out_1TNH[0], lse_1NT[0]
        out = q.new_empty(*q.shape[:2], v.shape[-1])
        lse = q.new_empty(q.shape[1], len(q), dtype=_wide(q))
        if cut.num_queries < len(q):
            out.zero_()
            lse.fill_(float("-inf"))
        for part in cut.parts:
            out_bTNH, lse_bNT = self.part_forward(part.queries(q), part.keys(k), part.keys(v), part, scoring)
            part.queries(out).copy_(out_bTNH)
            part.queries(lse.t()).copy_(lse_bNT.transpose(1, 2))
        return out, lse

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, ragged: Ragged, scoring: Scoring
    ) -> tuple[Tensor, Tensor, Tensor]:
        cut = ragged.rectangles(scoring.window)
        if _is_one_call(cut, q, k):
            (part,) = cut.parts
            whole = dout[None], q[None], k[None], v[None], out[None], lse[None]
            dq, dk, dv = self.part_backward(*whole, part, scoring)
            return dq[0], dk[0], dv[0]
        meet = _wide(k) if cut.keys_meet else k.dtype
        dq = torch.zeros_like(q) if cut.num_queries < len(q) else torch.empty_like(q)
        dk, dv = torch.zeros_like(k, dtype=meet), torch.zeros_like(v, dtype=meet)
        for part in cut.parts:
            q_side = (part.queries(x) for x in (dout, q, out))
            dout_part, q_part, out_part = q_side
            lse_part = part.queries(lse.t()).transpose(1, 2)
            keys = part.keys(k), part.keys(v)
            grads = self.part_backward(dout_part, q_part, *keys, out_part, lse_part, part, scoring)
            part.queries(dq).copy_(grads[0])
            _add_to_keys(dk, part, grads[1], cut.keys_meet)
            _add_to_keys(dv, part, grads[2], cut.keys_meet)
        return dq, dk.to(k.dtype), dv.to(v.dtype)

    def part_forward(
        self, q_bTNH: Tensor, k_bJKH: Tensor, v_bJKH: Tensor, part: Rectangles, scoring: Scoring
    ) -> tuple[Tensor, Tensor]:
        """(b, T, N, H) and (b, N, T)."""
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
        raise NotImplementedError


class EagerKernel(LoopingKernel):
    """Explicit matmuls: the specification of the others, in any dtype on any device. Computes 16 bits in float32."""

    def part_forward(
        self, q_bTNH: Tensor, k_bJKH: Tensor, v_bJKH: Tensor, part: Rectangles, scoring: Scoring
    ) -> tuple[Tensor, Tensor]:
        scores_bKgTJ, _ = self._scores(q_bTNH, k_bJKH, _mask_of(part, q_bTNH.device), scoring)
        lse_bKgT = scores_bKgTJ.logsumexp(-1)
        out_bTKgH = torch.einsum("bkgtj,bjkh->btkgh", _exp_minus(scores_bKgTJ, lse_bKgT), v_bJKH.to(_wide(v_bJKH)))
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
        dtype, wide = q_bTNH.dtype, _wide(q_bTNH)
        groups = (k_bJKH.shape[2], q_bTNH.shape[2] // k_bJKH.shape[2])
        dout, out, q = (x.to(wide).unflatten(2, groups) for x in (dout_bTNH, out_bTNH, q_bTNH))
        k, v = k_bJKH.to(wide), v_bJKH.to(wide)
        scores, slope = self._scores(q_bTNH, k_bJKH, _mask_of(part, q_bTNH.device), scoring)
        p = _exp_minus(scores, lse_bNT.unflatten(1, groups))
        dv = torch.einsum("bkgtj,btkgh->bjkh", p, dout)
        dp = torch.einsum("btkgh,bjkh->bkgtj", dout, v)
        delta_bKgT = (dout * out).sum(-1).permute(0, 2, 3, 1)
        ds = p * (dp - delta_bKgT[..., None]) * slope
        dq = torch.einsum("bkgtj,bjkh->btkgh", ds, k).flatten(2, 3)
        dk = torch.einsum("bkgtj,btkgh->bjkh", ds, q)
        return dq.to(dtype), dk.to(dtype), dv.to(dtype)

    def _scores(
        self, q_bTNH: Tensor, k_bJKH: Tensor, mask: Tensor | None, scoring: Scoring
    ) -> tuple[Tensor, Tensor | float]:
        """Scores, -inf for what is hidden, and their slope: the derivative by the products of queries and keys."""
        q_bTKgH = q_bTNH.to(_wide(q_bTNH)).unflatten(2, (k_bJKH.shape[2], -1))
        scores_bKgTJ = scoring.of(torch.einsum("btkgh,bjkh->bkgtj", q_bTKgH, k_bJKH.to(_wide(k_bJKH))))
        slope: Tensor | float = scoring.scale
        if scoring.softcap is not None:
            slope = scoring.scale * (1 - (scores_bKgTJ / scoring.softcap).square())
        if mask is not None:
            scores_bKgTJ = scores_bKgTJ + (mask if mask.ndim == 2 else mask[:, None])
        return scores_bKgTJ, slope


class TorchCPUKernel(LoopingKernel):
    """`aten._scaled_dot_product_flash_attention_for_cpu`: takes grouped heads and strided views as they are."""

    def part_forward(
        self, q_bTNH: Tensor, k_bJKH: Tensor, v_bJKH: Tensor, part: Rectangles, scoring: Scoring
    ) -> tuple[Tensor, Tensor]:
        out_bNTH, lse_bNT = aten._scaled_dot_product_flash_attention_for_cpu(
            *(_heads_first(x) for x in (q_bTNH, k_bJKH, v_bJKH)), 0.0, **self._options(q_bTNH, part, scoring)
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
        rows = (_heads_first(x) for x in (dout_bTNH, q_bTNH, k_bJKH, v_bJKH, out_bTNH))
        grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *rows, lse_bNT, 0.0, **self._options(q_bTNH, part, scoring)
        )
        dq, dk, dv = (grad.transpose(1, 2) for grad in grads)
        return dq, dk, dv

    def _options(self, q: Tensor, part: Rectangles, scoring: Scoring) -> dict[str, Any]:
        assert scoring.softcap is None, "`tree_attention` refuses a soft-cap on this kernel"
        mask = part.mask
        if mask is not None and q.dtype == torch.float64:
            mask = mask.double()  # it would read a float32 mask as if it were float64
        return {"is_causal": part.causal, "attn_mask": mask, "scale": scoring.scale}


def _is_one_call(cut: Cut, q: Tensor, k: Tensor) -> bool:
    """Whether one rectangle covers the call, so that its results need no copy."""
    if len(cut.parts) != 1 or cut.parts[0].number != 1:
        return False
    return cut.parts[0].num_queries == len(q) and cut.parts[0].num_keys == len(k)


def _mask_of(part: Rectangles, device: torch.device) -> Tensor | None:
    """The mask of a part, a causal one written out."""
    if not part.causal:
        return part.mask
    hidden = torch.ones(part.num_queries, part.num_keys, dtype=torch.bool, device=device).triu(1)
    return torch.zeros(hidden.shape, device=device).masked_fill_(hidden, float("-inf"))


def _add_to_keys(total: Tensor, part: Rectangles, share_bJKH: Tensor, meet: bool) -> None:
    """Rectangles of one part may share keys too; then they are added one after the other."""
    if not meet:
        part.keys(total).copy_(share_bJKH)
    elif part.key_step >= part.num_keys or part.number == 1:
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
    """`exp(scores - lse)`, with 0 if a query sees nothing (lse = -inf) instead of exp(-inf + inf)."""
    return torch.exp(scores - lse.masked_fill(lse == float("-inf"), 0)[..., None])
