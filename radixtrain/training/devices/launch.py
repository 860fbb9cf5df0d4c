"""Starts one process per device, as torchrun does: all ranks meet before rows are read, and one reports an error."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist

from radixtrain.cores import num_cores, threads_are_given
from radixtrain.distributed import join, ranks
from radixtrain.errors import EndedElsewhere, Stopped, UserError, handling
from radixtrain.training.devices.launcher_env import PARENT, launcher_env

Start = Mapping[str, str]
ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
SAVING = (signal.SIGUSR1, signal.SIGUSR2)
HANDLED = (*ENDING, *SAVING)
GRACE = 15.0  # seconds for a rank to end on its own once another one has failed
PATIENCE = 2.0  # seconds that a rank waits for rank 0, which may have found the same error
POLL_SECONDS = 0.1
AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"  # torch's: what has started the ranks hosts their store, not rank 0
REPORTED = "radixtrain/reported"  # key of the store: the first rank to claim it reports why the run ends


def launch(arguments: Sequence[str], num_ranks: int) -> str:
    """Run a command on this many ranks of this machine. Returns once all have ended: how one failed, or nothing.

    torchrun's agent does not fit here: it ends ranks that write a checkpoint for more than 30 seconds after a signal.

    arguments: the command line, from the command on.

    Raises Stopped if the ranks have stopped, and EndedElsewhere if one of them has reported an error. No process that
    was started here remains.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "GROUP_RANK": "0", PARENT: str(os.getpid())}
    shared |= {"WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks), AGENT_STORE: "True"}
    shared |= {"TORCHELASTIC_RUN_ID": "radixtrain", "TORCHELASTIC_RESTART_COUNT": "0"}
    if not threads_are_given():
        shared["OMP_NUM_THREADS"] = str(max(1, num_cores() // num_ranks))
    command = [sys.executable, "-m", "radixtrain", *arguments]
    children: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(num_ranks):
            environment = {**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            children.append(subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL))
        with handling(dict.fromkeys(HANDLED, partial(_forward, children))):
            failure = _wait(children)
    finally:
        for child in children:
            child.kill()
            child.wait()
    if children[0].returncode in {128 + number for number in HANDLED}:  # it has said so
        raise Stopped("", children[0].returncode)
    if failure and store.check([REPORTED]):
        raise EndedElsewhere
    return failure


def _forward(children: Sequence[subprocess.Popen[bytes]], number: int, frame: object) -> None:
    """Send a signal on to the ranks: to rank 0 only if it asks for a save, which all ranks make once it asks."""
    for child in children[:1] if number in SAVING else children:
        child.send_signal(number)


def _wait(children: Sequence[subprocess.Popen[bytes]]) -> str:
    """Wait until all ranks have ended, or `GRACE` seconds after the first failure, which is described if there is one.

    Of ranks that fail at once, a killed one is the cause.
    """
    failure, deadline = "", float("inf")
    while True:
        codes = [child.poll() for child in children]
        if any(codes) and not failure:
            code, rank = min((code, rank) for rank, code in enumerate(codes) if code)
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            failure, deadline = f"rank {rank} {how}", time.monotonic() + GRACE
        if None not in codes or time.monotonic() > deadline:
            return failure
        time.sleep(POLL_SECONDS)


def meet(strategy: Any, timeout: timedelta, start: Callable[[], Start]) -> None:
    """Let this rank and the others find one another. Afterwards `ranks()` are those of the run.

    strategy: of Lightning Fabric. timeout: how long a rank waits for the others in a step.
    start: what must be the same on all ranks, by name; see `described_start`.

    Raises UserError on every rank if one of them was started with other settings than rank 0.
    """
    if PARENT in os.environ:
        threading.Thread(target=_stop_after_parent, args=[int(os.environ[PARENT])], daemon=True).start()
    if hasattr(strategy, "cluster_environment"):
        strategy.setup_environment()  # Lightning calls it again, and finds the group
    join(timeout)
    if ranks().size > 1:
        check_alike(ranks().gather(start()))


def _stop_after_parent(parent: int) -> None:
    """Stop as at SIGTERM once the process that has started this one, of this id, is gone."""
    while os.getppid() == parent:
        time.sleep(1.0)
    if ranks().size == 1:  # it waits for the others, whose store is gone
        os._exit(1)
    os.kill(os.getpid(), signal.SIGTERM)


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
def leaving_together(timeout: timedelta) -> Iterator[None]:
    """Leave the group once every rank has finished. timeout: as for `meet`."""
    yield
    ranks().barrier()
    if dist.is_initialized():
        dist.destroy_process_group()
    join(timeout)


@contextmanager
def one_rank_reports() -> Iterator[None]:
    """Raise an error with the number of its rank, on one rank, and on the others what prints nothing.

    Rank 0 reports its own error, unless another rank has reported one; another rank reports if no other has. An exit
    that is not an error, such as `sys.exit()` of a callback, is kept. After ranks have met, the process ends within
    `GRACE` seconds.
    """
    try:
        yield
    except (Exception, Stopped) as error:
        reported = _reported(error)
        if reported is error:
            raise
        raise reported from error


def _reported(error: Exception | Stopped) -> BaseException:
    rank = launcher_env().rank
    if launcher_env().size == 1:
        return error
    if ranks().size > 1:
        code = error.code if isinstance(error, Stopped) else 1
        ending = threading.Timer(GRACE, os._exit, (code,))  # even if libraries block at Python's exit
        ending.daemon = True
        ending.start()
    if isinstance(error, Stopped):
        return error if rank == 0 else Stopped("", error.code)
    if isinstance(error, EndedElsewhere) or not _claims_report():
        return EndedElsewhere()
    if rank and isinstance(error, UserError):
        return UserError(f"rank {rank}: {error}")
    return error  # torch puts the rank before each line of a traceback


def _claims_report() -> bool:
    """Return whether this rank is the first that reports why the run ends."""
    launcher, deadline = launcher_env(), time.monotonic() + PATIENCE
    if ranks().size == 1 and os.environ.get(AGENT_STORE) != "True":
        return launcher.local_rank == 0  # rank 0 has not made the store yet; every rank finds the same mistake
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        store = dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=PATIENCE))
        while launcher.rank and not store.check([REPORTED]) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        return store.add(REPORTED, 1) == 1
    except dist.DistError:
        return launcher.rank == 1  # the store has gone with rank 0
