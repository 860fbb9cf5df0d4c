"""Triton: when it moves the rows, and how its kernels import it.

Rows are moved by the Triton kernels on a CUDA device if `RADIXTRAIN_TRITON=1` asks for them. They are tested under
Triton's interpreter and compiled for sm_80 and sm_90, but have not been timed on a device yet, so torch's own kernels
are the default.

Triton stays optional: it is imported when `triton` or `tl` is first imported from here, and only files that hold Triton
kernels do that. Whoever dispatches imports those files when a kernel was asked for, and not before.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

from torch import Tensor

__all__ = ["by_triton"]

_MODULES = {"triton": "triton", "tl": "triton.language"}


def by_triton(x: Tensor) -> bool:
    """Asked for, and on a device that can: CUDA, or any under the interpreter (`TRITON_INTERPRET=1`)."""
    if os.environ.get("RADIXTRAIN_TRITON") != "1":
        return False
    return x.device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"


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
