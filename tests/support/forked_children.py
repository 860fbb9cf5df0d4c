"""Ranks of `fit --trainer.devices N` that are forked from the process that starts them, not new interpreters."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["fork_children"]


class Forked:
    """What `launch` uses of `subprocess.Popen`."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], stdin: Any):
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid:
            return
        from radixtrain.__main__ import main

        os.closerange(3, 1024)  # as a new interpreter has them: among others, the store's
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
            signal.signal(number, signal.SIG_DFL)
        os.environ.clear()
        os.environ.update(env)
        sys.argv = ["radixtrain", *command[3:]]
        code = main()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


def fork_children() -> None:
    """For `Server.start(before=...)`."""
    import subprocess

    subprocess.Popen = Forked  # type: ignore[misc,assignment]


def rank_1_finds_an_error() -> None:
    """The same, and in its third step rank 1 raises what no other rank does."""
    from radixtrain.distributed import ranks
    from radixtrain.errors import UserError
    from radixtrain.training.module import RadixModule

    fork_children()
    step = RadixModule.take_step

    def take_step(self: RadixModule, *args: Any) -> Any:
        if ranks().rank == 1 and self.global_step == 2:
            raise UserError("what only this rank can see")
        return step(self, *args)

    RadixModule.take_step = take_step  # type: ignore[method-assign]
