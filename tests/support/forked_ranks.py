"""Ranks of a process group on this machine, forked from the test: what has been imported need not be imported again.

One command on several ranks: as many forked processes, with the environment that torchrun gives to each.
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from forked import SECONDS, Run, Server

from radixtrain import distributed

SECONDS_AFTER_A_FAILURE = 5.0  # for the other ranks, which may wait for the one that failed


def on_ranks(
    count: int,
    work: Callable[[int], Any],
    seconds: float = SECONDS,
    timeout: timedelta = timedelta(seconds=60),
    has_group: bool = True,
    sp_size: int = 1,
) -> list[Any]:
    """What `work(rank)` returns on each of `count` ranks, in processes that are forked from this one and use gloo.

    work: any function; what it returns is pickled. It finds torchrun's environment variables, an initialised process
        group, and `distributed.join` called. Its tensors are its own copies.
    timeout: of the process group. has_group: False leaves it to `work` to make one. sp_size: of
        `distributed.form_groups`.

    AssertionError with the tracebacks of the ranks that failed, or if one takes longer than `seconds`.
    """
    assert not dist.is_initialized(), "a group that is there already would be that of the forked processes, too"
    timeout_of_group = timeout if has_group else None
    context, port = get_context("fork"), free_port()
    pipes, all_answered = [context.Pipe(duplex=False) for _ in range(count)], context.Event()
    processes = [
        context.Process(target=_run, args=(rank, count, port, work, timeout_of_group, end, all_answered, sp_size))
        for rank, (_, end) in enumerate(pipes)
    ]
    for process in processes:
        process.start()
    for _, end in pipes:
        end.close()
    try:
        answers = _answers([pipe for pipe, _ in pipes], seconds)
    finally:
        all_answered.set()
        for process in processes:
            process.join(1.0)
            process.kill()
            process.join()
    failed = [f"rank {rank}: {told}" for rank, (is_done, told) in enumerate(answers) if not is_done]
    assert not failed, "\n".join(failed)
    return [value for _, value in answers]


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def _answers(pipes: Sequence[Any], seconds: float) -> list[tuple[bool, Any]]:
    """By rank, whether it has come to its end, and what it returned; otherwise why not."""
    found: dict[Any, tuple[bool, Any]] = {}
    deadline = time.monotonic() + seconds
    while left := [pipe for pipe in pipes if pipe not in found]:
        ready = wait(left, max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        found |= {pipe: _answer(pipe) for pipe in ready}
        if not all(is_done for is_done, _ in found.values()):
            deadline = min(deadline, time.monotonic() + SECONDS_AFTER_A_FAILURE)
    return [found.get(pipe, (False, f"no answer after {seconds} s, or after another one failed")) for pipe in pipes]


def _answer(pipe: Any) -> tuple[bool, Any]:
    try:
        return pickle.loads(pipe.recv_bytes())
    except EOFError:
        return False, "ended without an answer"


def _run(
    rank: int,
    count: int,
    port: int,
    work: Callable[[int], Any],
    timeout: timedelta | None,
    pipe: Any,
    all_answered: Any,
    sp_size: int,
) -> None:
    torch.set_num_threads(1)
    here = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "GROUP_RANK": 0}
    there = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "test"}
    os.environ.update({name: str(value) for name, value in (here | there).items()})
    try:
        if timeout is not None:
            dist.init_process_group("gloo", timeout=timeout)
            distributed.join(timeout)
            distributed.form_groups(sp_size, timeout)
        answer = True, work(rank)
    except BaseException:
        answer = False, traceback.format_exc()
    pipe.send_bytes(pickle.dumps(answer))
    if answer[0] and rank == 0:  # it has the store by which the others may still be joining; these leave at once,
        all_answered.wait(SECONDS)  # since only a closed connection ends the wait of a rank for one that failed
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # pytest's exit handlers are the parent's, and the destructors of gloo and DDP hung in 2 runs of 24


class Launched:
    """The ranks of one command. runs: the process of each, by rank.

    No agent watches over them, as torchrun would: what ends a rank when another is gone is the command itself.
    """

    def __init__(self, runs: Sequence[Run]):
        self.runs = list(runs)

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
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "TORCHELASTIC_RUN_ID": "test"}
    shared |= {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), "GROUP_RANK": "0"}
    runs = []
    for rank in range(count):
        own = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} if count > 1 else {}
        stderr = folder / f"stderr_{rank}"
        typed = [*arguments, *of_last] if rank == count - 1 else arguments
        runs.append(server.start(typed, stderr, {**own, **(environment or {})}, **{"draws": False, **options}))
    return Launched(runs)
