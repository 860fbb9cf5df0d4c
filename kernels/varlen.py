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
from typing import NamedTuple

import torch

from radixtrain.kernels.cpu_loops import EagerKernel, TorchCPUKernel
from radixtrain.kernels.efficient import EFFICIENT_DTYPES, EfficientKernel
from radixtrain.kernels.flash import (
    CudnnKernel,
    FlashAttn3Kernel,
    FlashAttn4Kernel,
    FlashAttnKernel,
    TorchCUDAKernel,
    cudnn_missing,
    unfit_device,
    widest_head_dim,
)
from radixtrain.kernels.varlen_args import VarlenKernel
from radixtrain.versions import installed, is_older, to_install

ON_CUDA: dict[str, Callable[[], VarlenKernel]] = {
    "torch": TorchCUDAKernel,
    "flash_attn": FlashAttnKernel,
    "flash_attn_3": FlashAttn3Kernel,
    "flash_attn_4": FlashAttn4Kernel,
    "cudnn": CudnnKernel,
    "efficient": EfficientKernel,
}
KERNELS = (*ON_CUDA, "eager")


class Package(NamedTuple):
    """The distribution that a kernel comes from.

    name: of the distribution. how: to get it. majors: of the compute capabilities that it runs on, forward and
    backward; empty if it is not asked.
    """

    name: str
    how: str
    majors: tuple[int, ...] = ()


PACKAGES = {
    "flash_attn": Package("flash-attn", f"{to_install('flash-attn')}, needs a CUDA toolchain"),
    "flash_attn_3": Package("flash-attn-3", "built from hopper/ of Dao-AILab/flash-attention", majors=(9,)),
    # On 8.x it has no backward, on 12.x none in a fixed order.
    "flash_attn_4": Package("flash-attn-4", to_install("flash-attn-4"), majors=(9, 10, 11)),
}


@dataclass(frozen=True)
class KernelCall:
    """What a kernel has to take.

    softcap, window: whether scores are soft-capped, a sliding window binds.
    """

    device: torch.device
    dtype: torch.dtype
    head_dim: int
    softcap: bool = False
    window: bool = False


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
    return None


def package_missing(kernel: str, device: torch.device) -> str | None:
    """Say what a kernel lacks on a CUDA device, in the words of an error; None if nothing or if it has no package.

    A package that is there and fits is imported: version 2 and version 4 both write to `flash_attn/`, and a build for
    another torch or CUDA is found as well as a fitting one.
    """
    package = PACKAGES.get(kernel)
    if package is None:
        return None
    version = installed(package.name)
    if version is None:
        return f"the package {package.name} is not installed ({package.how})"
    if is_older(package.name, version):
        return f"the package {package.name} {version} is too old ({to_install(package.name)})"
    if package.majors and (unfit := unfit_device(package.majors, device)):
        return unfit
    try:
        ON_CUDA[kernel]()
    except (ImportError, AttributeError, OSError) as error:
        again = f"pip install --force-reinstall --no-deps {package.name}=={version}"
        return f"the package {package.name} {version} cannot be imported: {error} ({again})"
    return None
