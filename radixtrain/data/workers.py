"""DataLoader workers end with their run, and by nothing else: a signal to the whole process group does not reach them.

`timeout`, systemd, schedulers and a terminal send a signal to every process of a run. The run wants to finish its step
and save; with workers that die first it cannot. They start with these signals blocked, which a process inherits. If the
run itself is killed, each worker notices that its parent is gone.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial

__all__ = ["blocked_signals", "end_with", "ends_with_this_process"]

BLOCKED = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGUSR1)
SECONDS_BETWEEN_LOOKS = 1.0  # at the parent process


@contextmanager
def blocked_signals() -> Iterator[None]:
    """Processes and threads that start inside never receive SIGTERM, SIGHUP, SIGINT or SIGUSR1.

    A signal for this process that comes meanwhile is delivered on the way out. What is left of the workers when Python
    ends is killed: torch terminates a worker that does not end by SIGTERM, and then multiprocessing waits for it.
    """
    _kill_workers_at_exit()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ends_with_this_process() -> Callable[[int], None]:
    """The `worker_init_fn` of a DataLoader whose workers end within a second after this process was killed.

    torch asks a worker who its parent is, which is too late for one whose parent was killed while it started: it would
    wait for ever.
    """
    return partial(end_with, os.getpid())


def end_with(parent: int, worker: int = 0) -> None:
    """Called in a worker: end it within a second after its parent process was killed. A thread watches."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(SECONDS_BETWEEN_LOOKS)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


@cache
def _kill_workers_at_exit() -> None:
    """Registered once, and after multiprocessing has registered that it waits, so that this runs before it."""
    atexit.register(_kill_daemons)


def _kill_daemons() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler raises when a worker is killed
    for process in multiprocessing.active_children():
        if process.daemon:
            process.kill()
