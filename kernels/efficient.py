"""The memory-efficient kernel in torch, for CUDA: float32, any head dim.

Legend in `varlen_args.py`; E entries, P the longest of them in queries, rounded up to 32.

What `aten._efficient_attention_forward` and `_backward` do, read in `mem_eff_attention/kernel_forward.h` and
`kernel_backward.h`, which torch ships, and in `attention_backward.cu` (torch 2.11, and 2.13 alike):

- Head counts must agree, and strides be multiples of 16 bytes: keys and values are repeated for grouped heads, head
  dims filled up with zeros, which change no score.
- `window_size` w lets query i see keys j with `i - w < j <= i`; mask type 2 is bottom-right causal.
- The log-sum-exp is (E, N, P), natural, undefined beyond an entry's last block. The backward wants +inf there.
- The backward computes `p = exp(scores - lse)` and `delta = rowsum(dout * out)` from the lse and out that it is given:
  a merged out and lse give a piece's share. It reads `out` as if it were contiguous.
- Its window counts from the top left, `i - w < j`, however the causal mask counts: gradients are wrong unless an entry
  has as many queries as keys, as an H100 showed. So there the backward gets a row without weight for every other key.
- It adds up dq, in float32, in a workspace of E x N x P x H, whatever the lengths: 34 GB for a prompt of 32k and 128
  short suffixes, 16 heads of 128. So a backward call gets as many entries as `WORKSPACE` has room for. The order of its
  sums is fixed only under `torch.use_deterministic_algorithms(True)`.

No tensor has queries times keys, which are 69 GB for 32k queries onto 32k keys with 16 heads in float32. There the
repeated keys and values and their gradients are 1.1 GB, dq and its workspace 0.5 GB (head dim 128).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from radixtrain.kernels.functions import wide
from radixtrain.kernels.varlen_args import Ragged, Scoring

aten = torch.ops.aten
EFFICIENT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
BOTTOM_RIGHT = 2  # causal, as `custom_mask_type`; 0 is no mask
LSE_ALIGNMENT = 32
WORKSPACE = 2**30  # bytes: entries of one backward call, unless a single one needs more


class EfficientKernel:
    """`aten._efficient_attention_forward` / `_backward` for any head dim, in float32, float16 and bfloat16."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, ragged: Ragged, scoring: Scoring) -> tuple[Tensor, Tensor]:
        out_1TNH, lse_ENP, *_ = aten._efficient_attention_forward(
            *_batch_of_one(q, k, v),
            None,  # bias
            *ragged.arguments,
            0.0,  # dropout
            BOTTOM_RIGHT if ragged.causal else 0,
            True,  # the log-sum-exp too
            **_modifiers(ragged, scoring),
        )
        entry, position = _places(ragged, len(q))
        return out_1TNH[0, ..., : q.shape[-1]], lse_ENP[entry, :, position].t().contiguous()

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, ragged: Ragged, scoring: Scoring
    ) -> tuple[Tensor, Tensor, Tensor]:
        if scoring.window is not None and ragged.cu_seqlens_q is not ragged.cu_seqlens_k:
            return self._backward_of_a_window(dout, q, k, v, out, lse, ragged, scoring)
        lse_ENP = _padded_per_entry(lse, ragged)
        tensors = _batch_of_one(dout, q, k, v, out.contiguous())
        num_entries, num_heads, longest = lse_ENP.shape
        at_once = max(1, WORKSPACE // (4 * num_heads * longest * tensors[1].shape[-1]))
        grads = _some_entries(tensors, lse_ENP, ragged, scoring, 0, at_once)
        for first in range(at_once, num_entries, at_once):
            shares = _some_entries(tensors, lse_ENP, ragged, scoring, first, at_once)
            starts = ragged.cu_seqlens_q[first], *[ragged.cu_seqlens_k[first]] * 2
            grads = [_from_row_on(*each) for each in zip(starts, grads, shares, strict=True)]
        dq, dk, dv = (grad[0, ..., : q.shape[-1]] for grad in grads)
        return dq, _sum_of_groups(dk, k), _sum_of_groups(dv, v)

    def _backward_of_a_window(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, ragged: Ragged, scoring: Scoring
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Pad the queries to as many as keys: a key without a query gets a row of zeros with a log-sum-exp of +inf."""
        entry, _ = _places(ragged, len(q))
        before = (ragged.cu_seqlens_k - ragged.cu_seqlens_q)[1:]  # keys without a query, up to the end of each entry
        beside = before[entry] + torch.arange(len(q), device=q.device)
        dout, q, out = (x.new_zeros(len(k), *x.shape[1:]).index_copy_(0, beside, x) for x in (dout, q, out))
        lse = lse.new_full((len(lse), len(k)), float("inf")).index_copy_(1, beside, lse)
        keys, longest = ragged.cu_seqlens_k, ragged.max_seqlen_k
        even = Ragged(keys, keys, longest, longest, causal=True)
        dq, dk, dv = self.backward(dout, q, k, v, out, lse, even, scoring)
        return dq.index_select(0, beside), dk, dv


def _batch_of_one(*tensors: Tensor) -> list[Tensor]:
    """Reshape to (1, rows, N, H'): N the head count of the first tensor, a query's, and H' a multiple of 16 bytes."""
    num_heads, head_dim = tensors[0].shape[1:]
    extra = -head_dim % (16 // tensors[0].element_size())
    filled = [pad(x, (0, extra)) if extra else x if x.stride(-1) == 1 else x.contiguous() for x in tensors]
    groups = [num_heads // x.shape[1] for x in tensors]
    return [(x if n == 1 else x.repeat_interleave(n, 1))[None] for x, n in zip(filled, groups, strict=True)]


def _modifiers(ragged: Ragged, scoring: Scoring) -> dict[str, Any]:
    assert scoring.softcap is None, "`tree_attention` refuses a soft-cap on this kernel"
    assert ragged.causal or scoring.window is None, "a window counts from the last key"
    return {"scale": scoring.scale, "window_size": scoring.window}


def _places(ragged: Ragged, num_queries: int) -> tuple[Tensor, Tensor]:
    """Return the entry of each query and its position there, (T,), int64, computed on the device."""
    starts = ragged.cu_seqlens_q.long()
    rows = torch.arange(num_queries, device=starts.device)
    entry = torch.searchsorted(starts, rows, right=True) - 1
    return entry, rows - starts[entry]


def _padded_per_entry(lse: Tensor, ragged: Ragged) -> Tensor:
    """Return the log-sum-exp (N, T) as the kernel lays it out, (E, N, P)."""
    num_entries, num_heads = len(ragged.cu_seqlens_q) - 1, len(lse)
    longest = -(-ragged.max_seqlen_q // LSE_ALIGNMENT) * LSE_ALIGNMENT
    entry, position = _places(ragged, lse.shape[1])
    lse_ENP = lse.new_full((num_entries, num_heads, longest), float("inf"))
    lse_ENP[entry, :, position] = lse.t()
    return lse_ENP


def _some_entries(
    tensors: list[Tensor], lse_ENP: Tensor, ragged: Ragged, scoring: Scoring, first: int, number: int
) -> list[Tensor]:
    """Compute dq, dk, dv, (1, rows, N, H'), of some entries. Rows of other entries are undefined."""
    dout, q, k, v, out = tensors
    entries, bounds = slice(first, first + number), slice(first, first + number + 1)
    some = replace(ragged, cu_seqlens_q=ragged.cu_seqlens_q[bounds], cu_seqlens_k=ragged.cu_seqlens_k[bounds])
    no_dropout = torch.empty((), dtype=torch.int64, device=q.device)  # the philox state, unread without dropout
    dq, dk, dv, _ = aten._efficient_attention_backward(
        *(dout, q, k, v, None, out),
        *some.arguments,
        lse_ENP[entries],
        0.0,  # dropout
        no_dropout,
        no_dropout,
        BOTTOM_RIGHT if ragged.causal else 0,
        False,  # no gradient of a bias
        **_modifiers(ragged, scoring),
    )
    return [dq, dk, dv]


def _from_row_on(start: Tensor, before: Tensor, after: Tensor) -> Tensor:
    """Take the rows before `start`, a number on the device, from `before`, and the others from `after`."""
    rows = torch.arange(before.shape[1], device=before.device)
    return torch.where((rows >= start)[:, None, None], after, before)


def _sum_of_groups(grad_JNH: Tensor, rows_JKH: Tensor) -> Tensor:
    """Sum the gradients of repeated heads in float32; returns (J, K, H)."""
    num_heads = rows_JKH.shape[1]
    if grad_JNH.shape[1] == num_heads:
        return grad_JNH
    return grad_JNH.unflatten(1, (num_heads, -1)).sum(2, dtype=wide(grad_JNH)).to(grad_JNH.dtype)
