"""Triton, imported by the files that hold its kernels: `triton` and `tl` load when they are first read from here."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import torch

from radixtrain.kernels.triton_door import runs_triton

_MODULES = {"triton": "triton", "tl": "triton.language"}


def triton_missing(device: torch.device) -> str | None:
    """What Triton lacks to run on a device, in the words of an error, or None."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed (pip install triton)"
    if not runs_triton(device):
        return f"Triton needs CUDA, the tensors are on {device.type} (TRITON_INTERPRET=1 runs it there, slowly)"
    return None


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
