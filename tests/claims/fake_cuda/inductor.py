"""Torch's compiler for a device that is not there: kernels become machine code of an H100, and none is launched."""

from __future__ import annotations

from collections import namedtuple
from functools import partial
from typing import Any

import torch
from torch._C._dynamo import guards
from torch._dynamo.device_interface import CudaInterface
from torch._inductor.fx_passes import joint_graph, post_grad
from torch._inductor.runtime import triton_helpers
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from torch.utils._python_dispatch import _pop_mode_temporarily
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from radixtrain.kernels import functions, tree_flex

__all__ = ["SHARED", "compile_without_running"]

SHARED: list[tuple[str, int]] = []  # name and bytes of shared memory of each kernel that was compiled
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
    """From here on. Called after `device.answer`."""
    _answer_as_an_h100()
    precompile, compile_function = CachingAutotuner._precompile_config, functions._compiled

    def compiled(kernel: CachingAutotuner, config: Any) -> Any:
        result = precompile(kernel, config)
        SHARED.append((kernel.fn.__name__, result.kernel.shared))
        return result

    def unwatched(whole: Any, *args: Any) -> Any:
        with _pop_mode_temporarily():  # torch compiles nothing while a mode such as `Waits` looks on
            return whole(*args)

    for passes in (joint_graph, post_grad):
        passes.lazy_init = lambda *_, **__: None  # it would trace patterns on real tensors
    guards._empty_strided_cuda = lambda *given: torch.empty_strided(*given[:2], dtype=given[2], device="cuda:0")
    triton_helpers.set_driver_to_gpu = lambda: None
    driver.set_active(Chip())
    changes = {"_precompile_config": compiled, "run": lambda *_, **__: None}
    changes["_make_launchers"] = lambda kernel: kernel.launchers.append(None)
    for name, change in changes.items():
        setattr(CachingAutotuner, name, change)
    whole = partial(unwatched, tree_flex._compiled())
    tree_flex._compiled = lambda: whole
    functions._compiled = lambda function: partial(unwatched, compile_function(function))


def _answer_as_an_h100() -> None:
    properties = namedtuple("Properties", H100)(**H100)
    answers = {
        **{"get_device_properties": properties, "current_device": 0, "device_count": 1, "is_available": True},
        **{"get_compute_capability": 90, "get_raw_stream": 0},
    }
    for name, answer in answers.items():
        for place in (CudaInterface, CudaInterface.Worker):
            setattr(place, name, staticmethod(lambda device=None, answer=answer: answer))
    torch.cuda.get_device_properties = lambda device=None: properties
    for name in ("_exchange_device", "_maybe_exchange_device", "set_device"):
        setattr(torch.cuda, name, lambda device, name=name: 0)
    torch._C._cuda_getCurrentRawStream = lambda device: 0
