"""cuDNN's dense attention for calls whose entries are equally long, such as the level of a single prompt; Hopper.

Legend in `varlen_args.py`; E entries. It takes (E, heads, rows, head dim) and grouped heads. The log-sum-exp is
natural, float32, (E, N, T, 1). In the graph of its backward the output and the log-sum-exp are inputs: it computes
`delta = rowsum(dout * out)` and `p = exp(scores - lse)` (nodes `mul_dO_O` and `sub_s_m` of `CompositeSDPABackwardNode`
in cudnn-frontend). So a merged out and lse give a piece's share, and torch's own ring attention
(`distributed/tensor/experimental/_context_parallel`) hands it just those.

torch builds one plan for each shape and layout of q, k and v, and keeps it; it does not compare the layouts of out and
dout, so here all tensors are contiguous. A plan for a new number of queries or keys took about 0.07 s in each direction
on an H100 (200 levels of a comb). So a single entry is padded to a multiple of `ROWS` queries. `auto` does not take it:
a prompt of another length in every batch would be planned every time, and waiting until a length comes again would
make the bits of a step depend on the steps before it, which a resumed run does not have.

Padding queries are zeros after the others. Their dout and out are zeros too, so that they add nothing to dk and dv. A
causal entry gets padding keys as well, which only they see.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor
from torch.nn.functional import pad

from radixtrain.kernels.flash import TorchCUDAKernel
from radixtrain.kernels.varlen_args import Ragged, Scoring

aten = torch.ops.aten
OLDEST_CUDNN = 91500  # from here on torch itself prefers it on Hopper; the backward of 9.10.0 and 9.10.1 was wrong
ROWS = 512


class CudnnKernel:
    """`aten._scaled_dot_product_cudnn_attention` / `_backward` for equal entries, torch's flash kernels for others."""

    other = TorchCUDAKernel()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, ragged: Ragged, scoring: Scoring) -> tuple[Tensor, Tensor]:
        padding = _padding(q, k, ragged, scoring)
        if padding is None:
            return self.other.forward(q, k, v, ragged, scoring)
        number, extra_q, extra_k = padding
        out_ENTH, lse_ENT1, *_ = aten._scaled_dot_product_cudnn_attention(
            _batched(q, number, extra_q),
            *(_batched(x, number, extra_k) for x in (k, v)),
            None,  # bias
            True,  # the log-sum-exp too
            0.0,  # dropout
            ragged.causal,
            scale=scoring.scale,
        )
        lse_ENT = lse_ENT1[:, :, : ragged.max_seqlen_q, 0]
        return _rows(out_ENTH, ragged.max_seqlen_q), lse_ENT.transpose(0, 1).flatten(1)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, ragged: Ragged, scoring: Scoring
    ) -> tuple[Tensor, Tensor, Tensor]:
        padding = _padding(q, k, ragged, scoring)
        if padding is None:
            return self.other.backward(dout, q, k, v, out, lse, ragged, scoring)
        number, extra_q, extra_k = padding
        no_dropout = torch.empty((), dtype=torch.int64, device=q.device)  # the philox state, unread without dropout
        dout, q, out = (_batched(x, number, extra_q) for x in (dout, q, out))
        k, v = (_batched(x, number, extra_k) for x in (k, v))
        lse_ENT = pad(lse.unflatten(1, (number, -1)).transpose(0, 1), (0, extra_q)).contiguous()
        dq, dk, dv = aten._scaled_dot_product_cudnn_attention_backward(
            *(dout, q, k, v, out, lse_ENT[..., None]),
            no_dropout,
            no_dropout,
            *(None, None, None),  # bias, bounds of nested tensors
            *(q.shape[2], k.shape[2]),
            0.0,  # dropout
            ragged.causal,
            scale=scoring.scale,
        )
        return _rows(dq, ragged.max_seqlen_q), _rows(dk, ragged.max_seqlen_k), _rows(dv, ragged.max_seqlen_k)


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


def unfit_device(majors: tuple[int, ...], device: torch.device) -> str | None:
    """Say why a CUDA device has none of these compute capabilities, in the words of an error; None if it has one."""
    fit = f"needs a GPU of compute capability {' or '.join(f'{major}.x' for major in majors)}"
    if not torch.cuda.is_available():
        return f"{fit}, and torch sees no CUDA device"
    major, minor = torch.cuda.get_device_capability(device)
    return None if major in majors else f"{fit}, this one has {major}.{minor}"


def _batched(x: Tensor, number: int, extra: int) -> Tensor:
    """Return (E, heads, rows, H) in (E, rows, heads, H) memory, with so many rows of zeros after those of each."""
    x = x.unflatten(0, (number, -1))
    return (pad(x, (0, 0, 0, 0, 0, extra)) if extra else x.contiguous()).transpose(1, 2)


def _rows(x: Tensor, length: int) -> Tensor:
    """Return (E, heads, rows, H) without padding as (rows, heads, H)."""
    return x.transpose(1, 2)[:, :length].flatten(0, 1)


def _padding(q: Tensor, k: Tensor, ragged: Ragged, scoring: Scoring) -> tuple[int, int, int] | None:
    """Return how many entries cuDNN gets, and how many queries and keys pad each; None if it does not get the call.

    It takes equal entries with more than one key, and counts queries from the top left. Several are not padded:
    short ones would be twice as long.
    """
    assert scoring.softcap is None, "`tree_attention` refuses a soft-cap on this kernel"
    number, num_q, num_k = len(ragged.cu_seqlens_q) - 1, ragged.max_seqlen_q, ragged.max_seqlen_k
    is_even = (len(q), len(k)) == (number * num_q, number * num_k) and num_q > 0 and num_k > 1
    if not is_even or scoring.window is not None or (ragged.causal and num_q != num_k):
        return None
    extra_q = -num_q % ROWS if number == 1 else 0
    return number, extra_q, extra_q if ragged.causal else 0
