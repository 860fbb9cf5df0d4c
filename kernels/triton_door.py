"""The one door to `experimental/`: Triton kernels that have not been timed on a device yet.

`RADIXTRAIN_TRITON=1` makes them merge pieces of attention and add up rows on a CUDA device, and `attention="tree"` asks
for the tiled tree attention. They are tested under Triton's interpreter, and compiled for sm_80, sm_90 and sm_120.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

import torch
from torch import Tensor


def by_triton(x: Tensor) -> bool:
    """Whether Triton was asked for and runs on the device of x."""
    return os.environ.get("RADIXTRAIN_TRITON") == "1" and runs_triton(x.device)


def runs_triton(device: torch.device) -> bool:
    """CUDA, or any device under Triton's interpreter."""
    return device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"


def experimental(name: str) -> Any:
    """A module of `experimental/`, imported when it is needed: Triton is optional."""
    return importlib.import_module(f"radixtrain.kernels.experimental.{name}")
