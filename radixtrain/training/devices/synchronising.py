"""When the ranks exchange gradients: under DDP with the last micro-batch of a step, under FSDP2 with each.

DDP's reducer waits until every trained parameter has a gradient. If the last micro-batch of a rank does not reach one,
such as an expert that no token is routed to, the other ranks would wait for ever. So a second backward pass, of
gradients that are zero, reaches the rest, and what the earlier micro-batches have added up is exchanged all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.parallel import DistributedDataParallel

from radixtrain.distributed import ranks

__all__ = ["backward", "settle", "wrap_again"]


def backward(module: Any, loss: Tensor, is_last: bool) -> None:
    """Add the gradient of a micro-batch; after the last one of a step, gradients are means over the ranks.

    module: a `LightningModule` under manual optimization, in its `training_step`. loss: (). is_last: of the step.

    A parameter that no rank has reached in the step keeps the gradient None, which an optimizer passes over.
    """
    wrapper = _wrapper(module)
    if wrapper is None:
        module.manual_backward(loss)
    elif not is_last:
        with wrapper.no_sync():
            module.manual_backward(loss)
    elif wrapper.find_unused_parameters:  # then DDP finds those that are not reached
        module.manual_backward(loss)
    else:
        _backward_of_all(module, lambda: module.manual_backward(loss))


def settle(module: Any) -> None:
    """Exchange gradients that are zero before the first step, after which DDP lays out its buckets for good.

    It does so after the first exchange of a process, and the order in which three or more ranks add depends on the
    place in a bucket: the first step of a resumed run would be rounded otherwise than in the run that was not stopped.
    """
    wrapper = _wrapper(module)
    if wrapper is None or wrapper.find_unused_parameters:  # then DDP leaves them as they are
        return
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    module.trainer.strategy.pre_backward(torch.zeros((), device=module.device))
    for parameter in reversed(trained):  # about the order in which gradients are ready
        torch.autograd.backward([parameter], [torch.zeros_like(parameter)])
    for parameter in trained:
        parameter.grad = None


def wrap_again(strategy: Any) -> None:
    """Have DDP look at the parameters anew, on all ranks, after one of them has had other types in between.

    Torch then replaces the node that adds up its gradient, and DDP would wait for the old one. strategy: Lightning's.
    """
    if isinstance(strategy.model, DistributedDataParallel):
        strategy.model = strategy.lightning_module
        strategy.configure_ddp()


def _wrapper(module: Any) -> DistributedDataParallel | None:
    """None for a single process, and under FSDP2."""
    wrapper = module.trainer.strategy.model if ranks().size > 1 else None
    return wrapper if isinstance(wrapper, DistributedDataParallel) else None


def _backward_of_all(module: nn.Module, run: Callable[[], None]) -> None:
    """Run the backward pass in which DDP reduces, and have it reach every trained parameter."""
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    unreached = _unreached(trained, run)
    has_none = [int(parameter.grad is None) for parameter in trained]  # in no micro-batch of this rank
    if unreached:
        torch.autograd.backward(unreached, [torch.zeros_like(parameter) for parameter in unreached])
    is_left_out = ranks().any(any(has_none))
    if is_left_out:
        for parameter, number in zip(trained, ranks().total(*has_none), strict=True):
            if number == ranks().size:
                parameter.grad = None


def _unreached(trained: Sequence[nn.Parameter], run: Callable[[], None]) -> list[nn.Parameter]:
    """The parameters that a backward pass leaves out, seen where DDP sees it: at the nodes that add up gradients."""
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
    return [parameter for place, parameter in enumerate(trained) if place not in reached]
