"""The most memory that a piece of code holds at once, beyond what was held before it began.

On CUDA this is what torch's caching allocator counts (`torch.cuda.max_memory_allocated`). On CPU it is the running sum
of torch's own allocations and frees, as its profiler records them, which is exact and the same every time. It counts
buffers inside operators and what autograd saves, but not rounding to pages, Python's objects, scratch memory of the
math libraries, and what other threads allocate for themselves. The resident set of the process would not do: it is the
high-water mark of everything that ran before.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

__all__ = ["peak_bytes"]


def peak_bytes(run: Callable[[], Any], device: torch.device) -> int:
    """How many bytes torch's allocations on `device` rise while `run` runs, at most.

    On CPU the profiler slows `run` down, so do not time it here.
    """
    return _peak_cuda_bytes(run, device) if device.type == "cuda" else _peak_cpu_bytes(run)


def _peak_cuda_bytes(run: Callable[[], Any], device: torch.device) -> int:
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    run()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def _peak_cpu_bytes(run: Callable[[], Any]) -> int:
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or the profiler says on stderr that it starts and stops
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        run()
    assert recorded.profiler is not None and recorded.profiler.kineto_results is not None
    events = [event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"]
    changes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return max(accumulate(changes, initial=0))
