"""Hidden states and logits of a padded batch as a small table, and which of its rows is at each place.

    table  a b c    place_rows  0 1 2    stands for  a b c
                                0 1 0                a b a

One rule: the functions of a short list compute with the table (`row_functions.py`). Every other one, an
`autograd.Function` too, gets the ordinary tensor, which is made then, once, in the modes of the lazy one. So are those
of all its views, each as a view of it. From then on they answer in place of the lazy ones. Code that torch does not
ask about its arguments, below autograd or in C++, is refused.

If rows of the table were read with gradients, the gradient at each place does not exist: requesting it is refused too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache, cached_property
from types import MethodType
from typing import Any, NamedTuple, NoReturn
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor
from torch._functorch import utils
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd import Function
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.hooks import RemovableHandle

from radixtrain.errors import UserError
from radixtrain.hf.padded.places import NO_ROW, at_places
from radixtrain.hf.padded.row_functions import RULES
from radixtrain.hf.sharing_report import SharingReport
from radixtrain.kernels.rows import gather_rows
from radixtrain.tree.arrays import IntArray

BELOW = (
    "shared hidden states or logits reach code that torch does not ask about its arguments, in a torch.func transform, "
    "in C++, or an `apply` of an autograd.Function that was taken before radixtrain was imported: clone them before it"
)


class Modes(NamedTuple):
    """The modes of torch in which a tensor is made."""

    grad: bool
    inference: bool

    @classmethod
    def now(cls) -> Modes:
        return cls(torch.is_grad_enabled(), torch.is_inference_mode_enabled())

    @contextmanager
    def entered(self, x: Tensor | None = None) -> Iterator[None]:
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


class SpreadRows(Tensor):
    """`table[place_rows]`, (..., W), which everybody sees as an ordinary tensor.

    table: (R, W). place_rows: (...), int64, on the host.
    padding_row: which row of the table stands at padding; NO_ROW without any.
    base: what it is a view of, maybe a view too; None for what has the whole memory. views: of that memory, by id.
    modes: in which it was made. made_by: its node then.
    dense: the ordinary tensor, once there is one. dense_node: its node when it was made.
    was_read: functions read the table with gradients, so that those at the places are not complete. Of the base.
    """

    table: Tensor
    place_rows: IntArray
    padding_row: int
    report: SharingReport
    base: SpreadRows | None
    views: WeakValueDictionary[int, SpreadRows]
    modes: Modes
    made_by: Any
    dense: Tensor | None = None
    dense_node: Any = None
    was_read: bool = False

    @classmethod
    def of(
        cls,
        table: Tensor,
        place_rows: IntArray,
        padding_row: int,
        report: SharingReport,
        shaped: Tensor | None = None,
        base: SpreadRows | None = None,
    ) -> SpreadRows:
        """Represent the rows of a table at these places.

        shaped, base: of a view. Arguments: as the attributes of this class.
        """
        give_functions_ordinary_tensors()
        modes = Modes.now()
        if not modes.grad:
            table = table.detach()
        memory: tuple[Any, ...] = (*place_rows.shape, table.shape[1]), None, None
        if shaped is not None:
            memory = shaped.shape, shaped.stride(), shaped.storage_offset()
        with modes.entered(table):
            found: SpreadRows = _Lazy.apply(table, *memory)
        found.table, found.place_rows, found.padding_row, found.report = table, place_rows, padding_row, report
        found.base, found.modes, found.made_by = base, modes, found.node
        if shaped is not None:
            found.shaped = shaped
        found.views = WeakValueDictionary() if base is None else base.views
        found.views[id(found)] = found
        return found

    def with_table(self, table: Tensor) -> SpreadRows:
        """Represent what a function has made of each row of the table."""
        return SpreadRows.of(table, self.place_rows, self.padding_row, self.report)

    def at(self, place_rows: IntArray, shaped: Tensor | None = None) -> SpreadRows:
        """Represent rows of the same table at other places: a copy, or a view that looks like `shaped`."""
        base = None if shaped is None else self
        return SpreadRows.of(self.table, place_rows, self.padding_row, self.report, shaped, base)

    def with_asked_rows(self) -> SpreadRows:
        """Drop the rows that stand at no place."""
        rows = self.asked_rows
        if len(rows) == len(self.table):
            return self
        number = np.full(len(self.table) + 1, NO_ROW)
        number[rows] = np.arange(len(rows))
        table = gather_rows(self.table, self._on_device(rows))
        return SpreadRows.of(table, number[self.place_rows], int(number[self.padding_row]), self.report)

    @cached_property
    def shaped(self) -> Tensor:
        """Return the ordinary tensor without its numbers, on the meta device: its strides, whether it is a view."""
        return torch.empty(*self.place_rows.shape, self.table.shape[1], dtype=self.table.dtype, device="meta")

    @property
    def memory(self) -> SpreadRows:
        """Return that with the whole memory."""
        return self if self.base is None else self.base.memory

    @property
    def node(self) -> Any:
        """Return the node that gets our gradient."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.grad_fn

    @cached_property
    def rows(self) -> Tensor:
        """Return the rows of the places, flat, as an index on the device of the table, (places,), int64."""
        return self._on_device(self.place_rows.reshape(-1))

    @cached_property
    def padding(self) -> Tensor:
        """Return the places of padding, flat and ascending, int64."""
        return self._on_device(np.flatnonzero(self.place_rows == self.padding_row))

    @cached_property
    def asked_rows(self) -> IntArray:
        """Return which rows of the table stand at some place, ascending."""
        is_asked = np.zeros(len(self.table), dtype=bool)
        is_asked[self.place_rows] = True
        return np.flatnonzero(is_asked)

    @property
    def asks_few(self) -> bool:
        return 2 * len(self.asked_rows) < len(self.table)

    def _on_device(self, index: IntArray) -> Tensor:
        with torch.inference_mode(False):
            return torch.from_numpy(index).to(self.table.device, non_blocking=True)

    @property
    def is_lazy(self) -> bool:
        """Return whether functions may read the table. In a checkpoint they repeat what they did before."""
        memory = self.memory
        if torch._C._are_functorch_transforms_active():
            return False
        if self.table.is_inference() and torch.is_grad_enabled():
            return False  # if it is an error, torch raises its own
        return memory.dense is None or (memory.was_read and not memory.dense._version and is_checkpointed())

    @property
    def has_no_gradient(self) -> bool:
        """Return whether the gradient at the places does not exist. One that was changed in place has another."""
        return self.memory.was_read and (self.dense is None or _node_of(self.dense) is self.dense_node)

    def mark_read(self) -> None:
        """Note that rows were read, if their gradient does not come by the places."""
        self.memory.was_read |= torch.is_grad_enabled() and self.table.requires_grad

    def whole(self) -> Tensor:
        """Return the ordinary tensor."""
        for each in (self.memory, *self.views.values()):
            if each.dense is None:
                each._make_dense()
        assert self.dense is not None
        return self.dense

    def _make_dense(self) -> None:
        """Make the ordinary tensor: of the whole memory from the table, and a view from what it is a view of."""
        with self.modes.entered(self.table):
            if self.base is None:
                self.dense = at_places(self.table, self.rows.view(self.place_rows.shape), self.padding)
            else:
                viewed: Any = self.base.dense  # made before: `views` are in the order in which they were taken
                shaped = self.shaped
                self.dense = viewed.as_strided(shaped.shape, shaped.stride(), shaped.storage_offset())
        self.dense_node = _node_of(self.dense)

    def __hash__(self) -> int:
        return id(self)

    @classmethod
    @torch.compiler.disable  # so that the compiler gets ordinary tensors
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in METADATA and args[0].dense is None:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        ours = [each for each in tree_leaves((args, kwargs)) if type(each) is SpreadRows]
        for each in ours:
            _check_is_ours(each)
        first = args[0] if args and type(args[0]) is SpreadRows else None
        if func in LATE and first is not None and first.has_no_gradient:
            return LATE[func](*args)
        if func is torch.autograd.grad:
            _check_not_read(kwargs.get("inputs", args[1:2]))
        found = NotImplemented
        # A further lazy argument becomes ordinary in the function, and with it perhaps the one whose table is read.
        if func in RULES and first is not None and len(ours) == 1 and first.is_lazy:
            found = RULES[func](first, func, args[1:], kwargs)
        return _of_whole(func, args, kwargs, ours) if found is NotImplemented else found

    @classmethod
    def __torch_dispatch__(cls, *call: Any, **further: Any) -> NoReturn:
        raise UserError(BELOW)


class _Lazy(torch.autograd.Function):
    """A tensor without memory of its own."""

    @staticmethod
    def forward(ctx: Any, table: Tensor, size: Any, strides: Any, offset: Any) -> Tensor:
        options = {"strides": strides, "storage_offset": offset, "dtype": table.dtype, "device": table.device}
        found = Tensor._make_wrapper_subclass(SpreadRows, size, **options)
        torch._C._set_throw_on_mutable_data_ptr(found)  # C code that does not ask, such as that of DLPack
        return found

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> NoReturn:
        raise UserError(BELOW)


def is_checkpointed() -> bool:
    """Return whether hooks get what torch saves for the backward pass, as in a checkpoint, which counts it in both."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def _node_of(x: Tensor) -> Any:
    """Return the node that made it; None if torch raises because it is a view of what was changed in another mode."""
    try:
        return x.grad_fn
    except RuntimeError:
        return None


@cache
def give_functions_ordinary_tensors() -> None:
    """Replace what torch does first with the arguments of every `autograd.Function`, which it gives as they are.

    Many libraries hold the method `apply` of theirs, so that another one in its place would not reach them. From
    torch 2.14 on there is nothing else to replace: what those return is refused.
    """
    if isinstance(Function.apply, MethodType):
        unwrap = utils.unwrap_dead_wrappers
        utils.unwrap_dead_wrappers = lambda args: unwrap(_ordinary(args))
        return
    own = vars(Function)["apply"]

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        return own.__get__(None, cls)(*_ordinary(args), **kwargs)

    setattr(Function, "apply", classmethod(apply))  # noqa: B010


def _ordinary(args: tuple[Any, ...]) -> tuple[Any, ...]:
    if SpreadRows not in map(type, args):
        return args
    return tuple(map(_whole, args))


def _whole(x: Any) -> Any:
    return x.whole() if type(x) is SpreadRows else x


def _of_whole(func: Callable[..., Any], args: Any, kwargs: Any, ours: list[SpreadRows]) -> Any:
    """Return what a function makes of ordinary tensors. ours: the lazy ones among its arguments."""
    args, kwargs = tree_map(_whole, (args, kwargs))
    found = func(*args, **kwargs)
    return next((each for each in ours if found is each.dense), found)


def _check_is_ours(x: SpreadRows) -> None:
    """Refuse a tensor that an `autograd.Function` has returned: it would get no gradient."""
    if x.node is not x.made_by:
        raise UserError(BELOW)


def _check_not_read(wanted: object) -> None:
    """Refuse a request for gradients some of which do not exist."""
    if any(type(each) is SpreadRows and each.has_no_gradient for each in tree_leaves(wanted)):
        _refuse_gradient()


def _refuse_gradient(*wanted: object) -> NoReturn:
    raise UserError(
        "the head and the loss are computed once for equal rows, so their gradient at each place of the batch does not "
        "exist: register hooks, or call retain_grad, before they run; "
        "in place of torch.autograd.grad for hidden states, call restore_model(model)"
    )


class _NoGradient:
    """What a hook gets for a gradient that does not exist: whatever reads it, also later, is refused."""

    __getattr__ = __torch_function__ = __repr__ = __bool__ = __iter__ = __len__ = __getitem__ = __float__ = (
        _refuse_gradient
    )
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __neg__ = _refuse_gradient


def _register_hook(x: SpreadRows, hook: Callable[[Any], Any]) -> RemovableHandle:
    """Call a hook when the gradient of the table comes: FSDP and DeepSpeed learn so that a backward pass has begun."""

    def call(grad: Tensor) -> None:
        missing = _NoGradient()
        returned = hook(missing)
        if returned is not None and returned is not missing:
            _refuse_gradient()

    return x.table.register_hook(call)


def _without_hooks(x: SpreadRows) -> Any:
    """Let others look at a node, as DistributedDataParallel does, though not all of its gradient arrives there."""
    node = x.node
    if node is not None:
        node.register_hook = node.register_prehook = _refuse_gradient
    return node


def _getters(*names: str) -> set[Any]:
    return {getattr(Tensor, name).__get__ for name in names}


LATE: dict[Any, Callable[..., Any]] = {  # what these are if the gradient does not exist
    **dict.fromkeys(_getters("grad_fn"), lambda x, *_: _without_hooks(x)),
    Tensor.register_hook: _register_hook,
    Tensor.retain_grad: _refuse_gradient,
}
METADATA = {
    *_getters("shape", "dtype", "device", "ndim", "requires_grad", "is_leaf", "layout", "is_cuda", "is_sparse"),
    *_getters("is_meta", "is_nested", "is_quantized", "is_mkldnn"),
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, Tensor.is_complex, Tensor.is_inference),
    *(Tensor.__len__, Tensor.element_size, Tensor.get_device, Tensor.stride, Tensor.is_contiguous),
}
