"""Launches one process per device: all ranks meet before rows are read or weights loaded, and one reports an error."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from types import TracebackType
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from radixtrain.cores import num_cores, threads_are_given
from radixtrain.distributed import Ranks, join, ranks
from radixtrain.errors import EndedElsewhere, Stopped, UserError, first_line
from radixtrain.training.devices.launcher_env import PARENT, launcher_env
from radixtrain.training.devices.rank_monitor import GRACE, RankMonitor, first_to_end, watch_children, watch_parent

Value = TypeVar("Value")
Start = Mapping[str, str]
PATIENCE = 2.0  # seconds that a rank waits for rank 0, which may have found the same error
SECONDS_TO_END = 10.0  # for a process to end once its work is done


class Processes:
    """A context around a run, which starts the other processes, as Lightning would, if no launcher has.

    strategy: of Lightning Fabric.
    arguments: the command line, from the command on, with which the other processes are started.
    timeout: how long a rank waits for the others in a step.
    start: what must be the same on all ranks, by name; see `described_start`.

    At its end no process that was started here remains.
    """

    def __init__(self, strategy: Any, arguments: Sequence[str], timeout: timedelta, start: Callable[[], Start] = dict):
        self.strategy, self.arguments, self.timeout, self.start = strategy, list(arguments), timeout, start
        self.children: list[subprocess.Popen[bytes]] = []
        self._environment: dict[str, str] = {}
        self._monitor: RankMonitor | None = None
        self._has_monitor = threading.Event()

    @property
    def starts_others(self) -> bool:
        """Return whether this process starts the others."""
        if not hasattr(self.strategy, "cluster_environment") or self.strategy.num_processes == 1:
            return False
        return not self.strategy.cluster_environment.creates_processes_externally

    def __enter__(self) -> Processes:
        self._environment = dict(os.environ)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._end_well()
            elif self._monitor is not None and (reported := reported_error(error, self._monitor)) is not error:
                raise reported from error
        finally:
            for child in self.children:
                child.kill()
                child.wait()
            if self.children:
                os.environ.clear()
                os.environ.update(self._environment)

    def joined(self, prepare: Callable[[], Value]) -> Value:
        """Call `prepare` on rank 0 and return its result on every rank. Afterwards `ranks()` are those of the run.

        prepare: called on rank 0 only, and before this process starts the others, if it does, so that an error comes
            at once.

        Raises UserError on every rank if one of them was started with other settings than rank 0.
        """
        prepared = []
        if self.starts_others:
            prepared.append(prepare())
            self._start()
        elif PARENT in os.environ:
            watch_parent(int(os.environ[PARENT]), self._has_monitor)
        if hasattr(self.strategy, "cluster_environment"):
            self.strategy.setup_environment()  # Lightning calls it again, and finds the group
        if self._join().size > 1:
            self._monitor = RankMonitor(self.children)
            self._has_monitor.set()
            check_alike(ranks().gather(self.start()))
        return ranks().broadcast_from_rank0(lambda: prepared[0] if prepared else prepare(), long_timeout=True)

    def _join(self) -> Ranks:
        """Join the ranks. Raises UserError if several machines have met, over NCCL or gloo, but gloo cannot connect."""
        try:
            return join(self.timeout)
        except RuntimeError as error:
            if getattr(self.strategy, "num_nodes", 1) == 1:
                raise
            raise UserError(
                f"the machines cannot connect over gloo ({first_line(error)}): gloo takes the address of the host's "
                f"name, often 127.0.1.1; set GLOO_SOCKET_IFNAME on each to the network interface that they share"
            ) from error

    def _start(self) -> None:
        """Start the other ranks, and set the variables that Lightning's `LightningEnvironment` reads, here too."""
        cluster, count = self.strategy.cluster_environment, self.strategy.num_processes
        shared = {"MASTER_ADDR": cluster.main_address, "MASTER_PORT": str(cluster.main_port)}
        shared |= {"NODE_RANK": "0", "WORLD_SIZE": str(count), PARENT: str(os.getpid())}
        if not threads_are_given():
            num_threads = max(1, num_cores() // count)
            torch.set_num_threads(num_threads)
            shared["OMP_NUM_THREADS"] = str(num_threads)
        command = [sys.executable, "-m", "radixtrain", *self.arguments]
        with _ignoring_interrupts():
            for rank in range(1, count):
                environment = {**os.environ, **shared, "LOCAL_RANK": str(rank)}
                self.children.append(subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL))
        os.environ.update({**shared, "LOCAL_RANK": "0"})
        watch_children(self.children, self._has_monitor)

    def gone(self) -> str:
        """Describe a lost rank: `rank 1 was killed by SIGKILL`, or `rank 1 is gone: ...`; empty after `SECONDS_TO_END`.

        Empty at once if another rank reports why the run ends.
        """
        deadline = time.monotonic() + SECONDS_TO_END
        while not (reason := self._gone()) and time.monotonic() < deadline:
            if self._monitor is not None and self._monitor.is_reported_elsewhere:
                break
            time.sleep(0.1)
        return reason

    def _gone(self) -> str:
        if self.children:
            return first_to_end(self.children)
        known = self._monitor.gone if self._monitor else []
        return f"rank {known[0]} is gone: its own message, or its launcher's, says why" if known else ""

    def _end_well(self) -> None:
        """Leave the group once every rank has finished."""
        ranks().barrier()
        if self._monitor is not None:
            self._monitor.close()
        if dist.is_initialized():
            dist.destroy_process_group()
        join(self.timeout)
        with suppress(subprocess.TimeoutExpired):
            for child in self.children:
                child.wait(SECONDS_TO_END)


def check_alike(starts: Sequence[Start]) -> None:
    """Raise UserError that names the first difference. starts: of the ranks, by rank."""
    first = starts[0]
    for rank, other in enumerate(starts):
        for name in (*first, *other):
            here, there = (each.get(name, "absent") for each in (other, first))
            if here != there and name.startswith("model.model_name_or_path"):
                raise UserError(
                    f"{name} holds other files on rank {rank} than on rank 0; copy the same to every machine"
                )
            if here != there:
                raise UserError(
                    f"{name} is {here} on rank {rank} and {there} on rank 0; start every rank with the same settings, "
                    f"files and packages"
                )


@contextmanager
def _ignoring_interrupts() -> Any:
    """Start processes that ignore Ctrl-C: the one that starts them gets it, and all stop at one step."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def reported_error(error: BaseException, monitor: RankMonitor) -> BaseException:
    """Return what this rank raises for an error: the error with the number of the rank, or one that prints nothing.

    Rank 0 reports its own error, unless another rank has reported one; another rank reports if no other has. An exit
    that is not an error, such as `sys.exit()` of a callback, is kept: the others report that this rank is gone. The
    process ends within `GRACE` seconds.
    """
    rank, code = ranks().rank, error.code if isinstance(error, Stopped) else 1
    ending = threading.Timer(GRACE, os._exit, (code,))  # even if libraries block at Python's exit
    ending.daemon = True
    ending.start()
    if isinstance(error, Stopped):
        return error if rank == 0 else Stopped("", code)
    if not isinstance(error, Exception):
        return error
    if isinstance(error, EndedElsewhere) or not monitor.claim_report(PATIENCE):
        return EndedElsewhere()
    if rank and isinstance(error, UserError):
        return UserError(f"rank {rank}: {error}")
    return error  # torch puts the rank before each line of a traceback


@contextmanager
def local_rank0_reports() -> Iterator[None]:
    """Report mistakes on one rank of each machine until the ranks have found one another: each finds the same."""
    launcher = launcher_env()
    try:
        yield
    except (Exception, Stopped) as error:
        if launcher.is_silent and ranks().size == 1:
            raise (Stopped("", error.code) if isinstance(error, Stopped) else EndedElsewhere()) from error
        raise
