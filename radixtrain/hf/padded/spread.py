"""Unique rows back to the places of a padded batch, and a check that no loss reads the places that the mask hides.

In an ordinary batch the hidden states of padding are numbers that no one should read. Here they are those of a token of
the batch. A loss may read them all the same, for instance if labels of padding are not -100. Its gradient would not be
the ordinary one, so the backward pass raises an error. For that a gradient must arrive there: the hidden states of
padding are finite and not zero, because the gradient of a square is zero at zero.

U unique rows, B L places.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from radixtrain.errors import UserError
from radixtrain.kernels.rows import gather_rows
from radixtrain.tree.arrays import IntArray

__all__ = ["Places", "check_gradient_at"]

PLACES_AT_A_TIME = 1024  # so that checking the gradient of logits does not copy all of it at padding


@dataclass(frozen=True, eq=False)
class Places:
    """Which unique row stands at each place of a padded batch.

    batch_shape: B and L.
    host_rows: (B L,), int64. U at padding.
    rows: the same, on the device of the model.
    padding: int64, there too. the places of padding, ascending.
    """

    batch_shape: tuple[int, ...]
    host_rows: IntArray
    rows: Tensor
    padding: Tensor

    @classmethod
    def on(cls, device: torch.device, kept: npt.NDArray[np.bool_], rows: IntArray) -> Places:
        """kept: (B, L), False at padding. rows: (B L,), int64. U at padding."""
        padding = np.flatnonzero(~kept)
        on_device = (torch.from_numpy(each).to(device, non_blocking=True) for each in (rows, padding))
        return cls(kept.shape, rows, *on_device)

    def with_padding(self, rows: Tensor) -> Tensor:
        """The unique rows, (U, ...), and if there is padding one more: the first of them, without gradient."""
        if not len(self.padding):
            return rows
        table = torch.cat([rows, rows[:1].detach()])
        if torch.is_grad_enabled() and not table.requires_grad:
            table.requires_grad_()  # a frozen model, and perhaps a head after it that reads padding
        return table

    def spread(self, table: Tensor) -> Tensor:
        """(B L, ...). The rows at their places. table: as `with_padding` returns it."""
        placed = gather_rows(table, self.rows)
        check_gradient_at(self.padding, placed)
        return placed


def check_gradient_at(places: Tensor, x: Tensor) -> None:
    """The backward pass raises UserError if the gradient of x is not zero at these of its places."""
    if len(places) and x.requires_grad:
        x.register_hook(lambda grad: _check_zero(places, grad))


def _check_zero(places: Tensor, grad: Tensor | None) -> None:
    """Waits for the device, once in a backward pass. A gradient that is None is zero."""
    if grad is None:
        return
    num_read = sum(grad[some].flatten(1).any(dim=1).sum() for some in places.split(PLACES_AT_A_TIME))
    if num_read:
        raise UserError(
            f"the loss reads {int(num_read)} places that attention_mask hides, and share_prefixes does not compute "
            f"those: set the labels of padding to -100, and with padding on the left also the label of the first token "
            f"of a row, which is predicted from padding; a loss over whole rows needs restore_model(model)"
        )
