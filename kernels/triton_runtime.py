"""Triton: when its kernels run, and how they import it.

`RADIXTRAIN_TRITON=1` makes Triton kernels merge pieces and add up rows on a CUDA device. They are tested under Triton's
interpreter and compiled for sm_80, sm_90 and sm_120, but have not been timed on a device yet, so torch's own kernels
are the default. `attention="tree"` asks for the tiled tree attention.

Triton stays optional: it is loaded when `triton` or `tl` is first imported from here. Only files that hold Triton
kernels do that, and they are imported when one of their kernels is to run.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from typing import Any

import torch
from torch import Tensor

__all__ = ["by_triton", "triton_missing"]

_MODULES = {"triton": "triton", "tl": "triton.language"}


def by_triton(x: Tensor) -> bool:
    """Whether Triton was asked for and runs on the device of x: CUDA, or any under its interpreter."""
    return os.environ.get("RADIXTRAIN_TRITON") == "1" and _runs_on(x.device)


def triton_missing(device: torch.device) -> str | None:
    """What Triton lacks to run on a device, in the words of an error, or None."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed (pip install triton)"
    if not _runs_on(device):
        return f"Triton needs CUDA, the tensors are on {device.type} (TRITON_INTERPRET=1 runs it there, slowly)"
    return None


def _runs_on(device: torch.device) -> bool:
    return device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"


def __getattr__(name: str) -> Any:
    """`triton` and `triton.language`. ImportError that says how to get them."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return importlib.import_module(_MODULES[name])
    except ImportError as error:
        raise ImportError(
            "the Triton kernels of radixtrain need Triton, which is not installed: pip install triton"
        ) from error
