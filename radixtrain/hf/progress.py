"""What a thread is computing with a model.

A call reaches most layers as an argument. What gets no arguments, such as a mixer or a loss function, reads `Progress`.
Each thread has its own calls, and each call ends before the one around it: a hook that calls the model again, or a
backward pass within a forward pass, finds its own call and leaves the outer one as it was.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import ref

import torch


class Progress(threading.local):
    """The calls of one model that run in this thread, the innermost last; an ordinary one is None.

    Calls are held weakly, so one that Ctrl-C interrupted reads as None once the frames that ran it are gone.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[Any, int]] = []  # each with the backward pass that it began in, -1 outside of one

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """Pickle without calls: nothing runs in the copy of a model."""
        return type(self), ()

    @property
    def call(self) -> Any:
        """Return the innermost call; None if that is an ordinary one, or nothing runs."""
        return self.calls[-1][0]() if self.calls else None

    @property
    def passing(self) -> Any:
        """Return the innermost call, unless it waits for a backward pass that recomputes layers of other calls."""
        return self.call if self.calls and self.calls[-1][1] == _backward_pass() else None

    def begin(self, call: object) -> None:
        """Make this the innermost call."""
        self.calls.append((_no_call if call is None else ref(call), _backward_pass()))

    def become(self, call: object) -> None:
        """Set the innermost call, once it is known."""
        self.calls[-1] = ref(call), self.calls[-1][1]

    @torch.compiler.disable
    def end(self) -> Any:
        """End the innermost call and return it; None if an error came before it began."""
        return self.calls.pop()[0]() if self.calls else None

    @contextmanager
    def during(self, call: object) -> Iterator[None]:
        """Make this the innermost call for a while."""
        self.begin(call)
        try:
            yield
        finally:
            self.end()


def _no_call() -> None:
    """Return None, as the reference to a call that is gone."""


def _backward_pass() -> int:
    """Return the number of the backward pass that runs in this thread; -1 outside of one."""
    return torch._C._current_graph_task_id()
