"""Functions of elements and rows as one kernel: torch.compile on CUDA, their operators one by one elsewhere."""

from __future__ import annotations

import importlib.util
import logging
import os
import shutil
import sysconfig
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger(__name__)


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
    """Compile, if torch can here.

    Not with `fullgraph`: torch compiles nothing under a dispatch mode such as `FlopCounterMode`, and would raise there.
    """
    return function if _why_not() else torch.compile(function, dynamic=True)


@cache
def _why_not() -> str:
    """Say once why torch.compile finds no compiler for this GPU; empty if it finds one."""
    missing = {
        "Triton": importlib.util.find_spec("triton") and torch.cuda.get_device_capability() >= (7, 0),
        "a C compiler": shutil.which(os.environ.get("CC", "gcc")),
        "Python's headers": Path(sysconfig.get_path("include"), "Python.h").exists(),
    }
    reason = next((name for name, found in missing.items() if not found), "")
    if reason:
        logger.warning("loss and merges run uncompiled on this GPU, which is slower: %s is missing", reason)
    return reason
