"""Varlen kernels that loop over the blocks of a call: eager matmuls, and torch's flash attention for CPUs.

Legend as in `ragged.py`; b counts the rectangles of a block, g the query heads of a key/value head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from radixtrain.kernels.ragged import Ragged
from radixtrain.kernels.rectangles import Block, Blocks
from radixtrain.kernels.scoring import Scoring

__all__ = ["EagerKernel", "TorchCPUKernel"]

aten = torch.ops.aten


class _BlockwiseKernel:
    """A kernel that handles one block at a time. Its block functions have the batch axis of the block in front."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, ragged: Ragged, scoring: Scoring) -> tuple[Tensor, Tensor]:
        cut = ragged.blocks(scoring.window)
        if _is_one_call(cut, q, k):
            (block,) = cut.blocks
            out_1TNH, lse_1NT = self.block_forward(q[None], k[None], v[None], block, scoring)
            return out_1TNH[0], lse_1NT[0]
        out = q.new_empty(*q.shape[:2], v.shape[-1])
        lse = q.new_empty(q.shape[1], len(q), dtype=_wide(q))
        if cut.num_queries < len(q):
            out.zero_()
            lse.fill_(float("-inf"))
        for block in cut.blocks:
            out_bTNH, lse_bNT = self.block_forward(block.queries(q), block.keys(k), block.keys(v), block, scoring)
            block.queries(out).copy_(out_bTNH)
            block.queries(lse.t()).copy_(lse_bNT.transpose(1, 2))
        return out, lse

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, ragged: Ragged, scoring: Scoring
    ) -> tuple[Tensor, Tensor, Tensor]:
        cut = ragged.blocks(scoring.window)
        if _is_one_call(cut, q, k):
            (block,) = cut.blocks
            whole = dout[None], q[None], k[None], v[None], out[None], lse[None]
            dq, dk, dv = self.block_backward(*whole, block, scoring)
            return dq[0], dk[0], dv[0]
        meet = _wide(k) if cut.keys_meet else k.dtype
        dq = torch.zeros_like(q) if cut.num_queries < len(q) else torch.empty_like(q)
        dk, dv = torch.zeros_like(k, dtype=meet), torch.zeros_like(v, dtype=meet)
        for block in cut.blocks:
            q_side = (block.queries(x) for x in (dout, q, out))
            dout_block, q_block, out_block = q_side
            lse_block = block.queries(lse.t()).transpose(1, 2)
            keys = block.keys(k), block.keys(v)
            grads = self.block_backward(dout_block, q_block, *keys, out_block, lse_block, block, scoring)
            block.queries(dq).copy_(grads[0])
            _add_to_keys(dk, block, grads[1], cut.keys_meet)
            _add_to_keys(dv, block, grads[2], cut.keys_meet)
        return dq, dk.to(k.dtype), dv.to(v.dtype)

    def block_forward(
        self, q_bTNH: Tensor, k_bJKH: Tensor, v_bJKH: Tensor, block: Block, scoring: Scoring
    ) -> tuple[Tensor, Tensor]:
        """(b, T, N, H) and (b, N, T)."""
        raise NotImplementedError

    def block_backward(
        self, dout_bTNH: Tensor, q_bTNH: Tensor, k_bJKH: Tensor, v_bJKH: Tensor, out_bTNH: Tensor, lse_bNT: Tensor,
        block: Block, scoring: Scoring,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        raise NotImplementedError


class EagerKernel(_BlockwiseKernel):
    """Explicit matmuls: what the other kernels compute, in any dtype, anywhere. 16-bit inputs go through float32."""

    def block_forward(
        self, q_bTNH: Tensor, k_bJKH: Tensor, v_bJKH: Tensor, block: Block, scoring: Scoring
    ) -> tuple[Tensor, Tensor]:
        scores_bKgTJ, _ = self._scores(q_bTNH, k_bJKH, _mask_of(block, q_bTNH.device), scoring)
        lse_bKgT = scores_bKgTJ.logsumexp(-1)
        out_bTKgH = torch.einsum("bkgtj,bjkh->btkgh", _exp_minus(scores_bKgTJ, lse_bKgT), v_bJKH.to(_wide(v_bJKH)))
        return out_bTKgH.flatten(2, 3).to(q_bTNH.dtype), lse_bKgT.flatten(1, 2)

    def block_backward(
        self, dout_bTNH: Tensor, q_bTNH: Tensor, k_bJKH: Tensor, v_bJKH: Tensor, out_bTNH: Tensor, lse_bNT: Tensor,
        block: Block, scoring: Scoring,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        dtype, wide = q_bTNH.dtype, _wide(q_bTNH)
        groups = (k_bJKH.shape[2], q_bTNH.shape[2] // k_bJKH.shape[2])
        dout, out, q = (x.to(wide).unflatten(2, groups) for x in (dout_bTNH, out_bTNH, q_bTNH))
        k, v = k_bJKH.to(wide), v_bJKH.to(wide)
        scores, slope = self._scores(q_bTNH, k_bJKH, _mask_of(block, q_bTNH.device), scoring)
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
        """Scores, -inf where hidden, and their slope: the derivative by the products of queries and keys."""
        q_bTKgH = q_bTNH.to(_wide(q_bTNH)).unflatten(2, (k_bJKH.shape[2], -1))
        scores_bKgTJ = scoring.of(torch.einsum("btkgh,bjkh->bkgtj", q_bTKgH, k_bJKH.to(_wide(k_bJKH))))
        slope: Tensor | float = scoring.scale
        if scoring.softcap is not None:
            slope = scoring.scale * (1 - (scores_bKgTJ / scoring.softcap).square())
        if mask is not None:
            scores_bKgTJ = scores_bKgTJ + (mask if mask.ndim == 2 else mask[:, None])
        return scores_bKgTJ, slope


class TorchCPUKernel(_BlockwiseKernel):
    """`aten._scaled_dot_product_flash_attention_for_cpu`: takes grouped heads and strided views as they are."""

    def block_forward(
        self, q_bTNH: Tensor, k_bJKH: Tensor, v_bJKH: Tensor, block: Block, scoring: Scoring
    ) -> tuple[Tensor, Tensor]:
        out_bNTH, lse_bNT = aten._scaled_dot_product_flash_attention_for_cpu(
            *(_heads_first(x) for x in (q_bTNH, k_bJKH, v_bJKH)), 0.0, **self._options(q_bTNH, block, scoring)
        )
        return out_bNTH.transpose(1, 2), lse_bNT

    def block_backward(
        self, dout_bTNH: Tensor, q_bTNH: Tensor, k_bJKH: Tensor, v_bJKH: Tensor, out_bTNH: Tensor, lse_bNT: Tensor,
        block: Block, scoring: Scoring,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        rows = (_heads_first(x) for x in (dout_bTNH, q_bTNH, k_bJKH, v_bJKH, out_bTNH))
        grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *rows, lse_bNT, 0.0, **self._options(q_bTNH, block, scoring)
        )
        dq, dk, dv = (grad.transpose(1, 2) for grad in grads)
        return dq, dk, dv

    def _options(self, q: Tensor, block: Block, scoring: Scoring) -> dict[str, Any]:
        assert scoring.softcap is None, "the door refuses a soft-cap on this kernel"
        mask = block.mask
        if mask is not None and q.dtype == torch.float64:
            mask = mask.double()  # it reads a float32 mask as if it were float64, and says nothing
        return {"is_causal": block.causal, "attn_mask": mask, "scale": scoring.scale}


def _is_one_call(cut: Blocks, q: Tensor, k: Tensor) -> bool:
    """Whether a single rectangle is all there is, whose results need no copy."""
    if len(cut.blocks) != 1 or cut.blocks[0].number != 1:
        return False
    return cut.blocks[0].num_queries == len(q) and cut.blocks[0].num_keys == len(k)


def _mask_of(block: Block, device: torch.device) -> Tensor | None:
    """What is hidden in a block, written out."""
    if not block.causal:
        return block.mask
    hidden = torch.ones(block.num_queries, block.num_keys, dtype=torch.bool, device=device).triu(1)
    return torch.zeros(hidden.shape, device=device).masked_fill_(hidden, float("-inf"))


def _add_to_keys(total: Tensor, block: Block, share_bJKH: Tensor, meet: bool) -> None:
    """Rectangles of one block may share keys too, so those are added one after the other."""
    if not meet:
        block.keys(total).copy_(share_bJKH)
    elif block.key_step >= block.num_keys or block.number == 1:
        block.keys(total).add_(share_bJKH)
    else:
        for n, share_JKH in enumerate(share_bJKH):
            first = block.first_key + n * block.key_step
            total[first : first + block.num_keys] += share_JKH


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _heads_first(x_bTNH: Tensor) -> Tensor:
    x = x_bTNH if x_bTNH.stride(-1) == 1 else x_bTNH.contiguous()  # the CPU kernel does not look at the last stride
    return x.transpose(1, 2)


def _exp_minus(scores: Tensor, lse: Tensor) -> Tensor:
    """`exp(scores - lse)`, with 0 where a query sees nothing (lse = -inf) instead of exp(-inf + inf)."""
    return torch.exp(scores - lse.masked_fill(lse == float("-inf"), 0)[..., None])
