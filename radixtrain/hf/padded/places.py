"""The places of a padded batch: which unique row stands at each, and the refusal of a loss that reads padding.

In an ordinary batch hidden states at padding are arbitrary. Here they are those of a token of the batch, with their
columns reversed. A loss may still read them, for instance if labels of padding are not -100. Its gradient would
not be the ordinary one, so the backward pass raises an error. For that a gradient must arrive there: the hidden states
of padding are finite, not zero, and not a token's own, because the gradient of a square is zero at zero, and so is that
of a distance between equal rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from radixtrain.errors import UserError
from radixtrain.kernels.functions import refuse_batched
from radixtrain.kernels.rows import sum_rows
from radixtrain.tree.arrays import IntArray

NO_ROW = -1
PLACES_AT_A_TIME = 1024  # so that checking the gradient of logits does not copy all of it at padding


@dataclass(frozen=True, eq=False)
class Places:
    """Which unique row stands at each place of a padded batch.

    rows: (B, L), int64. U at padding. num_tokens: T, the places without it.
    """

    rows: IntArray
    num_tokens: int

    @property
    def has_padding(self) -> bool:
        return self.num_tokens < self.rows.size

    def with_padding(self, rows: Tensor) -> Tensor:
        """Append to the unique rows, (U, ...), one for padding, if any: the first row reversed, without gradient."""
        if not self.has_padding:
            return rows
        table = torch.cat([rows, rows[:1].detach().flip(-1)])
        if torch.is_grad_enabled() and not table.requires_grad:
            table.requires_grad_()  # a frozen model, and perhaps a head after it that reads padding
        return table


def check_gradient_at(places: Tensor, x: Tensor) -> None:
    """Make the backward pass raise UserError if the gradient of x shows that the loss reads these of its places."""
    if len(places) and x.requires_grad:
        x.register_hook(lambda grad: check_unread(places, grad))


def check_unread(places: Tensor, grad: Tensor | None) -> None:
    """Raise UserError if a gradient is not zero at places of padding; None is zero. Waits for the device.

    If a loss overflows, its gradient at padding is 0 times infinity, which is NaN. The ordinary run has the same and
    goes on without this step. So what is not finite at padding passes if it is not finite elsewhere either.
    """
    if grad is None or not len(places):
        return
    refuse_batched(grad)
    parts = [grad[some].reshape(len(some), -1) for some in places.split(PLACES_AT_A_TIME)]
    num_read = sum(part.any(dim=1).sum() for part in parts)
    if num_read and not _is_lost(places, grad):
        refuse_reading(num_read)


def _is_lost(places: Tensor, grad: Tensor) -> bool:
    """Return whether a gradient has only zeros and non-finite numbers at these places, and the latter elsewhere."""
    is_padding = torch.zeros(len(grad), dtype=torch.bool, device=grad.device).index_fill_(0, places, True)
    is_finite = grad.isfinite()
    is_read = ((grad != 0) & is_finite)[is_padding].any()
    return bool(~is_read & ~is_finite[~is_padding].all())


def refuse_reading(num_read: Tensor | int) -> None:
    """Raise UserError if the loss reads places of padding. Waits for the device, once in a backward pass."""
    if num_read:
        raise UserError(
            f"the loss reads {int(num_read)} places that attention_mask hides, and share_prefixes does not compute "
            f"those: set the labels of padding to -100, and with padding on the left also the label of the first token "
            f"of a row, which is predicted from padding; a loss over whole rows needs restore_model(model)"
        )


def refuse_counted(places: Tensor, counted: Tensor, loss: Tensor) -> None:
    """Make the backward pass of a loss raise UserError if it counts these of its places. counted: (places,), bool."""
    if len(places) and loss.requires_grad:
        num_read = counted[places].sum()
        loss.register_hook(lambda grad: refuse_reading(num_read * (grad != 0)))


def at_places(values: Tensor, rows: Tensor, padding: Tensor) -> Tensor:
    """Put rows at their places, where the backward pass raises UserError if a gradient reaches padding.

    values: (R, W). rows: (...), int64. the row of each place. padding: flat places. Returns (..., W).
    """
    found: Tensor = _AtPlaces.apply(values, (rows, padding))
    return found


class _AtPlaces(torch.autograd.Function):
    """Values of rows at their places. Saves no tensor, so a checkpoint counts the same whenever this runs."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, places: tuple[Tensor, Tensor]) -> Tensor:
        ctx.set_materialize_grads(False)  # or rows that nothing read got zeros (DistributedDataParallel wants them)
        ctx.places, ctx.num_rows = places, len(values)
        return functional.embedding(places[0], values)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None]:
        if grad is None:
            return None, None
        rows, padding = ctx.places
        grad = grad.reshape(rows.numel(), -1)
        check_unread(padding, grad)
        return sum_rows(grad, rows.view(-1), ctx.num_rows), None
