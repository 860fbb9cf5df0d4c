"""Refuses misuses of a radix batch before they end in an error that names none of them.

1. `share_prefixes` was forgotten.
An untouched Hugging Face model accepts a radix batch: it takes unknown entries as
options of its attention, and fails later, on the shapes of its loss. So a new `RadixCollator` watches the
calls of modules until a shared model gets a radix batch; then the watch ends and costs nothing. That another model
of the process is shared does not end it. torch gives its global hooks no keyword arguments; they are read from the
frame that calls the hook, in which `torch.nn.Module` names them `kwargs`.

2. Accelerate dispatches the batch: with an `IterableDataset` and with `dispatch_batches=True` it joins batches on rank
0 and cuts them along the first axis, which no tensor of a radix batch has for its examples. The loader that dispatches
is on the stack of the collator, and on that of a worker process that is forked from it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.data import get_worker_info
from torch.utils.hooks import RemovableHandle

from radixtrain.errors import UserError
from radixtrain.tree.radix_inputs import RADIX

SHARED = "_radixtrain"  # the attribute of a shared backbone
FORWARDED_BY = ("torch", "peft")  # packages whose modules pass a batch on to the module inside
NO_DISPATCHING = (
    "Accelerate cuts the radix batch along its first axis with an IterableDataset and with dispatch_batches=True; set "
    'TrainingArguments(accelerator_config={"dispatch_batches": False}), or in your own loop '
    "Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=False))"
)
DISPATCHER = "accelerate.data_loader", "DataLoaderDispatcher"
MAX_FRAMES = 64  # TRL with adapters has 17 between hook and trainer; six are between the collator and its loader


class _Watch:
    """The state of this process. handle: of the hook while it is installed."""

    handle: RemovableHandle | None = None


def start_watch() -> None:
    """Watch for a model that is not shared, except in a DataLoader's worker, which has no model."""
    if _Watch.handle is None and get_worker_info() is None:
        _Watch.handle = register_module_forward_pre_hook(_check_call)


def end_watch() -> None:
    """End the watch, because a shared model got a radix batch."""
    if _Watch.handle is not None:
        _Watch.handle.remove()
        _Watch.handle = None


def _check_call(module: nn.Module, args: tuple[Any, ...]) -> None:
    """Refuse the call of a Hugging Face model with a radix batch, unless it is shared; then the watch ends.

    Skips calls with positional arguments: trainers call `model(**batch)`, and few inner modules are called so. Modules
    of the user's own may do with a batch what they like: a model inside is checked when it is called.
    """
    if args or torch.compiler.is_compiling() or RADIX not in (sys._getframe(1).f_locals.get("kwargs") or ()):
        return
    receiver = next((part for part in module.modules() if _package_of(part) not in FORWARDED_BY), module)
    if not _package_of(receiver).startswith("transformers"):
        return
    if not any(SHARED in vars(part) for part in receiver.modules()):
        raise UserError(
            f"{type(receiver).__name__} got a batch of RadixCollator, but it is not shared: call "
            f"radixtrain.share_prefixes(model) before training, or before the trainer gets the model"
        )
    end_watch()


def _package_of(module: nn.Module) -> str:
    """Name the package that defines the forward pass; `transformers_modules` if the code came with the weights."""
    return str(getattr(type(module).forward, "__module__", "")).partition(".")[0]


def check_not_dispatched() -> None:
    """Raise UserError that names the setting if Accelerate's dispatching loader asks for this batch. Takes 3 us."""
    for frame in callers():
        is_loader = frame.f_globals.get("__name__") == DISPATCHER[0]
        if is_loader and is_instance_by_name(frame.f_locals.get("self"), *DISPATCHER):
            raise UserError(NO_DISPATCHING)


def is_called_by(function: str, module: str = "") -> bool:
    """Return whether a function of this name is on the stack. module: part of the name of its module."""
    return any(
        frame.f_code.co_name == function and module in frame.f_globals.get("__name__", "") for frame in callers()
    )


def callers() -> Iterator[FrameType]:
    """Yield the frames below the caller of this function, innermost first; at most `MAX_FRAMES`."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(MAX_FRAMES):
        if frame is None:
            return
        yield frame
        frame = frame.f_back


def is_instance_by_name(candidate: object, module: str, name: str) -> bool:
    """Test `isinstance` of a class by name, because its package takes seconds to import or is not installed."""
    return any((kind.__module__, kind.__name__) == (module, name) for kind in type(candidate).__mro__)
