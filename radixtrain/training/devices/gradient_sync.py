"""Exchanges gradients between ranks: under DDP in the last micro-batch of a step, under FSDP2 in each.

DDP's reducer waits until every trained parameter has a gradient. If the last micro-batch of a rank does not reach one,
such as an expert that no token is routed to, the other ranks would wait forever. So a second backward pass, of
gradients that are zero, reaches the rest, so that the sums of the earlier micro-batches are exchanged too.

The gradients are views of DDP's buckets, and each step reuses those of the previous one: a rank holds them once.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from contextlib import nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.parallel import DistributedDataParallel

from radixtrain.distributed import ranks


def backward(module: Any, loss: Tensor, is_last: bool) -> None:
    """Add the gradient of a micro-batch; after the last one of a step, gradients are means over the ranks.

    module: a `LightningModule` under manual optimization, in its `training_step`, which sets gradients to None before
        the first micro-batch. loss: (). is_last: of the step.

    A parameter that no rank has reached in the step keeps the gradient None, which an optimizer skips.
    """
    wrapper = _wrapper(module)
    if wrapper is None:
        module.manual_backward(loss)
        return
    with nullcontext() if is_last else wrapper.no_sync():
        if wrapper.find_unused_parameters:  # then DDP finds those that are not reached
            module.manual_backward(loss)
            return
        gradients = _gradients.setdefault(wrapper, _Gradients(_trained(module)))
        gradients.add(lambda: module.manual_backward(loss))
        if is_last:
            gradients.complete()


def warm_up_buckets(module: Any) -> None:
    """Exchange zero gradients before the first step, after which DDP lays out its buckets for good.

    It does so after the first exchange of a process, and the order in which three or more ranks add depends on the
    place in a bucket: the first step of a resumed run would be rounded differently than without the interruption.
    """
    wrapper = _wrapper(module)
    if wrapper is None or wrapper.find_unused_parameters:  # then DDP does not change them
        return
    trained = _trained(module)
    module.trainer.strategy.pre_backward(torch.zeros((), device=module.device))
    for parameter in reversed(trained):  # roughly the order in which gradients are ready
        torch.autograd.backward([parameter], [torch.zeros_like(parameter)])
    for parameter in trained:
        parameter.grad = None


def rebuild_ddp(strategy: Any) -> None:
    """Make DDP look at the parameters again, on all ranks, after one had another dtype for a while.

    Torch then replaces the node that adds up its gradient, and DDP would wait for the old one. strategy: Lightning's.
    """
    if isinstance(strategy.model, DistributedDataParallel):
        strategy.model = strategy.lightning_module
        strategy.configure_ddp()


def _wrapper(module: Any) -> DistributedDataParallel | None:
    """Return the DDP wrapper; None for a single process and under FSDP2."""
    wrapper = module.trainer.strategy.model if ranks().size > 1 else None
    return wrapper if isinstance(wrapper, DistributedDataParallel) else None


def _trained(module: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


class _Gradients:
    """The gradients of a DDP wrapper: which of them a step has reached, and the tensors that hold them afterwards.

    trained: parameters, in the same order on all ranks.
    """

    def __init__(self, trained: Sequence[nn.Parameter]):
        self.trained = trained
        self.held: list[Tensor | None] = [None] * len(trained)
        self.reached: set[int] = set()
        """Indices in `trained` of the parameters that any micro-batch of the step has reached."""
        self.reached_last: set[int] = set()
        """Indices in `trained` of the parameters that the last micro-batch has reached."""

    def add(self, run: Callable[[], None]) -> None:
        """Run the backward pass of a micro-batch."""
        for parameter, held in zip(self.trained, self.held, strict=True):
            if parameter.grad is None and held is not None:
                parameter.grad = held.zero_()
        self.reached_last = _reached(self.trained, run)
        self.reached |= self.reached_last

    def complete(self) -> None:
        """Make the pass in which DDP exchanges gradients reach every parameter; None for those that none reached."""
        unreached = [parameter for place, parameter in enumerate(self.trained) if place not in self.reached_last]
        if unreached:
            torch.autograd.backward(unreached, [torch.zeros_like(parameter) for parameter in unreached])
        self.held = [parameter.grad for parameter in self.trained]
        reached, self.reached = self.reached, set()
        is_left_out = ranks().any(len(reached) < len(self.trained))
        if is_left_out:
            left_out = ranks().total(*(int(place not in reached) for place in range(len(self.trained))))
            for parameter, number in zip(self.trained, left_out, strict=True):
                if number == ranks().size:
                    parameter.grad = None


def _reached(trained: Sequence[nn.Parameter], run: Callable[[], None]) -> set[int]:
    """Return the indices of parameters that a backward pass reaches, seen at the nodes that sum them, as in DDP."""
    reached: set[int] = set()
    handles = [
        get_gradient_edge(parameter).node.register_hook(lambda *_, place=place: reached.add(place))
        for place, parameter in enumerate(trained)
    ]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return reached


_gradients: MutableMapping[DistributedDataParallel, _Gradients] = WeakKeyDictionary()
