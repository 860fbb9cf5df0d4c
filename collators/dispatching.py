"""Refuses to make radix batches that Accelerate is about to dispatch: joined on rank 0 and cut for the other ranks.

It does so with an `IterableDataset` and with `dispatch_batches=True`, along the first axis, which no tensor of a radix
batch has for its examples; and with several processes it ends in a TypeError, because a radix batch has numbers beside
its tensors. The loader that dispatches is on the stack of the collator. It is also on the stack of a worker process
that is forked from it.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

from radixtrain.errors import UserError

__all__ = ["NO_DISPATCHING", "check_not_dispatched"]

NO_DISPATCHING = (
    "Accelerate cuts the radix batch along its first axis with an IterableDataset and with dispatch_batches=True; set "
    'TrainingArguments(accelerator_config={"dispatch_batches": False}), or in your own loop '
    "Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=False))"
)
DISPATCHER = "accelerate.data_loader", "DataLoaderDispatcher"
MAX_FRAMES = 64  # six between the collator and the loader, and a dozen more in a worker


def check_not_dispatched() -> None:
    """Raise UserError, naming the setting, if Accelerate's dispatching loader asks for this batch. Takes 3 us."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(MAX_FRAMES):
        if frame is None:
            return
        if frame.f_globals.get("__name__") == DISPATCHER[0] and _dispatches(frame.f_locals.get("self")):
            raise UserError(NO_DISPATCHING)
        frame = frame.f_back


def _dispatches(loader: Any) -> bool:
    """By name: a user without Accelerate does not need it."""
    return any((kind.__module__, kind.__name__) == DISPATCHER for kind in type(loader).__mro__)
