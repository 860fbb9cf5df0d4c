"""Varlen kernels for CUDA: the flash-attention that torch carries, and the package flash-attn.

Legend in `ragged.py`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from radixtrain.kernels.ragged import Ragged
from radixtrain.kernels.scoring import Scoring

__all__ = ["FlashAttnKernel", "TorchCUDAKernel", "takes_window"]

aten = torch.ops.aten


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


def takes_window() -> bool:
    """Whether the CUDA kernels of this torch take a window: both directions, by their schema."""
    names = ("_flash_attention_forward", "_flash_attention_backward")
    schemas = [getattr(aten, name).default._schema for name in names]
    return all("window_size_left" in [argument.name for argument in schema.arguments] for schema in schemas)


def _rows_contiguous(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _ragged_arguments(ragged: Ragged) -> tuple[Tensor, Tensor, int, int]:
    return ragged.cu_seqlens_q, ragged.cu_seqlens_k, ragged.max_seqlen_q, ragged.max_seqlen_k
