"""One command on several ranks: as many forked processes, with the environment that torchrun gives to each."""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from forked import SECONDS, Run, Server

__all__ = ["Launched", "ranks_of"]


class Launched:
    """The ranks of one command. runs: the process of each, by rank. store: by which they meet.

    No agent watches over them, as torchrun would: what ends a rank when another is gone is the command itself.
    """

    def __init__(self, runs: Sequence[Run], store: dist.TCPStore):
        self.runs, self.store = list(runs), store

    def send(self, number: int, *ranks: int) -> None:
        """A signal to the processes of these ranks; of all if none is named. One that has ended is passed over."""
        for rank in ranks or range(len(self.runs)):
            if self.runs[rank].is_running:
                self.runs[rank].send(number)

    def send_groups(self, number: int) -> None:
        """A signal to every rank and its workers, as a terminal and a scheduler send it."""
        for run in self.runs:
            if run.is_running:
                run.send_group(number)

    @property
    def is_running(self) -> bool:
        """Whether every rank is."""
        return all(run.is_running for run in self.runs)

    def wait(self, seconds: float = SECONDS) -> list[int]:
        """The exit codes by rank. After `seconds` all are killed, and TimeoutError raised as `Run.wait` raises it."""
        deadline = time.monotonic() + seconds
        hanging = [
            rank
            for rank, run in enumerate(self.runs)
            if not run.server.wait(run.pid, max(0.0, deadline - time.monotonic()))
        ]
        if hanging:
            for run in self.runs:
                run.abort()
            raise TimeoutError(f"ranks {hanging} still running after {seconds} s:\n{self.said()}")
        return [run.wait() for run in self.runs]

    def kill(self) -> None:
        for run in self.runs:
            if run.left():
                run.send_group(signal.SIGKILL)

    def said(self) -> str:
        """What the ranks have printed on stderr, one after the other."""
        return "\n".join(f"[rank {rank}]\n{run.said()}" for rank, run in enumerate(self.runs))

    def errors(self) -> list[str]:
        """The lines on the stderr of any rank that tell why it ended."""
        lines = [line for run in self.runs for line in run.said().splitlines()]
        return [line for line in lines if line.startswith(("error: ", "stopped by ")) or "Traceback" in line]

    def wait_for_workers(self) -> None:
        """AssertionError if a process of a rank outlives it by more than a moment."""
        for run in self.runs:
            run.wait_for_workers()


def ranks_of(
    server: Server,
    count: int,
    arguments: Sequence[str],
    folder: Path,
    environment: Mapping[str, str] | None = None,
    of_last: Sequence[str] = (),
    **options: Any,
) -> Launched:
    """Start `python -m radixtrain` with these arguments on `count` ranks of this machine.

    of_last: more arguments, of the last rank only.
    count: 1 for a process without torchrun. folder: for what each prints. options: of `Server.start`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_RUN_ID": "test"}
    shared |= {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), "GROUP_RANK": "0"}
    shared |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    runs = []
    for rank in range(count):
        own = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} if count > 1 else {}
        stderr = folder / f"stderr_{rank}"
        typed = [*arguments, *of_last] if rank == count - 1 else arguments
        runs.append(server.start(typed, stderr, {**own, **(environment or {})}, **{"draws": False, **options}))
    return Launched(runs, store)
