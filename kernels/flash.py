"""Varlen kernels for CUDA: the flash-attention in torch, and the packages flash-attn (2), -3 and -4.

Legend in `varlen_args.py`. All are bottom-right causal, take grouped heads, and need a last axis without gaps. For a
query without a key all but version 4 return a log-sum-exp of +inf, not -inf; our pieces have no such query or entry.

The packages are asked to add in a fixed order in the backward pass. The kernel inside torch adds dq with atomics.
`varlen.py` says what a machine needs for each.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from radixtrain.kernels.varlen_args import Ragged, Scoring

aten = torch.ops.aten
WIDEST_HEAD_DIM = 256
FLASH_3_WIDEST_HEAD_DIM = 192  # its backward in a fixed order rounds wider heads up to 256, and refuses those
FLASH_4_WIDEST_HEAD_DIM_ON_BLACKWELL = 128  # then only 256, and that without a soft-cap
# Arguments of `flash_attn_3::fwd` for caches, pages, rotary embeddings and 8-bit inputs. Older builds have no defaults.
FLASH_3_UNUSED = (
    *("k_new", "v_new", "q_v", "out", "cu_seqlens_k_new", "seqused_q", "seqused_k", "page_table", "kv_batch_idx"),
    *("leftpad_k", "rotary_cos", "rotary_sin", "seqlens_rotary", "q_descale", "k_descale", "v_descale"),
)


class TorchCUDAKernel:
    """`aten._flash_attention_forward` / `_backward`: flash-attention 2 as built into torch."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, ragged: Ragged, scoring: Scoring) -> tuple[Tensor, Tensor]:
        out, lse, *_ = aten._flash_attention_forward(
            *_contiguous(q, k, v),
            *ragged.arguments,
            0.0,  # dropout
            ragged.causal,
            False,  # no debug mask
            scale=scoring.scale,
            **self._window(ragged, scoring),
        )
        return out, lse

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, ragged: Ragged, scoring: Scoring
    ) -> tuple[Tensor, Tensor, Tensor]:
        no_dropout = torch.empty(2, dtype=torch.uint64, device=q.device)  # the philox state, unread without dropout
        return aten._flash_attention_backward(
            *_contiguous(dout, q, k, v, out),
            lse.contiguous(),
            *ragged.arguments,
            0.0,  # dropout
            ragged.causal,
            no_dropout,
            no_dropout,
            scale=scoring.scale,
            **self._window(ragged, scoring),
        )

    def _window(self, ragged: Ragged, scoring: Scoring) -> dict[str, int]:
        """Return the window arguments; none without a window, since an older torch lacks them (`takes_window`)."""
        assert scoring.softcap is None, "`tree_attention` refuses a soft-cap on this kernel"
        assert ragged.causal or scoring.window is None, "a window counts from the last key"
        return {} if scoring.window is None else {"window_size_left": scoring.window - 1, "window_size_right": 0}


class _Packaged:
    """A package of which both functions take the same arguments by name.

    attend, differentiate: the functions. The second fills gradients that it receives after the log-sum-exp.
    causal: the name of that argument. in_forward, in_backward: further arguments.
    """

    attend: Callable[..., Any]
    differentiate: Callable[..., Any]
    causal = "causal"
    in_forward: ClassVar[dict[str, Any]] = {}
    in_backward: ClassVar[dict[str, Any]] = {}

    def forward(self, q: Tensor, k: Tensor, v: Tensor, ragged: Ragged, scoring: Scoring) -> tuple[Tensor, Tensor]:
        out, lse, *_ = self.attend(*_contiguous(q, k, v), **self._by_name(ragged, scoring), **self.in_forward)
        return out, lse

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, ragged: Ragged, scoring: Scoring
    ) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
        tensors = *_contiguous(dout, q, k, v, out), lse.contiguous(), dq, dk, dv
        self.differentiate(*tensors, **self._by_name(ragged, scoring), **self.in_backward, deterministic=True)
        return dq, dk, dv

    def _by_name(self, ragged: Ragged, scoring: Scoring) -> dict[str, Any]:
        """Return bounds and scoring: the keys on either side of a query's own, -1 for all; 0 for no soft-cap."""
        assert ragged.causal or scoring.window is None, "a window counts from the last key"
        names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", self.causal)
        left, right = (-1, -1) if scoring.window is None else (scoring.window - 1, 0)
        scores = {"softmax_scale": scoring.scale, "softcap": scoring.softcap or 0.0}
        bounds = dict(zip(names, (*ragged.arguments, ragged.causal), strict=True))
        return {**bounds, **scores, "window_size_left": left, "window_size_right": right}


class FlashAttnKernel(_Packaged):
    """The flash-attn package, version 2 (`flash_attn.flash_attn_interface`)."""

    in_forward: ClassVar = {"dropout_p": 0.0}
    in_backward: ClassVar = {"dropout_p": 0.0, "alibi_slopes": None}

    def __init__(self) -> None:
        interface = importlib.import_module("flash_attn.flash_attn_interface")
        self.attend = interface._flash_attn_varlen_forward
        self.differentiate = interface._flash_attn_varlen_backward


class FlashAttn3Kernel(_Packaged):
    """The flash-attn-3 package, for Hopper: the operators that `flash_attn_3._C` registers with torch.

    They are called by the names of their schema, which builds share. The functions above them in
    `flash_attn_interface` have changed: `window_size` is two numbers now, and `causal` is `is_causal`.

    Builds from before Dao-AILab/flash-attention#1893 (September 2025) add in no fixed order, whatever is requested.
    """

    causal = "is_causal"
    # `num_splits` 0 would let it split the keys, and merge them in a second pass.
    in_forward: ClassVar = {**dict.fromkeys(FLASH_3_UNUSED), "num_splits": 1}
    in_backward: ClassVar = {"seqused_q": None, "seqused_k": None}

    def __init__(self) -> None:
        importlib.import_module("flash_attn_3._C")
        self.attend, self.differentiate = torch.ops.flash_attn_3.fwd, torch.ops.flash_attn_3.bwd


class FlashAttn4Kernel(_Packaged):
    """The flash-attn-4 package, for Hopper and Blackwell, written in CuTe: `flash_attn.cute.interface`.

    It compiles at the first call of a kind, 5 to 20 s for both directions: dtype, head dim, query heads for each key
    head, causal or not, with a window or not, the soft-cap, whether the longest entry fits one tile of 64 to 192 rows,
    and whether there are more than 256 entries. `recipes/flash4` compiles ahead. What follows the tensors goes by name,
    and only the first values are read: order and number change from release to release.
    """

    in_forward: ClassVar = {"num_splits": 1, "return_lse": True}

    def __init__(self) -> None:
        interface = importlib.import_module("flash_attn.cute.interface")
        self.attend, self.differentiate = interface._flash_attn_fwd, interface._flash_attn_bwd

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, ragged: Ragged, scoring: Scoring
    ) -> tuple[Tensor, Tensor, Tensor]:
        tensors = *_contiguous(q, k, v, out, dout), lse.contiguous()
        dq, dk, dv, *_ = self.differentiate(*tensors, **self._by_name(ragged, scoring), deterministic=True)
        return dq, dk, dv


def widest_head_dim(kernel: str, device: torch.device) -> int:
    """Return the widest head that a flash kernel takes on a CUDA device; it takes smaller multiples of 8 too."""
    if kernel == "flash_attn_3":
        return FLASH_3_WIDEST_HEAD_DIM
    if kernel == "flash_attn_4" and torch.cuda.get_device_capability(device)[0] > 9:
        return FLASH_4_WIDEST_HEAD_DIM_ON_BLACKWELL
    return WIDEST_HEAD_DIM


def takes_window() -> bool:
    """Return whether the CUDA kernels of this torch take a window, in both directions by their schema."""
    names = ("_flash_attention_forward", "_flash_attention_backward")
    schemas = [getattr(aten, name).default._schema for name in names]
    return all("window_size_left" in [argument.name for argument in schema.arguments] for schema in schemas)


def _contiguous(*tensors: Tensor) -> list[Tensor]:
    """Return rows without gaps in their last axis."""
    return [x if x.stride(-1) == 1 else x.contiguous() for x in tensors]
