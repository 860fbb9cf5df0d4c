"""A rank that is gone or hangs, as the others see it: errors of gloo, NCCL and torch's store of keys, in words."""

from __future__ import annotations

import re
from collections.abc import Callable

import torch.distributed as dist

__all__ = ["lost_rank"]

LATE = r"(?i)timed out|timeout"
GONE = (
    r"(?i)connection (was )?(likely )?(closed|reset|refused|aborted)|broken pipe|socket (was )?closed|connect failure"
    r"|failed to (recv|send)|remote process|communicator (was|is) aborted"
)
OF_GLOO = r"gloo/transport|Application timeout caused pair closure|ProcessGroupGloo"


def lost_rank(error: BaseException, known: Callable[[], str]) -> str | None:
    """What an error of a connection between ranks means, and what to do; None for any other error.

    known: returns what is known of a rank that has ended, such as `rank 1 was killed by SIGKILL`, or nothing.
    """
    text = str(error)
    if not isinstance(error, dist.DistError) and not (isinstance(error, RuntimeError) and re.search(OF_GLOO, text)):
        return None
    if re.search(LATE, text):
        return (
            "a rank has not answered within ddp_timeout: it hangs, or needs longer for a step or a checkpoint: then "
            "set a larger ddp_timeout"
        )
    if re.search(GONE, text):
        return known() or "another rank is gone: its own message, or that of what started it, says why"
    return None
