"""cuDNN's dense attention for calls with one entry, such as the level of a single prompt; Hopper.

Legend in `varlen_args.py`. It takes (1, heads, rows, head dim) and grouped heads. The log-sum-exp is natural, float32,
(1, N, T, 1). In the graph of its backward the output and the log-sum-exp are inputs: it computes
`delta = rowsum(dout * out)` and `p = exp(scores - lse)` (nodes `mul_dO_O` and `sub_s_m` of `CompositeSDPABackwardNode`
in cudnn-frontend). So a merged out and lse give a piece's share, and torch's own ring attention
(`distributed/tensor/experimental/_context_parallel`) hands it just those.

torch builds one plan for each shape and layout of q, k and v, and keeps it; it does not compare the layouts of out and
dout, so here all tensors are contiguous. A plan for a new number of queries or keys took about 0.07 s in each direction
on an H100 (200 levels of a comb): for batches of few shapes only.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor

from radixtrain.kernels.flash import TorchCUDAKernel
from radixtrain.kernels.packages import unfit_device
from radixtrain.kernels.varlen_args import Ragged, Scoring

aten = torch.ops.aten
OLDEST_CUDNN = 91500  # from here on torch itself prefers it on Hopper; the backward of 9.10.0 and 9.10.1 was wrong


class CudnnKernel:
    """`aten._scaled_dot_product_cudnn_attention` / `_backward` for one entry, torch's flash kernels for more."""

    def __init__(self) -> None:
        self.flash = TorchCUDAKernel()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, ragged: Ragged, scoring: Scoring) -> tuple[Tensor, Tensor]:
        if not _is_dense(ragged, scoring):
            return self.flash.forward(q, k, v, ragged, scoring)
        out, lse, *_ = aten._scaled_dot_product_cudnn_attention(
            *(_batch_of_one(x) for x in (q, k, v)),
            None,  # bias
            True,  # the log-sum-exp too
            0.0,  # dropout
            ragged.causal,
            scale=scoring.scale,
        )
        return out[0].transpose(0, 1), lse[0, ..., 0]

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, ragged: Ragged, scoring: Scoring
    ) -> tuple[Tensor, Tensor, Tensor]:
        if not _is_dense(ragged, scoring):
            return self.flash.backward(dout, q, k, v, out, lse, ragged, scoring)
        no_dropout = torch.empty((), dtype=torch.int64, device=q.device)  # the philox state, unread without dropout
        grads = aten._scaled_dot_product_cudnn_attention_backward(
            *(_batch_of_one(x) for x in (dout, q, k, v, out)),
            lse.contiguous()[None, ..., None],
            no_dropout,
            no_dropout,
            *(None, None, None),  # bias, bounds of nested tensors
            *(len(q), len(k)),
            0.0,  # dropout
            ragged.causal,
            scale=scoring.scale,
        )
        dq, dk, dv = (grad[0].transpose(0, 1) for grad in grads)
        return dq, dk, dv


def cudnn_missing(device: torch.device) -> str | None:
    """Return what cuDNN's attention lacks on a CUDA device, in the words of an error; None if nothing."""
    if unfit := unfit_device((9,), device):
        return unfit
    version = torch.backends.cudnn.version() or 0
    if version < OLDEST_CUDNN:
        return f"needs cuDNN 9.15 or newer, torch brings {version}"
    if torch.are_deterministic_algorithms_enabled():
        return "adds up in no fixed order, but torch.use_deterministic_algorithms(True) requires one"
    if os.getenv("TORCH_CUDNN_SDPA_AVOID_RECOMPILE"):
        return "lays out the log-sum-exp differently under TORCH_CUDNN_SDPA_AVOID_RECOMPILE"
    return None


def _is_dense(ragged: Ragged, scoring: Scoring) -> bool:
    """Return whether one entry has all rows, more than one key, and queries as cuDNN counts them: from the top left."""
    assert scoring.softcap is None, "`tree_attention` refuses a soft-cap on this kernel"
    one_entry = len(ragged.cu_seqlens_q) == 2 and ragged.max_seqlen_k > 1 and scoring.window is None
    return one_entry and (not ragged.causal or ragged.max_seqlen_q == ragged.max_seqlen_k)


def _batch_of_one(x: Tensor) -> Tensor:
    """View (rows, heads, H) memory as (1, heads, rows, H)."""
    return x.contiguous()[None].transpose(1, 2)
