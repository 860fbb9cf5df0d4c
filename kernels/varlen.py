"""The varlen attention kernels by name. Each forward returns its log-sum-exp, and the backward takes one (`ragged.py`).

| name           | runs                           | dtypes                           | soft-cap | window |
|----------------|--------------------------------|----------------------------------|----------|--------|
| `torch`        | the flash kernels inside torch | CPU all, CUDA float16 / bfloat16 | no       | yes    |
| `flash_attn`   | the flash-attn package, CUDA   | float16, bfloat16                | yes      | yes    |
| `flash_attn_3` | flash-attn-3, Hopper           | float16, bfloat16                | yes      | yes    |
| `cudnn`        | cuDNN, and `torch` (see below) | float16, bfloat16                | no       | yes    |
| `eager`        | anywhere, a loop of matmuls    | all; the specification           | yes      | yes    |

`cudnn` runs calls whose entries all have one shape, such as a prompt that all rows share, on cuDNN, and every other
call on `torch` (`cudnn.py`). It has never run on a GPU, and `auto` never chooses it.
"""

from __future__ import annotations

import torch

from radixtrain.kernels.cudnn import CudnnKernel
from radixtrain.kernels.flash import FlashAttn3Kernel, FlashAttnKernel, TorchCUDAKernel
from radixtrain.kernels.looping import EagerKernel, TorchCPUKernel
from radixtrain.kernels.ragged import VarlenKernel

__all__ = ["KERNELS", "varlen_kernel"]

KERNELS = ("torch", "flash_attn", "flash_attn_3", "cudnn", "eager")


def varlen_kernel(name: str, device: torch.device) -> VarlenKernel:
    """The kernel of that name on that device. ImportError without its package, ValueError for an unknown name."""
    if name == "eager":
        return EagerKernel()
    if name == "flash_attn" and device.type == "cuda":
        return FlashAttnKernel()
    if name == "flash_attn_3" and device.type == "cuda":
        return FlashAttn3Kernel()
    if name == "cudnn" and device.type == "cuda":
        return CudnnKernel(others=TorchCUDAKernel())
    if name == "torch" and device.type in ("cpu", "cuda"):
        return TorchCUDAKernel() if device.type == "cuda" else TorchCPUKernel()
    raise ValueError(f"no attention kernel {name!r} on device {device.type!r}; kernels: {', '.join(KERNELS)}")
