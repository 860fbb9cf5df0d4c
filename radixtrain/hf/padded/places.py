"""The places of a padded batch: its tokens, which unique row stands at each, and the refusal of a loss over padding.

In an ordinary batch hidden states at padding are arbitrary. Here they are those of a token of the batch, with their
columns reversed. A loss may still read them, for instance if labels of padding are not -100. Its gradient would
not be the ordinary one, so the backward pass raises an error. For that a gradient must arrive there: the hidden states
of padding are finite, not zero, and not a token's own, because the gradient of a square is zero at zero, and so is that
of a distance between equal rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from radixtrain.errors import UserError
from radixtrain.kernels.functions import refuse_batched
from radixtrain.kernels.rows import sum_rows
from radixtrain.tree.arrays import IntArray

BoolArray = npt.NDArray[np.bool_]
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

    def are_unwatched(self, rows: Tensor) -> bool:
        """Return whether a loss of these rows could read padding, and no gradient would show it."""
        return self.has_padding and torch.is_grad_enabled() and not rows.requires_grad

    def with_padding(self, rows: Tensor) -> Tensor:
        """Append to the unique rows, (U, ...), one for padding, if any: the first row reversed, without gradient."""
        if not self.has_padding:
            return rows
        table = torch.cat([rows, rows[:1].detach().flip(-1)])
        if self.are_unwatched(table):
            table.requires_grad_()  # states of a layer below the first that is trained, and perhaps a head after them
        return table


class PaddedIds(NamedTuple):
    """The ids of a padded batch on the host, which of them are attended, and their positions.

        input_ids  7 8 9 0    attention_mask  1 1 1 0    unique rows  7 8 5 9    places  0 1 3 4
                   0 7 8 5                    0 1 1 1                                    4 0 1 2

    A place is one entry of the `[B, L]` batch. The row of a place that the mask hides is U, one past the last.

        input_ids: (B, L), int64.
        attended: (B, L), bool. False for padding.
        position_ids: (B, L), int64, or None if they count the columns.
        is_packed: one row that has several sequences, each of which counts its positions from 0.
    """

    input_ids: IntArray
    attended: BoolArray
    position_ids: IntArray | None
    is_packed: bool

    @classmethod
    def of(cls, input_ids: IntArray, attention_mask: IntArray | None, position_ids: IntArray | None) -> PaddedIds:
        """Read a batch. All (B, L). attention_mask: None if nothing is hidden."""
        attended = np.ones(input_ids.shape, dtype=bool) if attention_mask is None else attention_mask.astype(bool)
        jumps = position_ids is not None and bool((np.diff(position_ids) != 1).any())
        return cls(input_ids, attended, position_ids, is_packed=attention_mask is None and jumps)

    @property
    def has_holes(self) -> bool:
        """Return whether some row has padding between its tokens."""
        return bool((np.diff(self.attended, axis=1, prepend=False, append=False).sum(axis=1) > 2).any())

    @property
    def is_left_padded(self) -> bool:
        return bool((~self.attended[:, :1] & self.attended.any(axis=1, keepdims=True)).any())

    @property
    def has_negative_positions(self) -> bool:
        positions = self.attended_positions
        return positions is not None and bool((positions < 0).any())

    @property
    def packing_is_plain(self) -> bool:
        """Return whether the sequences of a packed batch stand in one row, and each counts its positions from 0."""
        assert self.position_ids is not None
        return len(self.attended) == 1 and not self.position_ids[0][self.cu_seqlens[:-1]].any()

    @property
    def max_position(self) -> int:
        """Return the largest position that Hugging Face computes, of padding too."""
        return self.attended.shape[1] - 1 if self.position_ids is None else int(self.position_ids.max(initial=0))

    @property
    def attended_positions(self) -> IntArray | None:
        """Return the positions of the attended tokens, (T,), int64; None if they count from 0 in every sequence."""
        return None if self.position_ids is None or self.is_packed else self.position_ids[self.attended]

    @property
    def cu_seqlens(self) -> IntArray:
        """Return where each sequence starts among the attended tokens, and their number."""
        if self.is_packed:
            assert self.position_ids is not None
            starts = np.flatnonzero(np.diff(self.position_ids[0], prepend=-2) != 1)
            return np.append(starts, self.attended.size)
        return np.concatenate([[0], np.cumsum(self.attended.sum(axis=1))])

    def places(self, row_of_token: IntArray, num_rows: int) -> Places:
        """Return where rows stand. row_of_token: (T,), int64. num_rows: U."""
        rows = np.full(self.attended.shape, num_rows)
        rows[self.attended] = row_of_token
        return Places(rows, len(row_of_token))


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

    def check(grad: Tensor) -> None:
        refuse_batched(grad)
        refuse_reading(num_read * (grad != 0))

    if len(places) and loss.requires_grad:
        num_read = counted[places].sum()
        loss.register_hook(check)


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
