"""Refuses misuses of a radix batch before they end in an error that names none of them.

1. `share_prefixes` was forgotten, or a module takes only some entries of the batch.
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

import inspect
import sys
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import Any, ClassVar

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
HUGGING_FACE = "transformers.modeling_utils", "PreTrainedModel"
MAX_FRAMES = 64  # TRL with adapters has 17 between hook and trainer; six are between the collator and its loader


class _Watch:
    """The state of this process.

    handle: of the hook while it is installed. passed: ids of the user's own modules that got a radix batch.
    """

    handle: RemovableHandle | None = None
    passed: ClassVar[set[int]] = set()


def start_watch() -> None:
    """Watch for a model that is not shared, except in a DataLoader's worker, which has no model."""
    if _Watch.handle is None and get_worker_info() is None:
        _Watch.handle = register_module_forward_pre_hook(_check_call)


def end_watch() -> None:
    """End the watch, because a shared model got a radix batch."""
    if _Watch.handle is not None:
        _Watch.passed.clear()
        _Watch.handle.remove()
        _Watch.handle = None


def _check_call(module: nn.Module, args: tuple[Any, ...]) -> None:
    """Refuse the call of a Hugging Face model with a radix batch, unless it is shared; then the watch ends.

    Skips calls with positional arguments: trainers call `model(**batch)`, and few inner modules are called so.
    """
    if args or torch.compiler.is_compiling():
        return
    batch = sys._getframe(1).f_locals.get("kwargs") or ()
    if RADIX not in batch:
        return
    parts = list(module.modules())
    if not any(is_instance_by_name(part, *HUGGING_FACE) for part in parts):
        end_watch()
        return
    _check_takes(module, batch)
    if any(SHARED in vars(part) for part in parts):
        _leave_to_its_parts(module)
        return
    receiver = next((part for part in parts if _package_of(part) not in FORWARDED_BY), module)
    if not _package_of(receiver).startswith("transformers"):
        _leave_to_its_parts(module)
        return
    _Watch.passed.clear()
    raise UserError(
        f"{type(receiver).__name__} got a batch of RadixCollator, but it is not shared: call "
        f"radixtrain.share_prefixes(model) before training, or before the trainer gets the model"
    )


def _check_takes(module: nn.Module, batch: Iterable[str]) -> None:
    """Refuse a batch of which a module takes only some entries."""
    taken = inspect.signature(module.forward).parameters
    missing = [name for name in batch if name not in taken]
    if missing and all(each.kind is not each.VAR_KEYWORD for each in taken.values()):
        raise UserError(
            f"{type(module).__name__} got a batch of RadixCollator, and its forward takes no {', '.join(missing)}: "
            f"let it take **batch and pass all of it on to the model, or use share_prefixes(model) and another collator"
        )


def _leave_to_its_parts(module: nn.Module) -> None:
    """Let a module of the user's own use a batch as it likes; a model inside that gets it is checked next.

    If it gets a second batch, nothing was wrong with the first, and the watch ends.
    """
    if id(module) in _Watch.passed:
        end_watch()
    else:
        _Watch.passed.add(id(module))


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
