"""Functions of elements and rows as one kernel: torch.compile on CUDA, their operators one by one elsewhere."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sysconfig
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def fused(function: Callable[..., Any], *tensors: Tensor) -> Any:
    """Call a function of tensors. On CUDA its first call compiles it, in seconds, for any size of the first axis.

    The other axes are constants of a model. Only a row of known length is summed while its maximum is found.
    """
    if tensors[0].is_cuda and not torch.compiler.is_compiling():
        function = _compiled(function)
        for x in tensors:
            torch._dynamo.mark_static(x, [*range(1, x.ndim)])
    return function(*tensors)


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile, if Triton is there and finds a GPU, a C compiler and Python's headers that it can use.

    Not with `fullgraph`: torch compiles nothing under a dispatch mode such as `FlopCounterMode`, and would raise there.
    """
    compiler, headers = shutil.which(os.environ.get("CC", "gcc")), Path(sysconfig.get_path("include"), "Python.h")
    has_triton = importlib.util.find_spec("triton") and torch.cuda.get_device_capability() >= (7, 0)
    if has_triton and compiler and headers.exists():
        return torch.compile(function, dynamic=True)
    return function
