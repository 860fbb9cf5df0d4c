"""Torch's compiler for a device that is not there: kernels become machine code of an H100, and are not launched."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import torch
from torch._C._dynamo import guards
from torch._dynamo.device_interface import CudaInterface
from torch._inductor.fx_passes import joint_graph, post_grad
from torch._inductor.runtime import triton_helpers
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from torch.cuda import random
from triton.backends.compiler import GPUTarget
from torch.utils._python_dispatch import _pop_mode_temporarily
from triton.runtime.driver import driver

from radixtrain.kernels import tree_flex

__all__ = ["COMPILED", "compile_without_running"]

COMPILED: list[tuple[str, int]] = []  # name and bytes of shared memory of each kernel
H100 = {
    "name": "NVIDIA H100 80GB HBM3", "major": 9, "minor": 0, "multi_processor_count": 132, "warp_size": 32,
    "max_threads_per_multi_processor": 2048, "regs_per_multiprocessor": 65536, "total_memory": 80 * 2**30,
    "gcnArchName": "", "shared_memory_per_block_optin": 227 * 1024, "shared_memory_per_block": 48 * 1024,
    "shared_memory_per_multiprocessor": 228 * 1024, "L2_cache_size": 50 * 2**20,
}  # fmt: skip


class Chip:
    get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))
    get_current_device = get_current_stream = staticmethod(lambda *_: 0)


def compile_without_running() -> None:
    properties = namedtuple("Properties", H100)(**H100)
    state, precompile = torch.get_rng_state(), CachingAutotuner._precompile_config

    def compiled(kernel: CachingAutotuner, config: Any) -> Any:
        result = precompile(kernel, config)
        COMPILED.append((kernel.fn.__name__, result.kernel.shared))
        return result

    for module in (torch.cuda, random):
        vars(module).update(get_rng_state=lambda *_: state.clone(), set_rng_state=lambda *_: None)
    torch.cuda.get_device_properties = lambda device=None: properties
    torch.cuda._exchange_device, torch.cuda._maybe_exchange_device = lambda device: 0, lambda device: 0
    torch._C._cuda_getCurrentRawStream = torch.cuda.set_device = lambda device: 0
    for name, answer in {"get_device_properties": properties, "current_device": 0, "device_count": 1}.items():
        setattr(CudaInterface, name, staticmethod(lambda device=None, answer=answer: answer))
        setattr(CudaInterface.Worker, name, staticmethod(lambda device=None, answer=answer: answer))
    CudaInterface.is_available = staticmethod(lambda: True)
    CudaInterface.get_compute_capability = staticmethod(lambda device=None: 90)
    CudaInterface.get_raw_stream = staticmethod(lambda device: 0)
    for passes in (joint_graph, post_grad):
        passes.lazy_init = lambda *_, **__: None  # would trace patterns on real tensors
    guards._empty_strided_cuda = lambda size, stride, dtype: torch.empty_strided(
        size, stride, dtype=dtype, device="cuda:0"
    )
    triton_helpers.set_driver_to_gpu = lambda: None
    driver.set_active(Chip())
    CachingAutotuner._precompile_config = compiled
    CachingAutotuner._make_launchers = lambda kernel: kernel.launchers.append(None)
    CachingAutotuner.run = lambda *_, **__: None
    whole = tree_flex._compiled()

    def unwatched(*args: Any) -> Any:
        with _pop_mode_temporarily():  # nothing is compiled while `Waits` looks on
            return whole(*args)

    tree_flex._compiled = lambda: unwatched
