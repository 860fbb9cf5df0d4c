"""What moves between devices as a tensor does: loaders, Accelerate, Lightning and `x.to(device)` find the methods."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor

from radixtrain.tree.arrays import IntArray

Function = Callable[[Tensor], Tensor]


class Movable:
    """An object of which `map` replaces the tensors that move. Whatever else it holds stays where it is."""

    def map(self, function: Function) -> Self:
        """Replace what moves; return the object itself if nothing changes."""
        raise NotImplementedError

    def to(self, device: torch.device | str, non_blocking: bool | None = None) -> Self:
        """Move to a device.

        non_blocking: as of `Tensor.to`. By default no copy is waited for, except to where the host could read before
            the copy has arrived; Lightning relies on that.
        """
        if non_blocking is None:
            non_blocking = torch.device(device).type not in ("cpu", "mps")
        return self.map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Self:
        """Copy into page-locked memory of the host, from which copies to a GPU are asynchronous."""
        return self.map(Tensor.pin_memory)


def on_device(values: IntArray, device: torch.device) -> Tensor:
    """Copy to a device without waiting: CUDA has copied pageable memory aside when `to` returns."""
    return torch.tensor(values, dtype=torch.int64, device="cpu").to(device, non_blocking=True)
