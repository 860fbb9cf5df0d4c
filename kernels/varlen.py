"""The varlen attention kernels by name, and what each one takes.

| name           | runs                            | dtypes                           | soft-cap | window |
|----------------|---------------------------------|----------------------------------|----------|--------|
| `torch`        | the flash kernels inside torch  | CPU all, CUDA float16 / bfloat16 | no       | yes    |
| `flash_attn`   | the flash-attn package, CUDA    | float16, bfloat16                | yes      | yes    |
| `flash_attn_3` | flash-attn-3, Hopper            | float16, bfloat16                | yes      | yes    |
| `flash_attn_4` | flash-attn-4, Hopper, Blackwell | float16, bfloat16                | yes      | yes    |
| `cudnn`        | `torch`; equal entries cuDNN    | float16, bfloat16                | no       | yes    |
| `efficient`    | torch's other kernel, CUDA      | float32, float16, bfloat16       | no       | yes    |
| `eager`        | anywhere, a loop of matmuls     | all; the specification           | yes      | yes    |
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from radixtrain.kernels.cpu_loops import EagerKernel, TorchCPUKernel
from radixtrain.kernels.cudnn import CudnnKernel, cudnn_missing
from radixtrain.kernels.efficient import EFFICIENT_DTYPES, EfficientKernel
from radixtrain.kernels.flash import (
    FlashAttn3Kernel,
    FlashAttn4Kernel,
    FlashAttnKernel,
    TorchCUDAKernel,
    takes_window,
    widest_head_dim,
)
from radixtrain.kernels.packages import package_missing
from radixtrain.kernels.varlen_args import VarlenKernel

ON_CUDA: dict[str, Callable[[], VarlenKernel]] = {
    "torch": TorchCUDAKernel,
    "flash_attn": FlashAttnKernel,
    "flash_attn_3": FlashAttn3Kernel,
    "flash_attn_4": FlashAttn4Kernel,
    "cudnn": CudnnKernel,
    "efficient": EfficientKernel,
}
KERNELS = (*ON_CUDA, "eager")


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
    """Return the kernel of that name on that device. Raises ImportError without its package, ValueError if unknown."""
    if name == "eager":
        return EagerKernel()
    if name == "torch" and device.type == "cpu":
        return TorchCPUKernel()
    if name in ON_CUDA and device.type == "cuda":
        return ON_CUDA[name]()
    raise ValueError(f"no attention kernel {name!r} on device {device.type!r}; kernels: {', '.join(KERNELS)}")


def varlen_refusal(kernel: str, call: KernelCall) -> str | None:
    """Say why this kernel cannot run the call, in the words of an error; None if it can."""
    if kernel == "eager":
        return None
    if kernel in ("torch", "cudnn", "efficient") and call.softcap:
        return "computes no soft-cap"
    if kernel == "torch" and call.device.type == "cpu":
        return None
    if call.device.type != "cuda":
        return f"needs CUDA, the tensors are on {call.device.type}"
    if missing := package_missing(kernel, call.device):
        return missing
    if kernel == "cudnn" and (missing := cudnn_missing(call.device)):
        return missing
    if kernel == "efficient":
        return None if call.dtype in EFFICIENT_DTYPES else f"takes float32, float16 and bfloat16, got {call.dtype}"
    if call.dtype not in (torch.float16, torch.bfloat16):
        return f"takes float16 and bfloat16, got {call.dtype}"
    widest = widest_head_dim(kernel, call.device)
    if call.head_dim > widest or call.head_dim % 8:
        return f"takes head dims that are multiples of 8 up to {widest}, got {call.head_dim}"
    if kernel in ("torch", "cudnn") and call.window and not takes_window():
        return f"takes no sliding window in torch {torch.__version__}"
    return None
