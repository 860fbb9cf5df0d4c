"""Measures how long a function takes and its peak memory, and names what else these numbers depend on.

The clock stops when the device has finished. A file of numbers names date, commit, machine, threads, versions.

seconds_of(step, device)                                                 # once
seconds_in_turns({"ordinary": a, "radix": b}, device, repeats=5)         # A B A B ..., so that a machine that slows
                                                                         # down slows both
"""

from __future__ import annotations

import os
import platform
import subprocess
import time
from collections.abc import Callable, Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar

import torch
import transformers
from torch import nn
from torch.profiler import ProfilerActivity, profile

K = TypeVar("K")


def seconds_of(run: Callable[[], object], device: torch.device) -> float:
    """Time one run, in seconds, until the device has finished it."""
    _wait_for(device)
    start = time.perf_counter()
    run()
    _wait_for(device)
    return time.perf_counter() - start


def seconds_in_turns(
    runs: Mapping[K, Callable[[], object]],
    device: torch.device,
    repeats: int,
    *,
    before: Callable[[K], object] = lambda _: None,
) -> dict[K, list[float]]:
    """Time `repeats` runs of each function, alternating between the functions; returns seconds.

    before: called with the name of a run before each of its turns, untimed.
    """
    seconds: dict[K, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            before(name)
            seconds[name].append(seconds_of(run, device))
    return seconds


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


def added_bytes(model: nn.Module, run: Callable[[], object], trains: bool = True) -> int:
    """Return the peak bytes that a step adds to weights, batch and, if it trains, gradients.

    The gradients exist already, as in the second micro-batch of an optimizer step. So this counts activations, the loss
    with its gradient of the head, and the one gradient at a time that autograd is about to add.
    """
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if trains and parameter.requires_grad else None
    return peak_bytes(run, next(model.parameters()).device)


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


def environment(device: torch.device, dtype: str) -> dict[str, Any]:
    """Describe the conditions of a measurement, column to value. Names no host and no path."""
    return {
        "date": time.strftime("%Y-%m-%d"),
        "commit": _commit(),
        "machine": torch.cuda.get_device_name(device) if device.type == "cuda" else processor(),
        "num_cores": os.cpu_count(),
        "num_threads": torch.get_num_threads(),
        "dtype": dtype,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def header(device: torch.device, dtype: str, repeats: int) -> str:
    """Describe the conditions of a measurement in one line, with the present load of the machine."""
    facts = environment(device, dtype)
    commit = f", commit {facts['commit']}" if facts["commit"] else ""
    load = f", load {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    return (
        f"{facts['date']}{commit}, {facts['machine']}, {facts['num_cores']} cores, {facts['num_threads']} threads"
        f"{load}, {dtype}, torch {facts['torch']}, transformers {facts['transformers']}, medians of {repeats} "
        f"alternating runs"
    )


def processor() -> str:
    """Return the CPU's model, or only its architecture if the model is unknown."""
    described = Path("/proc/cpuinfo").read_text(errors="replace") if Path("/proc/cpuinfo").exists() else ""
    models = [line.partition(":")[2].strip() for line in described.splitlines() if line.startswith("model name")]
    return f"{models[0]} ({platform.machine()})" if models else platform.processor() or platform.machine()


def _commit() -> str:
    """Return the commit of the repository that holds this file, `-dirty` if changed; empty for an installed package."""
    for command in (["ls-files", "--error-unmatch", __file__], ["describe", "--always", "--dirty", "--exclude=*"]):
        try:
            done = subprocess.run(
                ["git", *command], cwd=Path(__file__).parent, capture_output=True, text=True, check=True
            )
        except (OSError, subprocess.CalledProcessError):
            return ""
    return done.stdout.strip()
