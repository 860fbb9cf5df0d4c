"""Which rank reports why a run on several of them ends with an error; the others end without a word."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from radixtrain.distributed import ranks
from radixtrain.errors import EndedElsewhere, Stopped, UserError
from radixtrain.training.devices.board import GRACE, Board
from radixtrain.training.devices.started import started

__all__ = ["as_told", "one_of_each_machine"]

PATIENCE = 2.0  # seconds that a rank waits for rank 0, which may have found the same error


def as_told(error: BaseException, board: Board) -> BaseException:
    """What this rank raises in place of an error: the error, with the number of the rank, or one that prints nothing.

    Rank 0 reports its own, unless another one has; another rank does if no other one has. A way out that is no error,
    such as `sys.exit()` of a callback, is left as it is: the others report that this rank is gone. The process ends
    within `GRACE` seconds.
    """
    rank, code = ranks().rank, error.code if isinstance(error, Stopped) else 1
    ending = threading.Timer(GRACE, os._exit, (code,))  # whatever libraries wait for when Python ends
    ending.daemon = True
    ending.start()
    if isinstance(error, Stopped):
        return error if rank == 0 else Stopped("", code)
    if not isinstance(error, Exception):
        return error
    if isinstance(error, EndedElsewhere) or not board.claim(PATIENCE):
        return EndedElsewhere()
    if rank and isinstance(error, UserError):
        return UserError(f"rank {rank}: {error}")
    return error  # torch puts the rank before each line of a traceback


@contextmanager
def one_of_each_machine() -> Iterator[None]:
    """Until the ranks have found one another, each finds the same mistakes: one of each machine reports them."""
    found = started()
    try:
        yield
    except (Exception, Stopped) as error:
        if found.by in ("torchrun", "srun") and found.local_rank and ranks().size == 1:
            raise (Stopped("", error.code) if isinstance(error, Stopped) else EndedElsewhere()) from error
        raise
