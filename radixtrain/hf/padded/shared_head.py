"""The language-model head on unique rows: called on hidden rows that came from us, it computes each only once.

Heads of Hugging Face get the backbone's output or a slice of it (`logits_to_keep`), which is a view of the tensor that
we returned. So the place of every row that the head gets follows from the strides, which the host knows. Anything else,
such as rows that were selected, scaled or cast, goes to the head as it is.

The head reads the unique rows themselves, so its gradient does not pass through the hidden states in `[B, L, D]`. If
somebody wants that gradient, by a hook or `retain_grad`, the head computes every place. If it is asked for after the
head has run, or by `torch.autograd.grad`, the backward pass raises a UserError.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from radixtrain.errors import UserError
from radixtrain.hf.padded.rows import check_gradient_at
from radixtrain.hf.sharing_report import SharingReport
from radixtrain.kernels.rows import gather_rows
from radixtrain.tree.arrays import IntArray

__all__ = ["SharedHead", "keep_places", "places_of_view"]

MIN_SAVING = 1.1  # rows asked for / rows computed: below this, the copies cost more than the head saves
RETURNED, GATHERED = "_radixtrain_returned", "_radixtrain_gathered"  # attributes of tensors, freed with them


class _Returned(NamedTuple):
    """What stands at the places of hidden states that the backbone returned.

    version: of their memory; another one after a change in place.
    rows: (B L,), int64. the unique row at each place, num_rows at padding.
    table: (num_rows, D), or with one more row if there is padding: what stands at the places.
    wanted: whether somebody wants the gradient of what was returned; None if it has none.
    """

    version: int
    rows: IntArray
    num_rows: int
    table: Tensor
    wanted: _Wanted | None


class _Gathered(NamedTuple):
    """How the output of the head is put back.

    head: which gets them. A head inside it, as LoRA has one, has the same hooks.
    place_shape: of the places, without V.
    back: (places,), which of the rows each place reads.
    padding: the places of padding.
    """

    head: nn.Module
    place_shape: tuple[int, ...]
    back: Tensor
    padding: Tensor


class _Distinct(NamedTuple):
    """Each row that is asked for, once.

    rows: (R,). the rows, ascending.
    back: (places,). which of the R rows stands at each place.
    padding: the places of padding, all of which are one of the R rows.
    """

    rows: IntArray
    back: IntArray
    padding: IntArray

    @classmethod
    def of(cls, asked: IntArray, num_rows: int) -> _Distinct:
        """asked: (places,). the unique row at each place, num_rows at padding."""
        is_asked = np.zeros(num_rows + 1, dtype=bool)
        is_asked[asked] = True
        back = (is_asked.cumsum() - 1)[asked]
        return cls(np.flatnonzero(is_asked), back, np.flatnonzero(asked == num_rows))


class _Wanted:
    """Whether somebody wants the gradient of a tensor: a hook is registered on it, or it retains its gradient."""

    def __init__(self, x: Tensor):
        """Hooks outlive their tensor, so their dictionary is kept, and the tensor is not."""
        x.register_hook(_no_change)
        self.hooks: Mapping[int, Any] = x._backward_hooks or {}
        self.tensor = weakref.ref(x)

    def __bool__(self) -> bool:
        x = self.tensor()
        return any(hook is not _no_change for hook in self.hooks.values()) or (x is not None and x.retains_grad)


def _no_change(grad: Tensor) -> None:
    """A hook, so that a tensor has a dictionary of them."""


class SharedHead:
    """Hooks on the output embeddings. What they have to know about a call is an attribute of its tensors.

    So it cannot be mixed up by two calls before one backward pass, by a head in a checkpoint, or by several threads.
    """

    def __init__(self, report: SharingReport):
        self.report = report

    def watch(self, head: nn.Module | None) -> None:
        """Register the hooks on the head of a model, unless they are there. A head may be replaced at any time."""
        owners = () if head is None else (getattr(hook, "__self__", None) for hook in head._forward_pre_hooks.values())
        if head is not None and self not in owners:
            head.register_forward_pre_hook(self.before)
            head.register_forward_hook(self.after, prepend=True)

    @torch.compiler.disable
    def before(self, head: nn.Module, args: tuple[Any, ...]) -> tuple[Tensor, ...] | None:
        """Give the head each row once, [1, R, D]."""
        returned = _returned(args)
        places = None if returned is None else places_of_view(args[0])
        if returned is None or places is None:
            return None
        distinct = _Distinct.of(returned.rows[places], returned.num_rows)
        if len(places) < MIN_SAVING * len(distinct.rows):
            return None
        x: Tensor = args[0]
        needs_gradient = x.requires_grad and torch.is_grad_enabled()
        if needs_gradient and not _may_bypass(x, returned):
            return None
        self.report.num_head_places += len(places)
        self.report.num_head_rows += len(distinct.rows)
        rows, back, padding = (torch.from_numpy(each).to(x.device, non_blocking=True) for each in distinct)
        once = gather_rows(returned.table, rows)[None]
        if needs_gradient:
            once = _Bypass.apply(once, x, returned)
        setattr(once, GATHERED, _Gathered(head, tuple(x.shape[:-1]), back, padding))
        return once, *args[1:]

    @torch.compiler.disable
    def after(self, head: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Bring its rows, [1, R, V], back to the places that were asked for."""
        gathered: _Gathered | None = getattr(args[0], GATHERED, None) if args else None
        if gathered is None or gathered.head is not head:
            return None
        placed = gather_rows(output[0], gathered.back)
        check_gradient_at(gathered.padding, placed)
        return placed.view(*gathered.place_shape, -1)


def keep_places(hidden: Tensor, table: Tensor, rows: IntArray, num_rows: int) -> None:
    """Remember what stands at the places of hidden states, for the head, which gets them or a view of them.

    hidden: (B, L, D), a view of (B L, D). table: (num_rows, D), or with one more row for padding. rows: (B L,), int64.
    """
    placed = hidden._base
    if placed is not None and not hidden.is_inference():  # such a tensor does not know whether it was changed in place
        wanted = _Wanted(hidden) if hidden.requires_grad else None
        setattr(placed, RETURNED, _Returned(placed._version, rows, num_rows, table, wanted))


def _may_bypass(x: Tensor, returned: _Returned) -> bool:
    """Whether the head may take its rows from the table: nobody wants their gradient at the places so far.

    A checkpoint that runs again gives a leaf of its own, whose gradient it passes on.
    """
    return x.grad_fn is not None and returned.table.grad_fn is not None and not returned.wanted and not _Wanted(x)


class _Bypass(torch.autograd.Function):
    """The rows of the table, (1, R, D), for the head in place of x, which gets no gradient."""

    @staticmethod
    def forward(ctx: Any, once: Tensor, x: Tensor, returned: _Returned) -> Tensor:
        ctx.wanted = returned.wanted, _Wanted(x)
        ctx.table = returned.table.grad_fn
        return once.view_as(once)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        # `torch.autograd.grad(loss, hidden)` does not go on to the table.
        if any(ctx.wanted) or not torch._C._will_engine_execute_node(ctx.table):
            raise UserError(
                "share_prefixes computes the head once for equal hidden states, so their gradient at each place of the "
                "batch does not exist: register hooks, or call retain_grad, before the head runs; in place of "
                "torch.autograd.grad for hidden states, call restore_model(model)"
            )
        return grad, None, None


def _returned(args: tuple[Any, ...]) -> _Returned | None:
    """What stands in the memory of which the head's input is a view; None if it is not ours, or was changed."""
    if not args or not isinstance(args[0], Tensor) or args[0].is_inference() or not args[0].numel():
        return None
    owner = args[0] if args[0]._base is None else args[0]._base
    returned: _Returned | None = getattr(owner, RETURNED, None)
    same = returned is not None and args[0].dtype == owner.dtype and owner._version == returned.version
    return returned if same else None


def places_of_view(x: Tensor) -> IntArray | None:
    """The rows of the memory, (B L, D), that a view of it consists of, flat; None if it cuts through D."""
    owner = x if x._base is None else x._base
    width = owner.shape[-1]
    offset = x.storage_offset() - owner.storage_offset()
    is_whole = all(step % width == 0 for step in (offset, *x.stride()[:-1]))
    if x.ndim < 2 or x.shape[-1] != width or x.stride(-1) != 1 or not is_whole:
        return None
    places = np.full((1,) * (x.ndim - 1), offset // width)
    for axis, (size, stride) in enumerate(zip(x.shape[:-1], x.stride()[:-1], strict=True)):
        steps = np.arange(size) * (stride // width)
        places = places + steps.reshape([-1 if each == axis else 1 for each in range(x.ndim - 1)])
    return places.reshape(-1)
