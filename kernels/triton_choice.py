"""Whether rows are moved by the Triton kernels: on a CUDA device, where `RADIXTRAIN_TRITON=1` asks for them.

They are tested under Triton's interpreter and compiled for sm_80 and sm_90, but have not been timed on a device yet, so
torch's own kernels are the default.
"""

from __future__ import annotations

import os

from torch import Tensor

__all__ = ["by_triton"]


def by_triton(x: Tensor) -> bool:
    """Asked for, and on a device that can: CUDA, or any under the interpreter (`TRITON_INTERPRET=1`)."""
    if os.environ.get("RADIXTRAIN_TRITON") != "1":
        return False
    return x.device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"
