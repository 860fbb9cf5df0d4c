"""The varlen attention kernels by name, and what each one takes.

| name           | runs                           | dtypes                           | soft-cap | window |
|----------------|--------------------------------|----------------------------------|----------|--------|
| `torch`        | the flash kernels inside torch | CPU all, CUDA float16 / bfloat16 | no       | yes    |
| `flash_attn`   | the flash-attn package, CUDA   | float16, bfloat16                | yes      | yes    |
| `flash_attn_3` | flash-attn-3, Hopper           | float16, bfloat16                | yes      | yes    |
| `cudnn`        | `torch`; one entry cuDNN       | float16, bfloat16                | no       | yes    |
| `efficient`    | torch's other kernel, CUDA     | float32, float16, bfloat16       | no       | yes    |
| `eager`        | anywhere, a loop of matmuls    | all; the specification           | yes      | yes    |
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

import torch

from radixtrain.kernels.cpu_loops import EagerKernel, TorchCPUKernel
from radixtrain.kernels.cudnn import CudnnKernel, cudnn_missing
from radixtrain.kernels.efficient import EFFICIENT_DTYPES, EfficientKernel
from radixtrain.kernels.flash import (
    FLASH_2_MAX_HEAD_DIM,
    FLASH_3_MAX_HEAD_DIM,
    FlashAttn3Kernel,
    FlashAttnKernel,
    TorchCUDAKernel,
    flash_3_missing,
    takes_window,
)
from radixtrain.kernels.varlen_args import VarlenKernel

KERNELS = ("torch", "flash_attn", "flash_attn_3", "cudnn", "efficient", "eager")


@dataclass(frozen=True)
class KernelCall:
    """What a kernel has to take.

    softcap, window, sinks: whether scores are soft-capped, a sliding window binds, heads have sinks.
    """

    device: torch.device
    dtype: torch.dtype
    head_dim: int
    softcap: bool = False
    window: bool = False
    sinks: bool = False


def varlen_kernel(name: str, device: torch.device) -> VarlenKernel:
    """The kernel of that name on that device. ImportError without its package, ValueError for an unknown name."""
    if name == "eager":
        return EagerKernel()
    if name == "flash_attn" and device.type == "cuda":
        return FlashAttnKernel()
    if name == "flash_attn_3" and device.type == "cuda":
        return FlashAttn3Kernel()
    if name == "cudnn" and device.type == "cuda":
        return CudnnKernel()
    if name == "efficient" and device.type == "cuda":
        return EfficientKernel()
    if name == "torch" and device.type in ("cpu", "cuda"):
        return TorchCUDAKernel() if device.type == "cuda" else TorchCPUKernel()
    raise ValueError(f"no attention kernel {name!r} on device {device.type!r}; kernels: {', '.join(KERNELS)}")


def varlen_refusal(kernel: str, call: KernelCall) -> str | None:
    """Why this kernel cannot run the call, in the words of an error; None if it can."""
    if kernel == "eager":
        return None
    if kernel in ("torch", "cudnn", "efficient") and call.softcap:
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
    if kernel == "efficient":
        return None if call.dtype in EFFICIENT_DTYPES else f"takes float32, float16 and bfloat16, got {call.dtype}"
    if call.dtype not in (torch.float16, torch.bfloat16):
        return f"takes float16 and bfloat16, got {call.dtype}"
    widest = FLASH_3_MAX_HEAD_DIM if kernel == "flash_attn_3" else FLASH_2_MAX_HEAD_DIM
    if call.head_dim > widest or call.head_dim % 8:
        return f"takes head dims that are multiples of 8 up to {widest}, got {call.head_dim}"
    if kernel in ("torch", "cudnn") and call.window and not takes_window():
        return f"takes no sliding window in torch {torch.__version__}"
    return None
