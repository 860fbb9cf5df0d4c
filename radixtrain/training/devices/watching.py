"""Processes that one of a machine has started: until there is a `Board`, if one of them is gone, the rest end too."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence

__all__ = ["first_to_end", "watch_children", "watch_parent"]

SECONDS_BETWEEN = 0.5
GRACE = 10.0  # seconds, for a process to find out by itself that another is gone, and to say what is saved


def watch_children(children: Sequence[subprocess.Popen[bytes]], until: threading.Event) -> None:
    """From now on, `GRACE` seconds after one of them fails, all are killed and this process ends with a line.

    children: by rank, from 1 on. until: ends the watch.
    """
    _start(lambda: _end_with_children(children, until))


def watch_parent(parent: int, until: threading.Event) -> None:
    """From now on, this process ends `GRACE` seconds after the one that has started it.

    parent: its id. until: ends the watch.
    """
    _start(lambda: _end_with_parent(parent, until))


def first_to_end(children: Sequence[subprocess.Popen[bytes]]) -> str:
    """`rank 1 was killed by SIGKILL` or `rank 1 ended with exit code 1`; empty while all run or have ended well."""
    for rank, code in enumerate((child.poll() for child in children), 1):
        if code:
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            return f"rank {rank} {how}"
    return ""


def _start(target: Callable[[], None]) -> None:
    threading.Thread(target=target, daemon=True).start()


def _end_with_children(children: Sequence[subprocess.Popen[bytes]], until: threading.Event) -> None:
    while not (found := first_to_end(children)):
        if until.wait(SECONDS_BETWEEN):
            return
    time.sleep(GRACE)
    for child in children:
        child.kill()
    os.write(2, f"error: {found}; go on with --ckpt_path last\n".encode())
    os._exit(1)


def _end_with_parent(parent: int, until: threading.Event) -> None:
    while os.getppid() == parent:
        if until.wait(SECONDS_BETWEEN):
            return
    time.sleep(GRACE)
    os._exit(1)
