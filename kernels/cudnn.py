"""The attention of cuDNN that torch carries, by request, for calls whose entries all have one shape.

Legend in `ragged.py`; b entries of T queries and J keys each. Such a call is one
`aten._scaled_dot_product_cudnn_attention` on (b, N, T, H), the operator that torch's own `scaled_dot_product_attention`
runs on Hopper. A cascade has one where it matters: a prompt that every row shares is a single entry, and most of the
products are in it. Every other call goes to a second kernel.

Why not the ragged operators, `aten._cudnn_attention_forward` and `_backward` with `cum_seq_q`: their backward took the
head dim for the longest entry and wrote past a buffer (pytorch/pytorch#186142, June 2026); each call planned anew, in
42 ms (#191576, July 2026); their log-sum-exp was (T, N, 1) and is (N, T) now; and their causal mask counts from the top
left. The dense operators return the same layouts in torch 2.10 to 2.13.

The log-sum-exp of cuDNN is natural, float32, (b, N, T, 1). Its backward recomputes `p = exp(s - lse)` and reads `out`
for `delta` only, so a merged out and lse are as good as its own (`pieces.py`); torch's context parallelism relies on it
too (`_scaled_dot_product_ring_cudnn_attention_backward`). dq is added up in no fixed order.

A plan is built for each new shape, in tens of milliseconds, and kept. U differs from batch to batch, so queries are
padded with rows of zeros to one of a few lengths. They change nothing: their output is dropped, and with dout = 0 they
add zeros to dk and dv. Keys cannot be padded without a mask, except in a causal call, where only padding sees them.

**This has never run on a GPU.** The tests drive it with stand-ins that are registered for the operators.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from radixtrain.errors import UserError
from radixtrain.kernels.ragged import Ragged, VarlenKernel
from radixtrain.kernels.scoring import Scoring

__all__ = ["CudnnKernel", "cudnn_max_head_dim", "cudnn_missing", "padded_length"]

aten = torch.ops.aten
LEAST_VERSION = 91000  # 9.10, which torch 2.10 brings
# Below this many keys a plan does not pay: 256 keys of 8,192 queries with 32 heads of 128 are 0.1 Tflop a layer, so
# twice the speed on an H100 would save about 0.15 ms where the plan costs 40. By arithmetic, not measured.
LEAST_KEYS = 256


class CudnnKernel:
    """cuDNN for calls of one shape with at least `least_keys` keys (2 or more); `others` takes the rest."""

    def __init__(self, others: VarlenKernel, least_keys: int = LEAST_KEYS) -> None:
        assert least_keys >= 2, "cuDNN takes no single key"
        self.others = others
        self.least_keys = least_keys

    def forward(self, q: Tensor, k: Tensor, v: Tensor, ragged: Ragged, scoring: Scoring) -> tuple[Tensor, Tensor]:
        _check_order()
        entries = self._entries(q, k, ragged, scoring)
        if entries is None:
            return self.others.forward(q, k, v, ragged, scoring)
        out_bNTH, lse_bNT1, *_ = aten._scaled_dot_product_cudnn_attention(
            entries.queries(q),
            entries.keys(k),
            entries.keys(v),
            None,  # bias
            True,  # with the log-sum-exp
            0.0,  # dropout
            ragged.causal,
            False,  # no debug mask
            scale=scoring.scale,
        )
        lse_bNT = lse_bNT1[:, :, : entries.num_queries, 0]
        return _rows(out_bNTH, entries.num_queries), lse_bNT.transpose(0, 1).flatten(1)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, ragged: Ragged, scoring: Scoring
    ) -> tuple[Tensor, Tensor, Tensor]:
        entries = self._entries(q, k, ragged, scoring)
        if entries is None:
            return self.others.backward(dout, q, k, v, out, lse, ragged, scoring)
        no_dropout = torch.zeros((), dtype=torch.int64, device=q.device)  # the philox state, unread without dropout
        dq, dk, dv = aten._scaled_dot_product_cudnn_attention_backward(
            entries.queries(dout),
            entries.queries(q),
            entries.keys(k),
            entries.keys(v),
            entries.queries(out),
            entries.lse(lse),
            no_dropout,
            no_dropout,
            None,  # bias
            None,  # bounds of ragged calls: queries,
            None,  # and keys
            entries.padded_queries,
            entries.padded_keys,
            0.0,  # dropout
            ragged.causal,
            scale=scoring.scale,
        )
        return _rows(dq, entries.num_queries), _rows(dk, entries.num_keys), _rows(dv, entries.num_keys)

    def _entries(self, q: Tensor, k: Tensor, ragged: Ragged, scoring: Scoring) -> _Entries | None:
        """The shape of all entries, or None if cuDNN is not for this call.

        No entry is longer than `max_seqlen_q`, so as many rows as entries of that length make all of them that long:
        nothing is read from the device. cuDNN counts a causal mask from the top left, which is ours if T = J.
        """
        assert scoring.softcap is None, "`tree_attention` refuses a soft-cap on this kernel"
        number = ragged.cu_seqlens_q.shape[0] - 1
        num_queries, num_keys = ragged.max_seqlen_q, ragged.max_seqlen_k
        of_one_shape = (number * num_queries, number * num_keys) == (q.shape[0], k.shape[0])
        if not of_one_shape or num_keys < self.least_keys or num_queries == 0 or scoring.window is not None:
            return None
        if ragged.causal and num_queries != num_keys:
            return None
        padded = padded_length(num_queries)
        return _Entries(number, num_queries, num_keys, padded, padded if ragged.causal else num_keys)


class _Entries(NamedTuple):
    """Rows (b x T, heads, H) as (b, heads, T, H), always in the memory order b, T, heads, H.

    One order, because torch's cache of plans does not look at the order of out and dout before August 2026 (#191576):
    with two orders a plan made for one would run on the other.
    """

    number: int
    num_queries: int
    num_keys: int
    padded_queries: int
    padded_keys: int

    def queries(self, rows: Tensor) -> Tensor:
        return self._padded(rows, self.padded_queries)

    def keys(self, rows: Tensor) -> Tensor:
        return self._padded(rows, self.padded_keys)

    def lse(self, lse_NT: Tensor) -> Tensor:
        """(b, N, padded T, 1). Zeros for padding: exp(0 - 0) is finite, and its dout is zero."""
        lse_bNT = lse_NT.unflatten(1, (self.number, -1)).transpose(0, 1)
        return functional.pad(lse_bNT, (0, self.padded_queries - self.num_queries)).contiguous()[..., None]

    def _padded(self, rows: Tensor, length: int) -> Tensor:
        x_bTNH = rows.unflatten(0, (self.number, -1))
        padding = length - x_bTNH.shape[1]
        x_bTNH = functional.pad(x_bTNH, (0, 0, 0, 0, 0, padding)) if padding else x_bTNH
        return x_bTNH.contiguous().transpose(1, 2)


def padded_length(n: int) -> int:
    """The next multiple of 64, or of a 16th of the power of two below n: at most 6 % more from 1,024 on."""
    step = max(64, 1 << n.bit_length() >> 5)
    return -(-n // step) * step


def cudnn_missing(device: torch.device) -> str | None:
    """What this machine lacks for the attention of cuDNN, in the words of an error; None if nothing."""
    if not torch.cuda.is_available():
        return "needs a GPU of compute capability 8.0 or higher, and torch sees no CUDA device"
    version = torch.backends.cudnn.version() if torch.version.cuda else None
    if version is None:
        return f"needs cuDNN 9.10 or newer, and torch {torch.__version__} comes without cuDNN"
    if version < LEAST_VERSION:
        return f"needs cuDNN 9.10 or newer (version {LEAST_VERSION}), torch loads version {version}"
    major, minor = torch.cuda.get_device_capability(device)
    return None if major >= 8 else f"needs a GPU of compute capability 8.0 or higher, this one has {major}.{minor}"


def cudnn_max_head_dim(device: torch.device) -> int:
    """The widest heads that it takes, backward included: 256 on Hopper, else 128 (torch's `sdp_utils.cpp`)."""
    return 256 if torch.cuda.get_device_capability(device) == (9, 0) else 128


def _rows(x_bNTH: Tensor, length: int) -> Tensor:
    """(b x T, heads, H), without the padding."""
    return x_bNTH[:, :, :length].transpose(1, 2).flatten(0, 1)


def _check_order() -> None:
    if torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled():
        raise UserError(
            "kernel='cudnn' adds gradients up in no fixed order, and torch.use_deterministic_algorithms(True) asks for "
            "one (trainer.deterministic: true): set the kernel to auto or torch, or leave deterministic out"
        )
