"""Hidden states and logits of a padded batch as a small table, and which of its rows stands at each place.

    table  a b c    place_rows  0 1 2    stands for  a b c
                                0 1 0                a b a

What computes each row by itself (the head, a scale, a cast, a softmax) computes the rows of the table, and a view of
the batch is a view of `place_rows`. What has one number for each row (cross-entropy, the log-probability of a label)
computes it once, and puts it at the places.

Everything else gets the ordinary tensor. It is made then, once, and takes the place of the lazy one: the same Python
object is a `torch.Tensor` from then on. What came from it and is still lazy comes again from the ordinary one, by the
same function in the modes of that time: a view is a view of it, and a copy is a copy, before anything is written.

If rows of the table were read, the gradient at each place does not exist. The lazy tensor then stays in front of the
ordinary one, to raise a UserError when that gradient is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple
from weakref import ref

import numpy as np
import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd.graph import saved_tensors_hooks
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
CHANGED = "one of the variables needed for gradient computation has been modified by an inplace operation"
Args, Kwargs = tuple[Any, ...], Mapping[str, Any]


def is_kept() -> bool:
    """Whether somebody keeps what is saved for the backward pass: a checkpoint, which counts it in both passes."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def version_of(x: Tensor) -> int:
    """How often x was changed in place."""
    return 0 if x.is_inference() else x._version


class Modes(NamedTuple):
    """What a function of torch computes depends on these."""

    grad: bool
    inference: bool
    device: str
    autocast: bool
    dtype: torch.dtype
    is_kept: bool

    @classmethod
    def now(cls, device: str) -> Modes:
        casts, dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
        return cls(torch.is_grad_enabled(), torch.is_inference_mode_enabled(), device, casts, dtype, is_kept())

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Under these, nothing counts, fakes, traces, transforms or keeps what is done."""
        with (
            _disable_current_modes(),
            temporarily_clear_interpreter_stack(),
            saved_tensors_hooks(torch.clone, torch.clone) if self.is_kept or is_kept() else nullcontext(),
            torch.inference_mode(self.inference),
            torch.set_grad_enabled(self.grad),
            torch.autocast(self.device, self.dtype, self.autocast, cache_enabled=False),
        ):
            yield


@dataclass(eq=False)
class Spread:
    """What a lazy tensor stands for: `table[place_rows]`.

    table: (R, W). place_rows: (...), int64, on the host.
    padding_row: which row of the table stands at padding; NO_ROW without any.
    shaped: (..., W). the ordinary tensor without its numbers, on the meta device: its strides and what it is a view of.
    memory: (places,), int64. the rows in the memory of which it is a view; by default in its own.
    logsumexps: of the rows of the table, in the modes in which they were computed.
    source, func: the lazy tensor that it comes from, and how; None if it comes from no other.
    became: the ordinary tensor of the memory, once there is one.
    """

    table: Tensor
    place_rows: IntArray
    padding_row: int
    report: SharingReport
    shaped: Tensor = field(default=None)  # type: ignore[assignment]
    memory: IntArray = field(default=None)  # type: ignore[assignment]
    logsumexps: dict[Modes, Tensor] = field(default_factory=dict)
    source: SpreadRows | None = None
    func: Callable[[Tensor], Tensor] | None = None
    derived: list[ref[SpreadRows]] = field(default_factory=list, init=False)
    dense: Tensor | None = field(default=None, init=False)
    was_read: bool = field(default=False, init=False)
    held: int | None = field(default=None, init=False)
    dense_by: Any = field(default=None, init=False)
    became: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.modes = Modes.now(self.table.device.type)
        if not self.modes.grad:  # what is made without gradients, such as a target, passes none on later
            is_view = self.shaped is not None and self.shaped._is_view()
            self.table = self.table.detach().requires_grad_(is_view and self.table.requires_grad)
            self.logsumexps = {}
        if self.shaped is None:
            shape = *self.place_rows.shape, self.table.shape[1]
            with _disable_current_modes():
                self.shaped = torch.empty(shape, dtype=self.table.dtype, device="meta")
        if self.memory is None:
            self.memory = self.place_rows.reshape(-1)

    @cached_property
    def rows(self) -> Tensor:
        """(places,), int64. the index on the device of the table, flat."""
        return self.on_device(self.place_rows.reshape(-1))

    @cached_property
    def padding(self) -> Tensor:
        """int64. The places of padding, flat and ascending."""
        return self.on_device(np.flatnonzero(self.place_rows == self.padding_row))

    @cached_property
    def asked_rows(self) -> IntArray:
        """Which rows of the table stand at some place, ascending."""
        is_asked = np.zeros(len(self.table), dtype=bool)
        is_asked[self.place_rows] = True
        return np.flatnonzero(is_asked)

    def on_device(self, index: IntArray) -> Tensor:
        with torch.inference_mode(False):
            return torch.from_numpy(index).to(self.table.device, non_blocking=True)

    def with_asked_rows(self) -> Spread:
        """The same with no row in its table that stands nowhere."""
        rows = self.asked_rows
        if len(rows) == len(self.table):
            return self
        number = np.full(len(self.table) + 1, NO_ROW)
        number[rows] = np.arange(len(rows))
        table = gather_rows(self.table, self.on_device(rows))
        return Spread(table, number[self.place_rows], int(number[self.padding_row]), self.report)

    def shape_by(self, func: Any, others: Args, kwargs: Kwargs) -> Any:
        """What the ordinary tensor gives, without its numbers; NotImplemented for an error."""
        with self.modes._replace(grad=False, inference=False).entered():
            try:
                return func(self.shaped, *others, **kwargs)
            except (RuntimeError, IndexError, TypeError, ValueError):
                return NotImplemented

    def at_places(self, values: Tensor) -> Tensor:
        """(..., ...). An ordinary tensor of values of the rows, (R, ...)."""
        found: Tensor = _AtPlaces.apply(values, self, None)
        return found

    def placed(self, values: Tensor) -> Tensor:
        """The same values, one or several for each place, whose gradient at padding has to be zero."""
        check_gradient_at(self.padding, values)
        return values

    def refuse_counted(self, counted: Tensor, loss: Tensor) -> None:
        """The backward pass of a loss raises UserError if it counts places of padding. counted: (places,), bool."""
        if len(self.padding) and loss.requires_grad:
            num_read = counted[self.padding].sum()
            loss.register_hook(lambda grad: refuse_reading(num_read * (grad != 0)))

    def needed_by(self, found: Tensor) -> Tensor:
        """The same, whose backward pass raises torch's own error if we, whom it needs, have been changed."""

        def check(grad: Tensor) -> None:
            if became and version_of(became[0]):
                raise RuntimeError(CHANGED)

        became = self.became
        if found.requires_grad:
            found.register_hook(check)
        return found

    def mark_read(self, inside: bool = False) -> None:
        """Rows were read with gradients: what comes at the places, here and in what this comes from, is not all.

        inside: by a function of the user's, which torch runs without gradients.
        """
        if (inside or torch.is_grad_enabled()) and self.table.requires_grad:
            each: Any = self
            while each is not None:
                each.was_read = True
                each = getattr(each.source, "spread", None)

    def made_dense(self) -> Tensor:
        with self.modes._replace(grad=self.table.requires_grad, inference=self.table.is_inference()).entered():
            return self.at_places(self.table)


class SpreadRows(Tensor):
    """(..., W): an ordinary tensor, as long as nobody needs more of it than `spread` says."""

    spread: Spread
    made_by: Any

    @classmethod
    def of(cls, *spread: Any, **further: Any) -> SpreadRows:
        made = Spread(*spread, **further)
        with made.modes._replace(inference=made.table.is_inference()).entered():
            found: SpreadRows = _AtPlaces.apply(made.table, made, made.shaped)
        with torch._C.DisableTorchFunctionSubclass():
            found.requires_grad_(made.table.requires_grad)  # as a view has it under no_grad
        found.spread, found.made_by = made, found.node
        if made.source is not None:
            made.source.spread.derived.append(ref(found))
        return found

    @property
    def node(self) -> Any:
        """What gets our gradient."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.grad_fn

    @property
    def is_held(self) -> bool:
        """Whether a function of the user's has us as an argument, or saved us for its backward pass."""
        return self._use_count() > 1

    @property
    def is_lazy(self) -> bool:
        """Whether functions may read the table.

        No more if a function of the user's returned us, and gets our gradient. In a checkpoint they do again what they
        did before.
        """
        spread = self.spread
        if torch._C._are_functorch_transforms_active() or self.node is not self.made_by:
            return False
        return spread.dense is None or (spread.was_read and not version_of(spread.dense) and is_kept())

    def whole(self) -> Tensor:
        """The ordinary tensor. That is this object from now on, unless the module's last paragraph says otherwise."""
        spread, source = self.spread, self.spread.source
        if self.node is not self.made_by:
            self.made_by, spread.source = self.node, None
            if type(source) is SpreadRows:
                source.spread.derived = [each for each in source.spread.derived if each() is not self]
            with spread.modes._replace(grad=True).entered(), torch._C.DisableTorchFunctionSubclass():
                self._settle(self.clone())
        elif spread.dense is None and source is not None:
            source.whole()  # which makes ours
        else:
            self._settle(spread.made_dense() if spread.dense is None else spread.dense)
        return spread.dense if type(self) is SpreadRows else self

    def _settle(self, dense: Tensor) -> None:
        """Be this tensor if we can; and what came from us comes from it."""
        spread, spread.dense = self.spread, dense
        spread.dense_by = dense.grad_fn if spread.dense_by is None else spread.dense_by
        if self.is_held:
            spread.held = version_of(dense) if spread.held is None else spread.held
            if version_of(dense) != spread.held and torch._C._current_graph_task_id() >= 0:
                raise RuntimeError(CHANGED)
        elif not spread.was_read or dense.grad_fn is not spread.dense_by:
            dense = self._become(dense)
        spread.became[:] = spread.became or [dense]
        derived, spread.derived = [each() for each in spread.derived], []  # a tensor with a weak reference stays itself
        for each in derived:
            if each is not None and each.node is each.made_by:
                with each.spread.modes.entered():
                    found = each.spread.func(dense)
                each.spread.source = None
                each._settle(found)

    def _become(self, dense: Tensor) -> Tensor:
        """This object as the ordinary tensor, with the attributes that others set; `dense` if torch cannot do it."""
        spread, spread.dense = self.spread, None
        mine = {name: value for name, value in self.__dict__.items() if name not in ("spread", "made_by")}
        try:
            torch.utils.swap_tensors(self, dense)
        except RuntimeError:
            spread.dense = dense
            return dense
        self.__dict__.update(mine)
        spread.became[:] = [self if each is dense else each for each in spread.became]
        return self

    @classmethod
    @torch.compiler.disable  # so that the compiler gets ordinary tensors
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        x, rule = args[0] if args else None, RULES.get(func)
        if type(x) is SpreadRows and x.is_held:
            x.spread.mark_read(inside=True)
        if type(x) is SpreadRows and rule is not None and x.is_lazy:
            found = rule(x, func, args[1:], kwargs)
            if found is not NotImplemented:
                return found
        if func in WANTS_GRADIENT:
            _check_not_read(func, args, kwargs)
        ours = [each for each in tree_leaves((args, kwargs)) if type(each) is SpreadRows]
        args, kwargs = tree_map(lambda each: each.whole() if type(each) is SpreadRows else each, (args, kwargs))
        found = func(*args, **kwargs)
        for each in (each for each in ours if type(each) is SpreadRows):
            found = each if found is each.spread.dense else found
            each.whole()  # if it was changed, its gradient is another one, which exists
        return found

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Below autograd, of what calls an `autograd.Function` with us. `_AtPlaces` is the way back of its gradient."""

        def values(x: Any) -> Any:
            if type(x) is not SpreadRows:
                return x
            spread = x.spread
            return spread.table.detach()[spread.rows].view(x.shape) if spread.dense is None else spread.dense.detach()

        args, kwargs = tree_map(values, (args, kwargs or {}))
        return func(*args, **kwargs)


class _AtPlaces(torch.autograd.Function):
    """Rows at their places: a lazy tensor of this shape, without memory of its own; or an ordinary one.

    It saves nothing, so that a checkpoint finds as many tensors whenever this runs.
    """

    @staticmethod
    def forward(ctx: Any, table: Tensor, spread: Spread, shaped: Tensor | None) -> Tensor:
        ctx.place_rows, ctx.padding_row, ctx.num_rows = spread.place_rows, spread.padding_row, len(table)
        if shaped is None:
            rows = spread.rows.view(spread.place_rows.shape)
            return functional.embedding(rows, table) if table.ndim == 2 else table[rows]
        layout = {"strides": shaped.stride(), "storage_offset": shaped.storage_offset()}
        return Tensor._make_wrapper_subclass(SpreadRows, shaped.shape, dtype=table.dtype, device=table.device, **layout)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        grad = grad.whole() if type(grad) is SpreadRows else grad
        grad = grad.reshape(-1, *grad.shape[ctx.place_rows.ndim :])
        rows = torch.from_numpy(ctx.place_rows.reshape(-1)).to(grad.device, non_blocking=True)
        padding = torch.from_numpy(np.flatnonzero(ctx.place_rows == ctx.padding_row)).to(grad.device, non_blocking=True)
        check_unread(padding, grad)
        return sum_rows(grad, rows, ctx.num_rows), None, None


def _check_not_read(func: Any, args: Args, kwargs: Kwargs) -> None:
    """Refuse what wants a gradient that no longer comes. torch's own hooks, of FSDP, wait for any gradient."""
    wanted = tree_leaves(kwargs.get("inputs", args[1:2]) if func is torch.autograd.grad else (args, kwargs))
    if any(callable(each) and str(getattr(each, "__module__", "")).startswith("torch.") for each in wanted):
        return
    if any(type(each) is SpreadRows and (each.spread.was_read or each.is_held) for each in wanted):
        raise UserError(
            "share_prefixes computes the head and the loss once for equal rows, so their gradient at each place "
            "of the batch does not exist: register hooks, or call retain_grad, before they run; "
            "in place of torch.autograd.grad for hidden states, call restore_model(model)"
        )


# What is computed on the table. A rule returns NotImplemented if the call is one for the whole tensor.
Rule = Callable[[SpreadRows, Any, Args, Kwargs], Any]


def _by_row(x: SpreadRows, func: Any, others: Args, kwargs: Kwargs) -> Any:
    """Each number by itself, or with a Python number. A few rows of a large table are not worth its gradient."""
    others = tuple(each for each in others if not (isinstance(each, torch.device) and each == x.device))
    if func is Tensor.to and not others and not kwargs:
        return x
    spread, shaped = x.spread, x.spread.shape_by(func, others, kwargs)
    is_plain = all(isinstance(each, int | float | torch.dtype | None) for each in tree_leaves((others, kwargs)))
    if not is_plain or not isinstance(shaped, Tensor) or not shaped.is_contiguous():
        return NotImplemented
    if 2 * len(spread.asked_rows) < len(spread.table):
        if x.requires_grad and torch.is_grad_enabled():
            return NotImplemented
        spread = spread.with_asked_rows()
    table = func(spread.table, *others, **kwargs)
    if table is x.spread.table:
        return x
    again = {"source": x, "func": lambda whole: func(whole, *others, **kwargs)}
    found = SpreadRows.of(table, spread.place_rows, spread.padding_row, spread.report, **again)
    if func in KEEPS_RESULT and not is_kept():
        found.spread.needed_by(table)
    return found


def _is_last(x: SpreadRows, others: Args, kwargs: Kwargs) -> bool:
    """Whether the axis is that of the numbers of a row, and no other option changes the shape."""
    given = {**dict(zip(("dim", "?"), others, strict=False)), **kwargs}
    return given.get("dim") in (-1, x.ndim - 1) and not given.keys() - {"dim", "dtype", "_stacklevel"}


def _softmax(x: SpreadRows, func: Any, others: Args, kwargs: Kwargs) -> Any:
    return _by_row(x, func, (), {**kwargs, "dim": -1}) if _is_last(x, others, kwargs) else NotImplemented


def _linear(x: SpreadRows, func: Any, others: Args, kwargs: Kwargs) -> Any:
    """The rows that are asked for, once each."""
    spread, num_places = x.spread, x.spread.place_rows.size
    if num_places < MIN_SAVING * len(spread.asked_rows):
        return NotImplemented
    spread.report.count_head(num_places, len(spread.asked_rows))
    spread.mark_read()
    asked = spread.with_asked_rows()
    table = func(asked.table, *others, **kwargs)
    if table.dtype == x.dtype and (x.ndim == 2 or x.is_contiguous()):  # else torch keeps a copy
        spread.needed_by(table)
    return SpreadRows.of(table, asked.place_rows, asked.padding_row, spread.report)


def _view(x: SpreadRows, func: Any, others: Args, kwargs: Kwargs) -> Any:
    """A view whose last axis is that of x, or several; or a copy of all of x in the same order."""
    if any(isinstance(each, Tensor | torch.dtype) for each in tree_leaves((others, kwargs))):
        return NotImplemented
    shaped = x.spread.shape_by(func, others, kwargs)
    if isinstance(shaped, tuple):
        again = [lambda whole, n=n: func(whole, *others, **kwargs)[n] for n in range(len(shaped))]
        parts = [_part(x, func, *each) for each in zip(shaped, again, strict=True)]
        return NotImplemented if any(each is NotImplemented for each in parts) else tuple(parts)
    return x if shaped is x.spread.shaped else _part(x, func, shaped, lambda whole: func(whole, *others, **kwargs))


def _part(x: SpreadRows, func: Any, shaped: Any, again: Callable[[Tensor], Tensor]) -> Any:
    """What has the strides of `shaped` in the memory of x, each step of which has to be one of whole rows."""
    spread, width = x.spread, x.shape[-1]
    if shaped is NotImplemented or not shaped.numel() or shaped.shape[-1:] != (width,):
        return NotImplemented
    same = {"logsumexps": spread.logsumexps, "source": x, "func": again}
    if not shaped._is_view():
        if func not in COPIES:
            return NotImplemented
        index = spread.place_rows.reshape(shaped.shape[:-1])
    else:
        steps = [0 if size == 1 else step for size, step in zip(shaped.shape, shaped.stride(), strict=True)]
        start = shaped.storage_offset()
        if steps.pop() != 1 or any(step % width for step in (*steps, start)):
            return NotImplemented
        inside = spread.memory[start // width :]
        byte_steps = [step // width * inside.itemsize for step in steps]
        index = np.lib.stride_tricks.as_strided(inside, shaped.shape[:-1], byte_steps, writeable=False).copy()
        same |= {"shaped": shaped, "memory": spread.memory, "became": spread.became}
    return SpreadRows.of(spread.table, index, spread.padding_row, spread.report, **same)


def _iter(x: SpreadRows, func: Any, others: Args, kwargs: Kwargs) -> Any:
    return iter(x.unbind()) if x.ndim > 1 else NotImplemented


def _logsumexp(x: SpreadRows, func: Any, others: Args, kwargs: Kwargs) -> Any:
    """Computed once for the table, as TRL asks for one row of the batch after the other."""
    if not _is_last(x, others, kwargs):
        return NotImplemented
    spread, modes = x.spread, Modes.now(x.device.type)
    spread.mark_read()
    known = {} if is_kept() else spread.logsumexps
    if modes not in known:
        known[modes] = func(spread.table, -1)
    return spread.needed_by(spread.at_places(known[modes]))


def _gather(x: SpreadRows, func: Any, others: Args, kwargs: Kwargs) -> Any:
    """Some numbers of each row, such as the log-probabilities of labels."""
    given = dict(zip(("dim", "index"), others, strict=False)) | dict(kwargs)
    index = given.get("index")
    if given.keys() != {"dim", "index"} or given["dim"] not in (-1, x.ndim - 1) or type(index) is not Tensor:
        return NotImplemented
    if index.dtype != torch.int64 or index.shape[:-1] != x.shape[:-1] or index.ndim != x.ndim:
        return NotImplemented
    is_outside = (index < 0) | (index >= x.shape[-1])
    if index.device.type == "cpu" and is_outside.any():
        return NotImplemented  # torch's own error; another device has an assertion
    x.spread.mark_read()
    rows = x.spread.rows.view(*x.shape[:-1], 1).expand(index.shape)
    found = x.spread.table[rows, index.masked_fill(is_outside, x.shape[-1])]
    if found.requires_grad:
        found.register_hook(lambda grad: check_unread(x.spread.padding, grad.reshape(len(x.spread.rows), -1)))
    return found


def _cross_entropy(x: SpreadRows, func: Any, others: Args, kwargs: Kwargs) -> Any:
    given = dict(zip(("target", "weight"), others, strict=False)) | dict(kwargs)
    target, reduction, ignored = given.get("target"), given.get("reduction", "mean"), given.get("ignore_index", -100)
    if (
        type(target) is not Tensor
        or (x.ndim, target.ndim) != (2, 1)
        or target.dtype != torch.int64
        or any(given.get(name) is not None for name in ("weight", "size_average", "reduce"))
        or given.get("label_smoothing")
        or len(target) != len(x)
        or reduction not in ("mean", "sum", "none")
    ):
        return NotImplemented
    x.spread.mark_read()
    few = 2 * len(x.spread.asked_rows) < len(x.spread.table)
    spread = x.spread.with_asked_rows() if few else x.spread
    counted = target != ignored
    labels = target.masked_fill(~counted, 0)
    table = spread.table
    if torch.is_autocast_enabled(x.device.type):  # it is one of those that autocast computes in float32
        table = table.to(torch.promote_types(x.dtype, torch.float32))
    if reduction == "none":
        return spread.placed(-logits_logprobs(table, labels, spread.rows)).masked_fill(~counted, 0).to(table.dtype)
    loss = logits_cross_entropy(table, labels, spread.rows, counted)
    spread.refuse_counted(counted, loss)
    return (loss / counted.sum() if reduction == "mean" else loss).to(table.dtype)


def functions(*names: str) -> list[Any]:
    """These of Tensor, and those of the same name in torch and torch.nn.functional."""
    return [getattr(room, name) for name in names for room in (Tensor, torch, functional) if hasattr(room, name)]


COPIES = {*functions("reshape", "flatten"), Tensor.contiguous}
VIEWS = functions("view", "__getitem__", "transpose", "unsqueeze", "expand", "unbind", "split", "chunk")
CASTS = functions("float", "double", "to", "neg", "__neg__")
SOFTMAX = functions("log_softmax", "softmax")
KEEPS_RESULT = {*functions("tanh", "exp"), *SOFTMAX}  # for the backward pass
PRODUCTS = functions("mul", "__mul__", "__rmul__", "div", "__truediv__")
RULES: dict[Any, Rule] = {
    **dict.fromkeys([*CASTS, *PRODUCTS, *KEEPS_RESULT], _by_row),
    **dict.fromkeys(SOFTMAX, _softmax),
    **dict.fromkeys([*COPIES, *VIEWS], _view),
    **dict.fromkeys(functions("logsumexp"), _logsumexp),
    **dict.fromkeys(functions("gather"), _gather),
    Tensor.__iter__: _iter,
    functional.linear: _linear,
    functional.cross_entropy: _cross_entropy,
}
WANTS_GRADIENT = {Tensor.retain_grad, Tensor.register_hook, torch.autograd.grad, Tensor.grad_fn.__get__}
GETTERS = ("shape", "dtype", "device", "ndim", "requires_grad", "is_leaf", "layout", "is_cuda", "is_sparse", "is_meta")
METADATA = {getattr(Tensor, name).__get__ for name in (*GETTERS, "is_nested", "is_quantized", "is_mkldnn")} | {
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, Tensor.is_complex, Tensor.is_inference),
    *(Tensor.__hash__, Tensor.__len__, Tensor.element_size, Tensor.get_device, Tensor.stride, Tensor.is_contiguous),
}
