"""Triton, or an error that says how to get it.

The files that hold Triton kernels import it from here. Whoever dispatches imports those files when a kernel was asked
for, and not before, so that Triton stays optional.
"""

from __future__ import annotations

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError(
        "the Triton kernels of radixtrain need Triton, which is not installed: pip install triton"
    ) from error

__all__ = ["tl", "triton"]
