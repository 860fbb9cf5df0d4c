"""A record of tensors that moves between devices as one tensor does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor

Function = Callable[[Tensor], Tensor]


class Movable:
    """A record whose annotated fields are tensors, host values, other records of this kind, lists and dicts."""

    def fields(self) -> dict[str, Any]:
        """Return the fields, without what properties have cached."""
        return {name: vars(self)[name] for name in type(self).__annotations__}

    def changed(self, **fields: object) -> Self:
        """Copy the record with other values in some fields, and without what its properties have cached."""
        copied = object.__new__(type(self))
        own = {name: x.changed() if isinstance(x, Movable) else x for name, x in self.fields().items()}
        vars(copied).update(own | fields)
        return copied

    def map(self, function: Function) -> Self:
        """Replace every tensor; return the record itself if nothing changes."""
        old = self.fields()
        new = {name: _mapped(value, function) for name, value in old.items()}
        return self if all(new[name] is old[name] for name in old) else self.changed(**new)

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


def _mapped(value: object, function: Function) -> Any:
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, Movable):
        return value.map(function)
    if isinstance(value, dict):
        return {key: _mapped(each, function) for key, each in value.items()}
    return [_mapped(each, function) for each in value] if isinstance(value, list) else value
