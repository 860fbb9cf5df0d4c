"""Varlen attention kernels behind one signature: each returns its log-sum-exp and takes it back.

T query tokens, J key tokens, N query heads, K key/value heads, H head dim. A ragged call holds E entries; entry e
attends from queries `cu_seqlens_q[e:e+2]` to keys `cu_seqlens_k[e:e+2]`. Causal means from the bottom right: the last
query sees every key, as in flash-attention >= 2.1. An entry without keys gives zeros and a log-sum-exp of -inf.

The backward asks for the *final* output and log-sum-exp of each query. Handing it the ones that several pieces were
merged to makes it return exactly this piece's share of dq, dk and dv (`pieces.py` says why).

| name         | where                          | dtypes                       |
|--------------|--------------------------------|------------------------------|
| `torch`      | the flash kernels inside torch | CPU all, CUDA float16 / bfloat16 |
| `flash_attn` | the flash-attn package, CUDA   | float16, bfloat16            |
| `eager`      | anywhere, a loop of matmuls    | all; the specification       |
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor

__all__ = ["KERNELS", "Ragged", "VarlenKernel", "varlen_kernel"]

aten = torch.ops.aten


@dataclass(frozen=True, eq=False)
class Ragged:
    """Bounds of one varlen call.

    cu_seqlens_q, cu_seqlens_k: (E+1,), int32, on the device of the tensors.
    max_seqlen_q, max_seqlen_k: longest entry, in tokens.
    causal: bottom-right causal inside each entry; otherwise every query sees every key of its entry.
    bounds: the same bounds as host integers, one (q_start, q_end, k_start, k_end) per entry, for kernels that loop.
    """

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    causal: bool
    bounds: tuple[tuple[int, int, int, int], ...] | None = None

    def entries(self) -> Iterator[tuple[slice, slice]]:
        """Query and key slices of the entries that have queries."""
        bounds = self.bounds
        if bounds is None:  # waits for the device: only the eager kernel on CUDA comes here
            q_bounds, k_bounds = self.cu_seqlens_q.tolist(), self.cu_seqlens_k.tolist()
            bounds = tuple((*q, *k) for q, k in zip(pairwise(q_bounds), pairwise(k_bounds), strict=True))
        return ((slice(q0, q1), slice(k0, k1)) for q0, q1, k0, k1 in bounds if q1 > q0)


class VarlenKernel(Protocol):
    """Stateless. Shapes: q, out (T, N, H); k, v (J, K, H); lse (N, T), float32 (float64 for float64 inputs)."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, ragged: Ragged, scale: float) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp."""
        ...

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, ragged: Ragged, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk, dv of `p = exp(scale q k^T - lse)`, `ds = p (dout v^T - rowsum(dout * out))`."""
        ...


class _PerEntry:
    """A kernel that handles one entry at a time, and loops."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, ragged: Ragged, scale: float) -> tuple[Tensor, Tensor]:
        entries = list(ragged.entries())
        if len(entries) == 1 and entries[0] == (slice(0, len(q)), slice(0, len(k))) and len(k):
            return self.entry_forward(q, k, v, ragged.causal, scale)
        out = q.new_zeros(*q.shape[:2], v.shape[-1])
        lse = torch.full((q.shape[1], len(q)), float("-inf"), dtype=_wide(q), device=q.device)
        for queries, keys in entries:
            if keys.stop > keys.start:
                piece = self.entry_forward(q[queries], k[keys], v[keys], ragged.causal, scale)
                out[queries], lse[:, queries] = piece
        return out, lse

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, ragged: Ragged, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        entries = list(ragged.entries())
        if len(entries) == 1 and entries[0] == (slice(0, len(q)), slice(0, len(k))) and len(k):
            return self.entry_backward(dout, q, k, v, out, lse, ragged.causal, scale)
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for queries, keys in entries:
            if keys.stop > keys.start:
                rows = dout[queries], q[queries], k[keys], v[keys], out[queries], lse[:, queries]
                dq[queries], dk[keys], dv[keys] = self.entry_backward(*rows, ragged.causal, scale)
        return dq, dk, dv

    def entry_forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def entry_backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        raise NotImplementedError


class EagerKernel(_PerEntry):
    """Explicit matmuls: what the other kernels compute, in any dtype, anywhere. 16-bit inputs go through float32."""

    def entry_forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        scores_KGTJ = self._scores(q, k, causal, scale)
        lse_KGT = scores_KGTJ.logsumexp(-1)
        out_TKGH = torch.einsum("kgtj,jkh->tkgh", _exp_minus(scores_KGTJ, lse_KGT), v.to(_wide(v)))
        return out_TKGH.flatten(1, 2).to(q.dtype), lse_KGT.flatten(0, 1)

    def entry_backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        groups = (k.shape[1], q.shape[1] // k.shape[1])
        wide = _wide(q)
        dout_TKGH, out_TKGH = dout.to(wide).unflatten(1, groups), out.to(wide).unflatten(1, groups)
        p_KGTJ = _exp_minus(self._scores(q, k, causal, scale), lse.unflatten(0, groups))
        dv = torch.einsum("kgtj,tkgh->jkh", p_KGTJ, dout_TKGH)
        dp_KGTJ = torch.einsum("tkgh,jkh->kgtj", dout_TKGH, v.to(wide))
        delta_KGT = (dout_TKGH * out_TKGH).sum(-1).permute(1, 2, 0)
        ds_KGTJ = p_KGTJ * (dp_KGTJ - delta_KGT[..., None]) * scale
        dq = torch.einsum("kgtj,jkh->tkgh", ds_KGTJ, k.to(wide)).flatten(1, 2)
        dk = torch.einsum("kgtj,tkgh->jkh", ds_KGTJ, q.to(wide).unflatten(1, groups))
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)

    def _scores(self, q: Tensor, k: Tensor, causal: bool, scale: float) -> Tensor:
        q_TKGH = q.to(_wide(q)).unflatten(1, (k.shape[1], q.shape[1] // k.shape[1]))
        scores_KGTJ = torch.einsum("tkgh,jkh->kgtj", q_TKGH, k.to(_wide(k))) * scale
        return (
            scores_KGTJ.masked_fill(~_bottom_right(len(q), len(k), q.device), float("-inf")) if causal else scores_KGTJ
        )


class TorchCPUKernel(_PerEntry):
    """`aten._scaled_dot_product_flash_attention_for_cpu`: takes grouped heads and strided slices as they are."""

    def entry_forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
            _heads_first(q), _heads_first(k), _heads_first(v), 0.0, **self._mask(q, k, causal), scale=scale
        )
        return out[0].transpose(0, 1), lse[0]

    def entry_backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        mask = self._mask(q, k, causal)
        grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *(_heads_first(x) for x in (dout, q, k, v, out)), lse[None], 0.0, **mask, scale=scale
        )
        dq, dk, dv = (grad[0].transpose(0, 1) for grad in grads)
        return dq, dk, dv

    def _mask(self, q: Tensor, k: Tensor, causal: bool) -> dict[str, Any]:
        """Its own `is_causal` counts from the top left, which is the bottom right only for equal lengths."""
        if not causal or len(q) == len(k):
            return {"is_causal": causal}
        assert len(q) < len(k), "no query of a path is without a key"
        hidden = ~_bottom_right(len(q), len(k), q.device)
        return {"is_causal": False, "attn_mask": q.new_zeros(len(q), len(k)).masked_fill_(hidden, float("-inf"))}


class TorchCUDAKernel:
    """`aten._flash_attention_forward` / `_backward`: the flash-attention 2 that torch carries."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, ragged: Ragged, scale: float) -> tuple[Tensor, Tensor]:
        out, lse, *_ = aten._flash_attention_forward(
            *(_rows_contiguous(x) for x in (q, k, v)),
            *_ragged_arguments(ragged),
            0.0,
            ragged.causal,
            False,
            scale=scale,
        )
        return out, lse

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, ragged: Ragged, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        no_dropout = torch.empty(2, dtype=torch.uint64, device=q.device)  # the philox state, unread without dropout
        return aten._flash_attention_backward(
            *(_rows_contiguous(x) for x in (dout, q, k, v, out)), lse.contiguous(), *_ragged_arguments(ragged),
            0.0, ragged.causal, no_dropout, no_dropout, scale=scale,
        )  # fmt: skip


class FlashAttnKernel:
    """The flash-attn package, version 2 (`flash_attn.flash_attn_interface`)."""

    def __init__(self) -> None:
        from flash_attn import flash_attn_interface  # optional: needs a CUDA toolchain to build

        self.interface = flash_attn_interface

    def forward(self, q: Tensor, k: Tensor, v: Tensor, ragged: Ragged, scale: float) -> tuple[Tensor, Tensor]:
        out, lse, *_ = self.interface._flash_attn_varlen_forward(
            *(_rows_contiguous(x) for x in (q, k, v)), *_ragged_arguments(ragged), 0.0, scale, causal=ragged.causal
        )
        return out, lse

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, ragged: Ragged, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
        self.interface._flash_attn_varlen_backward(
            *(_rows_contiguous(x) for x in (dout, q, k, v, out)), lse.contiguous(), dq, dk, dv,
            *_ragged_arguments(ragged), 0.0, scale, ragged.causal,
            window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None, deterministic=True,
        )  # fmt: skip
        return dq, dk, dv


KERNELS = ("torch", "flash_attn", "eager")


def varlen_kernel(name: str, device: torch.device) -> VarlenKernel:
    """The kernel of that name on that device. ImportError without flash-attn, ValueError for an unknown name."""
    if name == "eager":
        return EagerKernel()
    if name == "flash_attn" and device.type == "cuda":
        return FlashAttnKernel()
    if name == "torch" and device.type in ("cpu", "cuda"):
        return TorchCUDAKernel() if device.type == "cuda" else TorchCPUKernel()
    raise ValueError(f"no attention kernel {name!r} on device {device.type!r}; kernels: {', '.join(KERNELS)}")


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _heads_first(x: Tensor) -> Tensor:
    return _rows_contiguous(x).transpose(0, 1)[None]  # the CPU kernel does not look at the last stride


def _rows_contiguous(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _ragged_arguments(ragged: Ragged) -> tuple[Tensor, Tensor, int, int]:
    return ragged.cu_seqlens_q, ragged.cu_seqlens_k, ragged.max_seqlen_q, ragged.max_seqlen_k


def _bottom_right(num_queries: int, num_keys: int, device: torch.device) -> Tensor:
    """(queries, keys), bool: the last query sees every key."""
    return torch.ones(num_queries, num_keys, dtype=torch.bool, device=device).tril(num_keys - num_queries)


def _exp_minus(scores: Tensor, lse: Tensor) -> Tensor:
    """`exp(scores - lse)`, with 0 where a query sees nothing (lse = -inf) instead of exp(-inf + inf)."""
    return torch.exp(scores - lse.masked_fill(lse == float("-inf"), 0)[..., None])
