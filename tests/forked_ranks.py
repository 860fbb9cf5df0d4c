"""Ranks of a process group on this machine, forked from the test: what has been imported need not be imported again."""

from __future__ import annotations

import os
import pickle
import socket
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import get_context
from typing import Any

import torch
import torch.distributed as dist

from radixtrain import distributed

__all__ = ["free_port", "on_ranks"]

SECONDS = 180.0


def on_ranks(
    count: int, work: Callable[[int], Any], seconds: float = SECONDS, timeout: timedelta = timedelta(seconds=60)
) -> list[Any]:
    """What `work(rank)` returns on each of `count` ranks, in processes that are forked from this one and use gloo.

    work: any function; what it returns is pickled. It finds torchrun's environment variables, an initialised process
        group, and `distributed.join` called. Its tensors are its own copies.
    timeout: of the process group.

    AssertionError with the traceback of the first rank that failed, or if one takes longer than `seconds`.
    """
    context, port = get_context("fork"), free_port()
    pipes = [context.Pipe(duplex=False) for _ in range(count)]
    processes = [
        context.Process(target=_run, args=(rank, count, port, work, timeout, pipes[rank][1])) for rank in range(count)
    ]
    for process in processes:
        process.start()
    for _, end in pipes:
        end.close()
    try:
        answers = [_answer(pipe, seconds) for pipe, _ in pipes]
    finally:
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


def _answer(pipe: Any, seconds: float) -> tuple[bool, Any]:
    if not pipe.poll(seconds):
        return False, f"no answer after {seconds} s"
    try:
        return pickle.loads(pipe.recv_bytes())
    except EOFError:
        return False, "ended without an answer"


def _run(rank: int, count: int, port: int, work: Callable[[int], Any], timeout: timedelta, pipe: Any) -> None:
    torch.set_num_threads(1)
    here = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "GROUP_RANK": 0}
    there = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "test"}
    os.environ.update({name: str(value) for name, value in (here | there).items()})
    try:
        dist.init_process_group("gloo", timeout=timeout)
        distributed.join(timeout)
        answer = True, work(rank)
    except BaseException:
        answer = False, traceback.format_exc()
    pipe.send_bytes(pickle.dumps(answer))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # pytest's own exit handlers are the parent's
