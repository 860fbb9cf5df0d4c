"""Why a kernel cannot run a call, in the words of an error. `varlen.py` has the table of what each one takes."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

import torch

from radixtrain.kernels.cudnn import cudnn_max_head_dim, cudnn_missing
from radixtrain.kernels.flash import FLASH_2_MAX_HEAD_DIM, FLASH_3_MAX_HEAD_DIM, flash_3_missing, takes_window
from radixtrain.kernels.tree_tiles import DTYPES, MAX_HEAD_DIM
from radixtrain.kernels.triton_runtime import triton_missing

__all__ = ["KernelCall", "tiled_refusal", "varlen_refusal"]


@dataclass(frozen=True)
class KernelCall:
    """What a kernel has to take.

    softcap, window, sinks: whether scores are soft-capped, a sliding window binds, heads have sinks.
    """

    device: torch.device
    dtype: torch.dtype
    head_dim: int
    softcap: bool
    window: bool
    sinks: bool


def varlen_refusal(kernel: str, call: KernelCall) -> str | None:
    """Why this varlen kernel cannot run the call, or None."""
    if kernel == "eager":
        return None
    if kernel in ("torch", "cudnn") and call.softcap:
        return "computes no soft-cap"
    if kernel == "torch" and call.device.type == "cpu":
        return None
    if call.device.type != "cuda":
        return f"needs CUDA, the tensors are on {call.device.type}"
    if kernel == "flash_attn" and importlib.util.find_spec("flash_attn") is None:
        return "the package flash-attn is not installed (pip install 'radixtrain[flash]', needs a CUDA toolchain)"
    if kernel == "flash_attn_3" and (missing := flash_3_missing(call.device)):
        return missing
    if kernel == "cudnn" and (missing := cudnn_missing(call.device)):
        return missing
    if call.dtype not in (torch.float16, torch.bfloat16):
        return f"takes float16 and bfloat16, got {call.dtype}"
    widest = _max_head_dim(kernel, call.device)
    if call.head_dim > widest or call.head_dim % 8:
        return f"takes head dims that are multiples of 8 up to {widest}, got {call.head_dim}"
    if kernel in ("torch", "cudnn") and call.window and not takes_window():
        return f"takes no sliding window in torch {torch.__version__}"
    return None


def _max_head_dim(kernel: str, device: torch.device) -> int:
    if kernel == "cudnn":
        return cudnn_max_head_dim(device)
    return FLASH_3_MAX_HEAD_DIM if kernel == "flash_attn_3" else FLASH_2_MAX_HEAD_DIM


def tiled_refusal(call: KernelCall) -> str | None:
    """Why the tiled tree attention cannot run the call, or None."""
    modifiers = {"soft-cap": call.softcap, "sinks": call.sinks}
    for name, given in modifiers.items():
        if given:
            return f"computes no {name}"
    if call.window:
        return "computes no sliding window, and one is shorter than the batch's longest sequence"
    if call.device.type == "cpu" and call.dtype == torch.bfloat16:
        return "runs on a CPU under Triton's interpreter, which gets bfloat16 wrong"
    if call.dtype not in DTYPES:
        return f"takes {', '.join(str(dtype).removeprefix('torch.') for dtype in DTYPES)}, got {call.dtype}"
    if call.head_dim > MAX_HEAD_DIM:
        return f"takes head dims up to {MAX_HEAD_DIM}, got {call.head_dim}"
    return triton_missing(call.device)
