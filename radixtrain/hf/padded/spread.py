"""What represents hidden states or logits of a padded batch: a small table, and which of its rows is at each place.

table  a b c    place_rows  0 1 2    stands for  a b c
                            0 1 0                a b a

In an ordinary batch hidden states at padding are arbitrary. Here they are those of a token of the batch, with their
columns reversed. A loss may still read them, for instance if labels of padding are not -100. Its gradient would
not be the ordinary one, so the backward pass raises an error. For that a gradient must arrive there: the hidden states
of padding are finite, not zero, and not a token's own, because the gradient of a square is zero at zero, and so is that
of a distance between equal rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple
from weakref import ref

import numpy as np
import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.nn import functional
from torch.utils._python_dispatch import _disable_current_modes

from radixtrain.errors import UserError
from radixtrain.hf.sharing_report import SharingReport
from radixtrain.kernels.functions import refuse_batched
from radixtrain.kernels.rows import gather_rows, sum_rows
from radixtrain.tree.arrays import IntArray

NO_ROW = -1
PLACES_AT_A_TIME = 1024  # so that checking the gradient of logits does not copy all of it at padding


def is_checkpointed() -> bool:
    """Return whether hooks get what torch saves for the backward pass, as in a checkpoint, which counts it in both."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


class Modes(NamedTuple):
    """The modes of torch in which a tensor is made."""

    grad: bool
    inference: bool

    @classmethod
    def now(cls) -> Modes:
        return cls(torch.is_grad_enabled(), torch.is_inference_mode_enabled())

    @contextmanager
    def entered(self, x: Tensor) -> Iterator[None]:
        """Compute with x in these modes, and let no caller's mode count, trace or transform what is computed.

        x: if it is one of torch's fake tensors, its mode stays.
        """
        with (
            _disable_current_modes(),
            getattr(x, "fake_mode", nullcontext()),
            temporarily_clear_interpreter_stack(),
            torch.inference_mode(self.inference),
            torch.set_grad_enabled(self.grad),
        ):
            yield


@dataclass(eq=False)
class Spread:
    """`table[place_rows]`, for a lazy tensor.

    table: (R, W). place_rows: (...), int64, on the host.
    padding_row: which row of the table stands at padding; NO_ROW without any.
    shaped: (..., W). the ordinary tensor without its numbers, on the meta device: its strides, whether it is a view.
    base: what it is a view of, with the whole memory; None for that itself.
    is_part: a function returned it together with others, so that torch refuses to change it in place.
    dense: the ordinary tensor, once there is one. dense_node: its node when it was made.

    Of the whole memory:
    numbers: one for each row of the table, by the function, and the modes in which they were computed.
    lazy: the lazy tensors that show it.
    was_read: functions read the table with gradients, so that those at the places are not complete.
    """

    table: Tensor
    place_rows: IntArray
    padding_row: int
    report: SharingReport
    shaped: Tensor = None  # type: ignore[assignment]
    base: Spread | None = None
    is_part: bool = False
    dense: Tensor | None = field(default=None, init=False)
    dense_node: Any = field(default=None, init=False)
    numbers: dict[Any, Tensor] = field(default_factory=dict, init=False)
    lazy: list[ref[Any]] = field(default_factory=list, init=False)
    was_read: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.modes = Modes.now()
        if not self.modes.grad:  # a target passes no gradient on later; torch's view of what has one is a leaf with one
            self.table = self.table.detach().requires_grad_(self.base is not None and self.table.requires_grad)
        if self.shaped is None:
            with _disable_current_modes(), torch.inference_mode(False):
                self.shaped = torch.empty(self.shape, dtype=self.table.dtype, device="meta")

    @property
    def memory(self) -> Spread:
        """Return that with the whole memory."""
        return self if self.base is None else self.base

    @property
    def shape(self) -> tuple[int, ...]:
        return *self.place_rows.shape, self.table.shape[1]

    @cached_property
    def rows(self) -> Tensor:
        """Return the rows of the places, flat, as an index on the device of the table, (places,), int64."""
        return self.on_device(self.place_rows.reshape(-1))

    @cached_property
    def padding(self) -> Tensor:
        """Return the places of padding, flat and ascending, int64."""
        return self.on_device(np.flatnonzero(self.place_rows == self.padding_row))

    @cached_property
    def asked_rows(self) -> IntArray:
        """Return which rows of the table stand at some place, ascending."""
        is_asked = np.zeros(len(self.table), dtype=bool)
        is_asked[self.place_rows] = True
        return np.flatnonzero(is_asked)

    @property
    def asks_few(self) -> bool:
        return 2 * len(self.asked_rows) < len(self.table)

    @property
    def is_changed(self) -> bool:
        """Return whether the ordinary tensor has been changed in place, by something that has a gradient."""
        return self.dense is not None and _node_of(self.dense) is not self.dense_node

    def on_device(self, index: IntArray) -> Tensor:
        with torch.inference_mode(False):
            return torch.from_numpy(index).to(self.table.device, non_blocking=True)

    def with_asked_rows(self) -> Spread:
        """Drop the rows that stand at no place."""
        rows = self.asked_rows
        if len(rows) == len(self.table):
            return self
        number = np.full(len(self.table) + 1, NO_ROW)
        number[rows] = np.arange(len(rows))
        table = gather_rows(self.table, self.on_device(rows))
        return Spread(table, number[self.place_rows], int(number[self.padding_row]), self.report)

    def needed(self) -> Spread:
        """Drop the rows that stand at no place if these are many."""
        return self.with_asked_rows() if self.asks_few else self

    def make_dense(self) -> None:
        """Make the ordinary tensor: of the whole memory from the table, once, and a view as a view of that."""
        if self.dense is not None:
            return
        if self.base is None:
            modes = Modes(grad=self.table.requires_grad, inference=self.table.is_inference())
            with modes.entered(self.table):
                self.dense = self.at_places(self.table)
        else:
            self.base.make_dense()
            memory: Any = self.base.dense
            with self.modes.entered(memory):
                view = memory.as_strided(self.shaped.shape, self.shaped.stride(), self.shaped.storage_offset())
                self.dense = view.chunk(1)[0] if self.is_part else view
        self.dense_node = _node_of(self.dense)

    def at_places(self, values: Tensor) -> Tensor:
        """Put values of the rows, (R, ...), at their places, as an ordinary tensor, (..., ...)."""
        found: Tensor = _AtPlaces.apply(values, self)
        return found

    def placed(self, values: Tensor) -> Tensor:
        """Return values of each place, (..., k) or (places,), whose gradient at padding has to be zero."""
        check_gradient_at(self.padding, values)
        return values

    def refuse_counted(self, counted: Tensor, loss: Tensor) -> None:
        """Make the backward pass of a loss raise UserError if it counts places of padding. counted: (places,), bool."""
        if len(self.padding) and loss.requires_grad:
            num_read = counted[self.padding].sum()
            loss.register_hook(lambda grad: refuse_reading(num_read * (grad != 0)))

    def mark_read(self) -> None:
        """Note that rows were read, if their gradient does not come by the places."""
        self.memory.was_read |= torch.is_grad_enabled() and self.table.requires_grad


def _node_of(x: Tensor) -> Any:
    """Return the node that made it; None if torch raises because it is a view of what was changed in another mode."""
    try:
        return x.grad_fn
    except RuntimeError:
        return None


class _AtPlaces(torch.autograd.Function):
    """Values of rows at their places. Saves no tensor, so a checkpoint counts the same whenever this runs."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, spread: Spread) -> Tensor:
        ctx.set_materialize_grads(False)  # or rows that nothing read got zeros (DistributedDataParallel wants them)
        ctx.way_back = gradient_of_rows(spread)
        rows = spread.rows.view(spread.place_rows.shape)
        return functional.embedding(rows, values) if values.ndim == 2 else values[rows]

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None]:
        return None if grad is None else ctx.way_back(grad), None


def gradient_of_rows(spread: Spread) -> Callable[[Tensor], Tensor]:
    """Return a function that sums a gradient at the places for each row. It holds no tensor, not even `spread`."""
    place_rows, padding_row, num_rows = spread.place_rows, spread.padding_row, len(spread.table)

    def summed(grad: Tensor) -> Tensor:
        grad = grad.reshape(-1, *grad.shape[place_rows.ndim :])
        indices = place_rows.reshape(-1), np.flatnonzero(place_rows == padding_row)
        rows, padding = (torch.from_numpy(each).to(grad.device, non_blocking=True) for each in indices)
        check_unread(padding, grad)
        return sum_rows(grad, rows, num_rows)

    return summed


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
