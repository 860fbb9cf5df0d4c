"""DataLoader workers end only with their run: a signal to the whole process group does not reach them.

`timeout`, systemd, schedulers and a terminal send a signal to every process of a run. The run wants to finish its step
and save; with workers that die first it cannot. They start with these signals blocked, which a process inherits. If the
run itself is killed, each worker notices that its parent is gone.

They also have to begin. Before 3.11.10, Python does not renew one of its locks after a fork (gh-112275): if another
thread holds it then, the new process and the run wait forever. A thread of gloo takes it when it releases a tensor.
"""

from __future__ import annotations

import atexit
import errno
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from multiprocessing.connection import wait
from multiprocessing.context import ForkContext, ForkProcess
from multiprocessing.popen_fork import Popen
from multiprocessing.queues import Queue
from typing import Any

logger = logging.getLogger(__name__)

MAY_HANG = sys.version_info < (3, 11, 10)  # in a fork
SECONDS_TO_BEGIN = 10.0  # for a new process, which takes milliseconds; doubled each time that it does not begin

BLOCKED = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)


@contextmanager
def blocked_signals() -> Iterator[None]:
    """Block the signals that a run handles in processes and threads that start within.

    A signal for this process that comes meanwhile is delivered on the way out. Workers that remain when Python ends
    are killed: torch terminates a worker that does not end by SIGTERM, and then multiprocessing waits for it.
    """
    _kill_workers_at_exit()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def worker_context() -> ForkContext | None:
    """Return the `multiprocessing_context` whose processes begin; None if Python's own does."""
    return _Context() if MAY_HANG and multiprocessing.get_start_method() == "fork" else None


class _Process(ForkProcess):
    """Writes into a pipe, its `begun`, before anything else, so that its parent knows that the fork is over."""

    begun: tuple[int, int]

    @staticmethod
    def _Popen(process_obj: Any) -> Popen:
        return _Begun(process_obj)

    def _bootstrap(self, parent_sentinel: Any = None) -> int:
        os.write(self.begun[1], b".")  # the end of a pipe is not seen while what another thread forks has it too
        for end in self.begun:
            os.close(end)
        code: int = super()._bootstrap(parent_sentinel)  # type: ignore[misc]
        return code


class _Begun(Popen):
    """Forks until the process begins. One that hangs in the fork is killed."""

    def _launch(self, process_obj: Any) -> None:
        seconds = SECONDS_TO_BEGIN
        while True:
            process_obj.begun = read, write = os.pipe()
            super()._launch(process_obj)  # type: ignore[misc]
            os.close(write)
            has_begun = wait([read], seconds)
            os.close(read)
            if has_begun:
                return
            logger.warning("a worker did not begin in %g s and is started again", seconds)
            self.kill()
            self.wait()
            self.close()
            self.returncode, seconds = None, 2 * seconds


class _Context(ForkContext):
    Process = _Process


def end_with_parent(worker: int = 0) -> None:
    """End a worker when its run was killed. Called in it, for instance as the `worker_init_fn` of a DataLoader.

    torch reads the parent's id in the worker, which is too late if the parent was killed while it started: the worker
    would wait forever. And the parent may be a server that forks for the run. A thread waits for the run itself.

    The worker also ends when it cannot hand a batch over: multiprocessing would drop it, and the run would wait
    forever. It ends when it is out of file handles too: otherwise tracebacks for refused connections would never stop.
    """
    queue: Any = Queue
    report = queue._on_queue_feeder_error
    sys.excepthook = lambda kind, error, trace: _report(error, lambda: sys.__excepthook__(kind, error, trace))
    queue._on_queue_feeder_error = lambda self, error, item: _lose(error, lambda: report(error, item))
    run = multiprocessing.parent_process()
    assert run is not None  # a worker has one

    def watch() -> None:
        run.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _report(error: object, report: Callable[[], object]) -> None:
    if getattr(error, "errno", None) in (errno.EMFILE, errno.ENFILE) or "Too many open files" in str(error):  # of torch
        _end()
    report()


def _lose(error: object, report: Callable[[], object]) -> None:
    _report(error, report)
    _end()


def _end() -> None:
    """End this worker once its run listens: torch gets no exit code of a worker that ends as soon as it has begun."""
    time.sleep(1.0)
    os._exit(1)


@cache
def _kill_workers_at_exit() -> None:
    """Register the kill once, after multiprocessing has registered that it waits, so that this runs before it."""
    atexit.register(_kill_daemons)


def _kill_daemons() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler raises when a worker is killed
    for process in multiprocessing.active_children():
        if process.daemon:
            process.kill()
