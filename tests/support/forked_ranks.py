"""Ranks of a process group on this machine, forked from the test: what has been imported need not be imported again."""

from __future__ import annotations

import os
import pickle
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import wait
from typing import Any

import torch
import torch.distributed as dist

from radixtrain import distributed

__all__ = ["free_port", "on_ranks"]

SECONDS = 180.0
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
