"""Hidden states and logits of a padded batch as a small table, and which of its rows stands at each place.

    table  a b c    place_rows  0 1 2    stands for  a b c
                                0 1 0                a b a

What computes each row by itself (the head, a scale, a cast, a softmax) computes the rows of the table, and a view of
the batch is a view of `place_rows`. Cross-entropy reads the table too. Everything else gets the whole tensor, which is
made then, once, and is an ordinary tensor with an ordinary gradient.

A whole tensor that was changed in place, or whose gradient somebody wants (a hook, `retain_grad`), is what everything
reads from then on. Asked for after rows of the table were read, that gradient does not exist: a UserError.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from radixtrain.errors import UserError
from radixtrain.hf.padded.rows import check_gradient_at, check_unread, refuse_reading
from radixtrain.hf.sharing_report import SharingReport
from radixtrain.kernels.rows import gather_rows, sum_rows
from radixtrain.loss import logits_cross_entropy, logits_logprobs
from radixtrain.tree.arrays import IntArray

MIN_SAVING = 1.1  # rows asked for / rows computed: below this, the copies cost more than the head saves
NO_ROW = -1


class SpreadRows(Tensor):
    """(..., W): `table[place_rows]`, which is not computed until somebody needs it.

    table: (R, W). place_rows: (...), int64, on the host.
    padding_row: which row of the table stands at padding; NO_ROW without any.
    from_root: how this tensor comes from the whole one of `root`; None if it is no view.
    """

    table: Tensor
    place_rows: IntArray
    padding_row: int
    report: SharingReport
    root: SpreadRows | None
    from_root: Callable[[Tensor], Tensor] | None
    was_read: bool
    dense: Tensor | None
    device_rows: Tensor | None
    made_by: Any

    @classmethod
    def of(
        cls,
        table: Tensor,
        index: IntArray,
        padding_row: int,
        report: SharingReport,
        root: SpreadRows | None = None,
        from_root: Callable[[Tensor], Tensor] | None = None,
    ) -> SpreadRows:
        if not torch.is_grad_enabled():
            table = table.detach()  # what is made without gradients, such as a view as a target, has none later
        spread: SpreadRows = _Spread.apply(table, index, padding_row)
        spread.table, spread.place_rows, spread.padding_row, spread.report = table, index, padding_row, report
        spread.root, spread.from_root, spread.was_read = root, from_root, False
        spread.dense = spread.device_rows = None
        spread.made_by = spread.gradient_from
        return spread

    @property
    def gradient_from(self) -> Any:
        """The node that this tensor itself hands its gradient to; its table may know nothing of it."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.grad_fn

    @property
    def rows(self) -> Tensor:
        """(places,), int64. the index on the device of the table, flat."""
        if self.device_rows is None:
            rows = torch.from_numpy(self.place_rows.reshape(-1))
            self.device_rows = rows.to(self.table.device, non_blocking=True)
        return self.device_rows

    @property
    def is_current(self) -> bool:
        """Whether the table still says what the whole tensor is, and nobody wants the gradient of that.

        A function that returns us, as a reentrant checkpoint does, puts itself between us and the table. An inference
        tensor counts no changes.
        """
        if self.gradient_from is not self.made_by:
            return False
        made = [each.dense for each in (self, self.root) if each is not None and each.dense is not None]
        return not any(x.is_inference() or x._version or x._backward_hooks or x.retains_grad for x in made)

    def whole(self) -> Tensor:
        """The ordinary tensor, the same one every time."""
        if self.gradient_from is not self.made_by:
            with torch._C.DisableTorchFunctionSubclass():
                return self.clone()
        if self.dense is None:
            with torch.set_grad_enabled(self.table.requires_grad):
                if self.root is not None and self.from_root is not None:
                    self.dense = self.from_root(self.root.whole())
                else:
                    self.dense = self.placed(gather_rows(self.table, self.rows)).view(self.shape)
        return self.dense

    def placed(self, values: Tensor) -> Tensor:
        """The same values, (places, ...), whose gradient at padding has to be zero."""
        check_gradient_at(_padding_places(self.place_rows, self.padding_row, values.device), values)
        return values

    def mark_read(self) -> None:
        """Note that rows of the table were read, with gradients: that of the whole tensor does not come any more."""
        self.was_read = True
        if self.root is not None:
            self.root.was_read = True

    def refuse_counted(self, counted: Tensor, loss: Tensor) -> None:
        """Make the backward pass of a loss raise UserError if it counts places of padding. counted: (places,), bool."""
        padding = _padding_places(self.place_rows, self.padding_row, counted.device)
        if len(padding) and loss.requires_grad:
            num_read = counted[padding].sum()
            loss.register_hook(lambda grad: refuse_reading(num_read * (grad != 0)))

    def with_table(self, table: Tensor) -> SpreadRows:
        return self if table is self.table else SpreadRows.of(table, self.place_rows, self.padding_row, self.report)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        x, others = (args[0], args[1:]) if args else (None, ())
        rule = RULES.get(func)
        if rule is not None and type(x) is SpreadRows and x.is_current:
            found = rule(x, func, others, kwargs)
            if found is not NotImplemented:
                if torch.is_grad_enabled() and found is not x and rule is not _view:
                    x.mark_read()
                return found
        if func in WANTS_GRADIENT:
            _check_not_read(tree_leaves((args, kwargs)))
        args, kwargs = tree_map(lambda each: each.whole() if type(each) is SpreadRows else each, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Below autograd, of what calls an `autograd.Function` with us. `_Spread` is the way back of its gradient."""

        def values(x: Any) -> Any:
            return x.table.detach()[x.rows].view(x.shape) if type(x) is SpreadRows else x

        args, kwargs = tree_map(values, (args, kwargs or {}))
        return func(*args, **kwargs)


class _Spread(torch.autograd.Function):
    """The table as a tensor without memory of its own."""

    @staticmethod
    def forward(ctx: Any, table: Tensor, index: IntArray, padding_row: int) -> Tensor:
        ctx.index, ctx.padding_row, ctx.num_rows = index, padding_row, len(table)
        shape = (*index.shape, table.shape[1])
        return torch.Tensor._make_wrapper_subclass(SpreadRows, shape, dtype=table.dtype, device=table.device)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        grad = grad.whole() if type(grad) is SpreadRows else grad
        flat = grad.reshape(-1, grad.shape[-1])
        check_unread(_padding_places(ctx.index, ctx.padding_row, grad.device), flat)
        rows = torch.from_numpy(ctx.index.reshape(-1)).to(grad.device, non_blocking=True)
        return sum_rows(flat, rows, ctx.num_rows), None, None


def _padding_places(index: IntArray, padding_row: int, device: torch.device) -> Tensor:
    """int64. The places of padding, flat and ascending."""
    return torch.from_numpy(np.flatnonzero(index == padding_row)).to(device, non_blocking=True)


def _check_not_read(values: list[Any]) -> None:
    """Refuse what wants a gradient that no longer comes. torch's own hooks, of FSDP, wait for any gradient."""
    if any(callable(each) and str(getattr(each, "__module__", "")).startswith("torch.") for each in values):
        return
    if any(type(each) is SpreadRows and each.was_read for each in values):
        raise UserError(
            "share_prefixes computes the head and the loss once for equal rows, so their gradient at each place "
            "of the batch does not exist: register hooks, or call retain_grad, before they run; "
            "in place of torch.autograd.grad for hidden states, call restore_model(model)"
        )


# What is computed on the table. A rule returns NotImplemented if the call is one for the whole tensor.
Rule = Callable[[SpreadRows, Any, tuple[Any, ...], Mapping[str, Any]], Any]


def _by_row(x: SpreadRows, func: Any, others: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Each number by itself, or with a single other number, or with what stands at the same places."""
    for each in tree_leaves((others, kwargs)):
        if isinstance(each, Tensor) and each.ndim and not _stands_alike(each, x):
            return NotImplemented
    others, kwargs = tree_map(lambda each: each.table if type(each) is SpreadRows else each, (others, dict(kwargs)))
    return x.with_table(func(x.table, *others, **kwargs))


def _stands_alike(one: Tensor, other: SpreadRows) -> bool:
    if not isinstance(one, SpreadRows) or len(one.table) != len(other.table):
        return False
    return one.is_current and np.array_equal(one.place_rows, other.place_rows)


def _softmax(x: SpreadRows, func: Any, others: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    if (kwargs["dim"] if "dim" in kwargs else others[0] if others else None) not in (-1, x.ndim - 1):
        return NotImplemented
    return x.with_table(func(x.table, **{**kwargs, "dim": -1})) if len(others) < 2 else NotImplemented


def _linear(x: SpreadRows, func: Any, others: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The rows that are asked for, once each."""
    asked = x.place_rows.reshape(-1)
    is_asked = np.zeros(len(x.table), dtype=bool)
    is_asked[asked] = True
    rows = np.flatnonzero(is_asked)
    if len(asked) < MIN_SAVING * len(rows):
        return NotImplemented
    x.report.count_head(len(asked), len(rows))
    number = is_asked.cumsum() - 1
    table = x.table
    if len(rows) < len(table):
        table = gather_rows(table, torch.from_numpy(rows).to(table.device, non_blocking=True))
    has_padding = x.padding_row != NO_ROW and is_asked[x.padding_row]
    index = number[asked].reshape(x.place_rows.shape)
    padding_row = int(number[x.padding_row]) if has_padding else NO_ROW
    return SpreadRows.of(func(table, *others, **kwargs), index, padding_row, x.report)


def _view(x: SpreadRows, func: Any, others: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """A view of the places whose last axis is whole: found on the index, each entry of which is W equal ones."""
    if any(isinstance(each, Tensor | torch.dtype) for each in tree_leaves((others, kwargs))):
        return NotImplemented
    with _disable_current_modes():  # the index is ours: no mode counts or fakes what is done on it
        found = places = torch.from_numpy(x.place_rows)[..., None].expand(x.shape)
        if func is not Tensor.contiguous:
            found = func(places, *others, **kwargs)
        if not found.ndim or found.shape[-1] != x.shape[-1] or found.stride(-1) != 0:
            return NotImplemented
        index = found[..., 0].contiguous().numpy()
    root, earlier = x if x.root is None else x.root, x.from_root

    def view(whole: Tensor) -> Tensor:
        result: Tensor = func(whole if earlier is None else earlier(whole), *others, **kwargs)
        return result

    return SpreadRows.of(x.table, index, x.padding_row, x.report, root, view)


def _cross_entropy(x: SpreadRows, func: Any, others: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    given = dict(zip(("target", "weight"), others, strict=False)) | dict(kwargs)
    target, reduction, ignored = given["target"], given.get("reduction", "mean"), given.get("ignore_index", -100)
    if (
        (x.ndim, target.ndim) != (2, 1)
        or target.dtype != torch.int64
        or any(given.get(name) is not None for name in ("weight", "size_average", "reduce"))
        or given.get("label_smoothing")
        or len(target) != len(x.place_rows)
    ):
        return NotImplemented
    counted = target != ignored
    labels = target.masked_fill(~counted, 0)
    table = x.table
    if torch.is_autocast_enabled(x.device.type):  # it is one of those that autocast computes in float32
        table = table.to(torch.promote_types(x.dtype, torch.float32))
    if reduction == "none":
        return x.placed(-logits_logprobs(table, labels, x.rows)).masked_fill(~counted, 0).to(table.dtype)
    loss = logits_cross_entropy(table, labels, x.rows, counted)
    x.refuse_counted(counted, loss)
    return (loss / counted.sum() if reduction == "mean" else loss).to(table.dtype)


NEGATIVE = (Tensor.neg, Tensor.__neg__, torch.neg, Tensor.tanh, torch.tanh)
CASTS = (Tensor.float, Tensor.double, Tensor.to)
SUMS = (Tensor.add, Tensor.__add__, Tensor.__radd__, torch.add, Tensor.sub, Tensor.__sub__, torch.sub)
PRODUCTS = (Tensor.mul, Tensor.__mul__, Tensor.__rmul__, torch.mul, Tensor.div, Tensor.__truediv__, torch.div)
VIEWS = (
    *(Tensor.view, Tensor.reshape, Tensor.flatten, Tensor.__getitem__),
    *(Tensor.contiguous, Tensor.transpose, Tensor.unsqueeze, Tensor.expand),
)
SOFTMAX = (functional.log_softmax, torch.log_softmax, Tensor.log_softmax, functional.softmax, Tensor.softmax)
RULES: dict[Any, Rule] = {
    **dict.fromkeys((*NEGATIVE, *CASTS, *SUMS, *PRODUCTS), _by_row),
    **dict.fromkeys(SOFTMAX, _softmax),
    **dict.fromkeys(VIEWS, _view),
    functional.linear: _linear,
    functional.cross_entropy: _cross_entropy,
}
WANTS_GRADIENT = {Tensor.retain_grad, Tensor.register_hook, torch.autograd.grad}
GETTERS = ("shape", "dtype", "device", "ndim", "requires_grad", "is_leaf", "layout", "is_cuda", "is_sparse", "is_meta")
METADATA = {getattr(Tensor, name).__get__ for name in (*GETTERS, "is_nested", "is_quantized", "is_mkldnn")} | {
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, Tensor.is_complex, Tensor.is_inference),
    *(Tensor.__hash__, Tensor.__len__, Tensor.element_size, Tensor.get_device),
}
