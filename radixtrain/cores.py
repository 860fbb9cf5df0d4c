"""The cores that this process may use, and what OpenMP learns of them before torch is imported."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator, MutableMapping
from contextlib import suppress
from pathlib import Path

WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
SPINS = "10000"  # GNU OpenMP's own number is 300,000
THREADS = "OMP_NUM_THREADS"
_chosen: list[str] = []  # the number of threads, if it is not the user's


def share_cores(environment: MutableMapping[str, str]) -> None:
    """Set how this process and those that it starts share the cores, unless the user has.

    OpenMP's threads spin at a barrier before they sleep, which is most of the time if another program has one of their
    cores. The demo on two cores, tokens a second, without other programs and beside two busy ones: 93,000 and 15,000
    as GNU OpenMP spins, 81,000 and 45,000 with SPINS, 60,000 and 33,000 if threads sleep at once (recipes/LOG.md).
    torch does not read the quota of a cgroup and starts a thread for each core of the machine.
    """
    if "torch" in sys.modules:
        return  # it has read them
    if not any(name in environment for name in WAITING):
        environment["GOMP_SPINCOUNT"] = SPINS
    if THREADS not in environment and num_cores() < _of_cpuset():
        environment[THREADS] = str(num_cores())
        _chosen[:] = [environment[THREADS]]


def threads_are_given() -> bool:
    """Return whether the user has set the number of threads."""
    return THREADS in os.environ and [os.environ[THREADS]] != _chosen


def processor() -> str:
    """Return the CPU's model, or only its architecture if the model is unknown."""
    described = Path("/proc/cpuinfo").read_text(errors="replace") if Path("/proc/cpuinfo").exists() else ""
    models = [line.partition(":")[2].strip() for line in described.splitlines() if line.startswith("model name")]
    return f"{models[0]} ({platform.machine()})" if models else platform.processor() or platform.machine()


def num_cores(root: Path = Path("/")) -> int:
    """Count the cores that this process may use at once: its cpuset, at most the whole cores of a cgroup's quota."""
    return max(1, int(min(_of_cpuset(), *_quotas(root), float("inf"))))


def _of_cpuset() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1  # not on macOS


def _quotas(root: Path) -> Iterator[float]:
    """Yield the quotas, in cores, of this process's cgroup and those above it, in version 1 or 2."""
    groups = root / "proc/self/cgroup"
    for line in groups.read_text().splitlines() if groups.is_file() else ():
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / controllers
        for folder in (top / path.lstrip("/"), *(top / path.lstrip("/")).parents):
            with suppress(OSError, ValueError, ZeroDivisionError):  # no such file, or `max`
                files = ["cpu.cfs_quota_us", "cpu.cfs_period_us"] if controllers else ["cpu.max"]
                quota, period = " ".join((folder / name).read_text() for name in files).split()
                if float(quota) > 0:
                    yield float(quota) / float(period)
            if folder == top:
                break
