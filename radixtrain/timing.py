"""Measures how long a function takes, and its peak memory."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from itertools import accumulate

import torch
from torch.profiler import ProfilerActivity, profile


def seconds_of(run: Callable[[], object], device: torch.device) -> float:
    """Time one run, in seconds, until the device has finished it."""
    _wait_for(device)
    start = time.perf_counter()
    run()
    _wait_for(device)
    return time.perf_counter() - start


def peak_bytes(run: Callable[[], object], device: torch.device) -> int:
    """Return the peak of torch's allocations on `device` during `run`, in bytes above what was allocated before it.

    On CUDA this is what the caching allocator counts (`torch.cuda.max_memory_allocated`). On CPU it is the running sum
    of the allocations and frees that torch's profiler records, which is exact and the same every time; it slows the run
    down. Buffers inside operators and what autograd saves are counted; rounding to pages, Python's objects and scratch
    memory of the math libraries are not. The resident set would not do: it is the high-water mark of everything before.
    """
    if device.type == "cuda":
        return _peak_cuda_bytes(run, device)
    return max(accumulate(_cpu_changes(run), initial=0))


def _peak_cuda_bytes(run: Callable[[], object], device: torch.device) -> int:
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    run()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def _cpu_changes(run: Callable[[], object]) -> list[int]:
    """List the bytes of each allocation, negative for each free, in order."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or the profiler says on stderr that it starts and stops
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        result = run()
    del result
    assert recorded.profiler is not None and recorded.profiler.kineto_results is not None
    events = [event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"]
    return [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
