"""A sharded model -> the whole one on rank 0, which writes it as any other."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from radixtrain.checkpoints.sharded import is_sharded, whole
from radixtrain.distributed import ranks

__all__ = ["gather_on_first"]


@torch.no_grad()
def gather_on_first(model: nn.Module) -> None:
    """Gather the weights of a sharded model in the memory of rank 0's host, one at a time. Every rank calls this.

    Afterwards the other ranks have weights without memory, and no rank can compute with the model. A model that is not
    sharded is not changed.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    gathered: dict[nn.Parameter, nn.Parameter] = {}
    for module, name, parameter in list(_places(model)):
        if not is_sharded(parameter):
            continue
        if parameter not in gathered:  # a weight may have several places
            found = whole(parameter)
            held = found.cpu() if ranks().is_first else found.to("meta")
            gathered[parameter] = nn.Parameter(held, requires_grad=parameter.requires_grad)
        setattr(module, name, gathered[parameter])


def _places(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """Module and name for each place where a model keeps a parameter, and the parameter."""
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            yield module, name, parameter
