"""Keys and values that one pass of an optimizer step keeps for later passes, and the gradients that these return.

A pass that is kept writes its keys and values of every layer into a `LayerRows`, without their graph. Later passes read
them beside their own, and add to their gradients. The kept pass goes backward last: there the gradients of the later
passes join its own, at the place where attention read the keys. So every gradient is that of one pass over all rows.

    kept pass      k, v  ->  LayerRows  ->  its own attention  ...           dk, dv = own + LayerRows.gradients
    later pass     k, v, LayerRows  ->  attention  ...  backward  ->         LayerRows.gradients += its share

C rows of a context, U rows of a pass, K heads of keys and values, each of H.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from radixtrain.errors import UserError
from radixtrain.kernels.first_order import first_order

Keys = tuple[Tensor, Tensor]  # and values


class LayerRows:
    """Keys and values of the rows of one pass, by the id of the layer's attention, and their gradients.

    The gradients are float32, or float64 for float64 rows, because many passes may add to them.
    """

    def __init__(self) -> None:
        self.rows: dict[int, tuple[Tensor, Tensor]] = {}
        self.gradients: dict[int, tuple[Tensor, Tensor]] = {}
        self.joined: set[int] = set()
        self.is_trained: dict[int, bool] = {}

    def keep(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Keep keys and values once: a layer that is recomputed in the backward pass has the same rows."""
        if layer not in self.rows:
            self.rows[layer] = key.detach().contiguous(), value.detach().contiguous()

    def check_trained(self, layer: int, is_trained: bool) -> None:
        """Raise UserError if the keys of one pass have a gradient and another's have none: its share would be lost."""
        if self.is_trained.setdefault(layer, is_trained) != is_trained:
            raise UserError(
                "weights are trained that only some micro-batches of the step reach, as those of some experts, and "
                "nothing before them is: train what all tokens reach too, or leave share_across_micro_batches at false"
            )

    def add(self, layer: int, start: int, end: int, gradients: Sequence[Tensor]) -> None:
        """Add the gradients of the rows [start, end) from a later pass. Raises UserError if the layer's have joined."""
        if layer in self.joined:
            raise UserError(
                "a micro-batch goes backward after the prefix that it continues, whose gradient would lack its share: "
                "call backward on each loss of step_losses before asking for the next one, not on their sum"
            )
        if layer not in self.gradients:
            key, value = self.rows[layer]
            wide = torch.promote_types(key.dtype, torch.float32)
            self.gradients[layer] = torch.zeros_like(key, dtype=wide), torch.zeros_like(value, dtype=wide)
        for total, gradient in zip(self.gradients[layer], gradients, strict=True):
            total[start:end] += gradient

    def check_joined(self) -> None:
        """Raise UserError if later passes went backward and this one did not."""
        if self.gradients:
            raise UserError(
                "a prefix did not go backward after the micro-batches that continue it, whose gradient goes through "
                "it: call backward on each loss of step_losses, one that is 0 too, before asking for the next one"
            )

    def join(self, layer: int, own: Sequence[Tensor]) -> list[Tensor]:
        """Return the gradients of the pass itself plus those of all later ones, which are then dropped."""
        self.joined.add(layer)
        later = self.gradients.pop(layer, None)
        return list(own) if later is None else [(x + y).to(y.dtype) for x, y in zip(later, own, strict=True)]


class PassCache:
    """What the layers of one pass keep and read. Not a dataclass, of which FSDP would give every layer a copy.

    kept: where its own rows go; None if no later pass reads them.
    context: (rows of an earlier pass, start, end), back to back its context of C rows.
    """

    def __init__(self, kept: LayerRows | None, context: Sequence[tuple[LayerRows, int, int]]) -> None:
        self.kept, self.context = kept, context
        self.went_backward = False

    @property
    def is_second(self) -> bool:
        """Return whether this pass has run before, without a graph, to keep its rows."""
        return self.kept is not None and bool(self.kept.rows)

    def check_once(self, gradient: Tensor) -> None:
        """Raise UserError if the loss of the pass goes backward a second time; a hook of that loss."""
        if self.went_backward:
            raise UserError(
                "a loss of step_losses goes backward a second time, and the prefix that it continues would get its "
                "gradient twice: call backward once on each loss, and read the gradient of the step from the weights"
            )
        self.went_backward = True

    def keys_and_values(self, layer: int, key: Tensor, value: Tensor) -> tuple[Keys, Keys | None]:
        """Return keys and values of the pass, (U, K, H) each, and those of its context, (C, K, H) each, or None."""
        if torch.is_grad_enabled():
            for rows in (*([self.kept] if self.kept else ()), *(earlier for earlier, _, _ in self.context)):
                rows.check_trained(layer, key.requires_grad or value.requires_grad)
        key, value, *stored = _WithContext.apply(key, value, self, layer)
        return (key, value), (stored[0], stored[1]) if stored else None


class _WithContext(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, key: Tensor, value: Tensor, cache: PassCache, layer: int) -> tuple[Tensor, ...]:
        ctx.cache, ctx.layer = cache, layer
        if cache.kept is not None:
            cache.kept.keep(layer, key, value)
        parts = [[x[start:end] for x in earlier.rows[layer]] for earlier, start, end in cache.context]
        return key.view_as(key), value.view_as(value), *map(torch.cat, zip(*parts, strict=True))

    @staticmethod
    @first_order
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        cache, layer, own, later = ctx.cache, ctx.layer, gradients[:2], gradients[2:]
        place = 0
        for earlier, start, end in cache.context:
            stop = place + end - start
            earlier.add(layer, start, end, [gradient[place:stop] for gradient in later])
            place = stop
        if cache.kept is not None:
            own = cache.kept.join(layer, own)
        return own[0], own[1], None, None
