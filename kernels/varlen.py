"""Varlen attention kernels behind one signature: each returns its log-sum-exp and takes it back.

T query tokens, J key tokens, N query heads, K key/value heads, H head dim. A ragged call holds E entries; entry e
attends from queries `cu_seqlens_q[e:e+2]` to keys `cu_seqlens_k[e:e+2]`. Causal means from the bottom right: the last
query sees every key, as in flash-attention >= 2.1. An entry without keys gives zeros and a log-sum-exp of -inf.

The backward asks for the *final* output and log-sum-exp of each query. Handing it the ones that several pieces were
merged to makes it return exactly this piece's share of dq, dk and dv (`pieces.py` says why).

A `Scoring` carries scale, soft-cap and window. A window goes with causal calls only.

| name         | where                          | dtypes                           | soft-cap | window |
|--------------|--------------------------------|----------------------------------|----------|--------|
| `torch`      | the flash kernels inside torch | CPU all, CUDA float16 / bfloat16 | no       | yes    |
| `flash_attn` | the flash-attn package, CUDA   | float16, bfloat16                | yes      | yes    |
| `eager`      | anywhere, a loop of matmuls    | all; the specification           | yes      | yes    |
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor

from radixtrain.kernels.scoring import Scoring

__all__ = ["KERNELS", "Ragged", "VarlenKernel", "takes_window", "varlen_kernel"]

aten = torch.ops.aten
MIN_RUN = 128  # queries of one call within a window: fewer cost more in calls than they save in pairs


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

    def entries(self, window: int | None = None) -> Iterator[tuple[slice, slice]]:
        """Query and key slices of the entries that have queries; with a window, of runs of queries and what they see.

        Either way the last query of a pair sees its last key, if it sees any.
        """
        bounds = self.bounds
        if bounds is None:  # waits for the device: only the eager kernel on CUDA comes here
            q_bounds, k_bounds = self.cu_seqlens_q.tolist(), self.cu_seqlens_k.tolist()
            bounds = tuple((*q, *k) for q, k in zip(pairwise(q_bounds), pairwise(k_bounds), strict=True))
        whole = (entry for entry in bounds if entry[1] > entry[0])
        if window is None:
            return ((slice(q0, q1), slice(k0, k1)) for q0, q1, k0, k1 in whole)
        return (run for entry in whole for run in _runs(*entry, window))


class VarlenKernel(Protocol):
    """Stateless. Shapes: q, out (T, N, H); k, v (J, K, H); lse (N, T), float32 (float64 for float64 inputs)."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, ragged: Ragged, scoring: Scoring) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp."""
        ...

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, ragged: Ragged, scoring: Scoring
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk, dv of `p = exp(scores - lse)`, `dscores = p (dout v^T - rowsum(dout * out))`."""
        ...


class _PerEntry:
    """A kernel that handles one entry at a time, and loops."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, ragged: Ragged, scoring: Scoring) -> tuple[Tensor, Tensor]:
        assert ragged.causal or scoring.window is None, "a window counts from the last key"
        entries = list(ragged.entries(scoring.window))
        if len(entries) == 1 and entries[0] == (slice(0, len(q)), slice(0, len(k))) and len(k):
            return self.entry_forward(q, k, v, ragged.causal, scoring)
        out = q.new_zeros(*q.shape[:2], v.shape[-1])
        lse = torch.full((q.shape[1], len(q)), float("-inf"), dtype=_wide(q), device=q.device)
        for queries, keys in entries:
            if keys.stop > keys.start:
                piece = self.entry_forward(q[queries], k[keys], v[keys], ragged.causal, scoring)
                out[queries], lse[:, queries] = piece
        return out, lse

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, ragged: Ragged, scoring: Scoring
    ) -> tuple[Tensor, Tensor, Tensor]:
        entries = list(ragged.entries(scoring.window))
        if len(entries) == 1 and entries[0] == (slice(0, len(q)), slice(0, len(k))) and len(k):
            return self.entry_backward(dout, q, k, v, out, lse, ragged.causal, scoring)
        meet = None if scoring.window is None else _wide(k)  # two runs of queries may see one key: added wide
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k, dtype=meet), torch.zeros_like(v, dtype=meet)
        for queries, keys in entries:
            if keys.stop > keys.start:
                rows = dout[queries], q[queries], k[keys], v[keys], out[queries], lse[:, queries]
                dq[queries], dk_entry, dv_entry = self.entry_backward(*rows, ragged.causal, scoring)
                if meet is None:
                    dk[keys], dv[keys] = dk_entry, dv_entry
                else:
                    dk[keys] += dk_entry
                    dv[keys] += dv_entry
        return dq, dk.to(k.dtype), dv.to(v.dtype)

    def entry_forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scoring: Scoring) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def entry_backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scoring: Scoring
    ) -> tuple[Tensor, Tensor, Tensor]:
        raise NotImplementedError


class EagerKernel(_PerEntry):
    """Explicit matmuls: what the other kernels compute, in any dtype, anywhere. 16-bit inputs go through float32."""

    def entry_forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scoring: Scoring) -> tuple[Tensor, Tensor]:
        scores_KGTJ, _ = self._scores(q, k, causal, scoring)
        lse_KGT = scores_KGTJ.logsumexp(-1)
        out_TKGH = torch.einsum("kgtj,jkh->tkgh", _exp_minus(scores_KGTJ, lse_KGT), v.to(_wide(v)))
        return out_TKGH.flatten(1, 2).to(q.dtype), lse_KGT.flatten(0, 1)

    def entry_backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scoring: Scoring
    ) -> tuple[Tensor, Tensor, Tensor]:
        groups = (k.shape[1], q.shape[1] // k.shape[1])
        wide = _wide(q)
        dout_TKGH, out_TKGH = dout.to(wide).unflatten(1, groups), out.to(wide).unflatten(1, groups)
        scores_KGTJ, slope_KGTJ = self._scores(q, k, causal, scoring)
        p_KGTJ = _exp_minus(scores_KGTJ, lse.unflatten(0, groups))
        dv = torch.einsum("kgtj,tkgh->jkh", p_KGTJ, dout_TKGH)
        dp_KGTJ = torch.einsum("tkgh,jkh->kgtj", dout_TKGH, v.to(wide))
        delta_KGT = (dout_TKGH * out_TKGH).sum(-1).permute(1, 2, 0)
        ds_KGTJ = p_KGTJ * (dp_KGTJ - delta_KGT[..., None]) * slope_KGTJ
        dq = torch.einsum("kgtj,jkh->tkgh", ds_KGTJ, k.to(wide)).flatten(1, 2)
        dk = torch.einsum("kgtj,tkgh->jkh", ds_KGTJ, q.to(wide).unflatten(1, groups))
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)

    def _scores(self, q: Tensor, k: Tensor, causal: bool, scoring: Scoring) -> tuple[Tensor, Tensor | float]:
        """Scores, -inf where hidden, and their slope: the derivative by the products of queries and keys."""
        q_TKGH = q.to(_wide(q)).unflatten(1, (k.shape[1], q.shape[1] // k.shape[1]))
        scores_KGTJ = scoring.of(torch.einsum("tkgh,jkh->kgtj", q_TKGH, k.to(_wide(k))))
        slope: Tensor | float = scoring.scale
        if scoring.softcap is not None:
            slope = scoring.scale * (1 - (scores_KGTJ / scoring.softcap).square())
        if causal:
            seen = _bottom_right(len(q), len(k), q.device, scoring.window)
            scores_KGTJ = scores_KGTJ.masked_fill(~seen, float("-inf"))
        return scores_KGTJ, slope


class TorchCPUKernel(_PerEntry):
    """`aten._scaled_dot_product_flash_attention_for_cpu`: takes grouped heads and strided slices as they are."""

    def entry_forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scoring: Scoring) -> tuple[Tensor, Tensor]:
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
            _heads_first(q), _heads_first(k), _heads_first(v), 0.0,
            **self._mask(q, k, causal, scoring), scale=scoring.scale,
        )  # fmt: skip
        return out[0].transpose(0, 1), lse[0]

    def entry_backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scoring: Scoring
    ) -> tuple[Tensor, Tensor, Tensor]:
        mask = self._mask(q, k, causal, scoring)
        grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *(_heads_first(x) for x in (dout, q, k, v, out)), lse[None], 0.0, **mask, scale=scoring.scale
        )
        dq, dk, dv = (grad[0].transpose(0, 1) for grad in grads)
        return dq, dk, dv

    def _mask(self, q: Tensor, k: Tensor, causal: bool, scoring: Scoring) -> dict[str, Any]:
        """Its own `is_causal` counts from the top left, which is the bottom right only for equal lengths."""
        assert scoring.softcap is None, "the door refuses a soft-cap on this kernel"
        binds = scoring.window is not None and scoring.window < len(k)
        if not causal or (len(q) == len(k) and not binds):
            return {"is_causal": causal}
        assert len(q) <= len(k), "no query of a path is without a key"
        hidden = ~_bottom_right(len(q), len(k), q.device, scoring.window)
        return {"is_causal": False, "attn_mask": q.new_zeros(len(q), len(k)).masked_fill_(hidden, float("-inf"))}


class TorchCUDAKernel:
    """`aten._flash_attention_forward` / `_backward`: the flash-attention 2 that torch carries."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, ragged: Ragged, scoring: Scoring) -> tuple[Tensor, Tensor]:
        out, lse, *_ = aten._flash_attention_forward(
            *(_rows_contiguous(x) for x in (q, k, v)), *_ragged_arguments(ragged),
            0.0, ragged.causal, False, scale=scoring.scale, **self._window(ragged, scoring),
        )  # fmt: skip
        return out, lse

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, ragged: Ragged, scoring: Scoring
    ) -> tuple[Tensor, Tensor, Tensor]:
        no_dropout = torch.empty(2, dtype=torch.uint64, device=q.device)  # the philox state, unread without dropout
        return aten._flash_attention_backward(
            *(_rows_contiguous(x) for x in (dout, q, k, v, out)), lse.contiguous(), *_ragged_arguments(ragged),
            0.0, ragged.causal, no_dropout, no_dropout, scale=scoring.scale, **self._window(ragged, scoring),
        )  # fmt: skip

    def _window(self, ragged: Ragged, scoring: Scoring) -> dict[str, int]:
        """Nothing without a window: an older torch has no such arguments (`takes_window`)."""
        assert scoring.softcap is None, "the door refuses a soft-cap on this kernel"
        assert ragged.causal or scoring.window is None, "a window counts from the last key"
        return {} if scoring.window is None else {"window_size_left": scoring.window - 1, "window_size_right": 0}


class FlashAttnKernel:
    """The flash-attn package, version 2 (`flash_attn.flash_attn_interface`)."""

    def __init__(self) -> None:
        from flash_attn import flash_attn_interface  # optional: needs a CUDA toolchain to build

        self.interface = flash_attn_interface

    def forward(self, q: Tensor, k: Tensor, v: Tensor, ragged: Ragged, scoring: Scoring) -> tuple[Tensor, Tensor]:
        out, lse, *_ = self.interface._flash_attn_varlen_forward(
            *(_rows_contiguous(x) for x in (q, k, v)), *_ragged_arguments(ragged), 0.0, scoring.scale,
            causal=ragged.causal, **self._modifiers(ragged, scoring),
        )  # fmt: skip
        return out, lse

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, ragged: Ragged, scoring: Scoring
    ) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
        self.interface._flash_attn_varlen_backward(
            *(_rows_contiguous(x) for x in (dout, q, k, v, out)), lse.contiguous(), dq, dk, dv,
            *_ragged_arguments(ragged), 0.0, scoring.scale, ragged.causal,
            **self._modifiers(ragged, scoring), alibi_slopes=None, deterministic=True,
        )  # fmt: skip
        return dq, dk, dv

    def _modifiers(self, ragged: Ragged, scoring: Scoring) -> dict[str, Any]:
        assert ragged.causal or scoring.window is None, "a window counts from the last key"
        left, right = (-1, -1) if scoring.window is None else (scoring.window - 1, 0)
        return {"window_size_left": left, "window_size_right": right, "softcap": scoring.softcap or 0.0}


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


def takes_window() -> bool:
    """Whether the CUDA kernels of this torch take a window: both directions, by their schema."""
    names = ("_flash_attention_forward", "_flash_attention_backward")
    schemas = [getattr(aten, name).default._schema for name in names]
    return all("window_size_left" in [argument.name for argument in schema.arguments] for schema in schemas)


def _runs(q0: int, q1: int, k0: int, k1: int, window: int) -> Iterator[tuple[slice, slice]]:
    """An entry in runs of queries, each with the keys that any of them sees: the pairs grow with the length alone."""
    for start in range(q0, q1, max(window, MIN_RUN)):
        stop = min(start + max(window, MIN_RUN), q1)
        yield slice(start, stop), slice(max(k0, k1 - (q1 - start) - window + 1), max(k0, k1 - (q1 - stop)))


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _heads_first(x: Tensor) -> Tensor:
    return _rows_contiguous(x).transpose(0, 1)[None]  # the CPU kernel does not look at the last stride


def _rows_contiguous(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _ragged_arguments(ragged: Ragged) -> tuple[Tensor, Tensor, int, int]:
    return ragged.cu_seqlens_q, ragged.cu_seqlens_k, ragged.max_seqlen_q, ragged.max_seqlen_k


def _bottom_right(num_queries: int, num_keys: int, device: torch.device, window: int | None) -> Tensor:
    """(queries, keys), bool: the last query sees every key, or the last `window` of them."""
    offset = num_keys - num_queries
    seen = torch.ones(num_queries, num_keys, dtype=torch.bool, device=device).tril(offset)
    return seen if window is None else seen.triu(offset - window + 1)


def _exp_minus(scores: Tensor, lse: Tensor) -> Tensor:
    """`exp(scores - lse)`, with 0 where a query sees nothing (lse = -inf) instead of exp(-inf + inf)."""
    return torch.exp(scores - lse.masked_fill(lse == float("-inf"), 0)[..., None])
