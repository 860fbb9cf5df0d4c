"""Hidden states and logits of a padded batch that are a `Spread` as long as nothing needs more of them.

Functions of a short list read its table (`row_functions.py`). Everything else, an `autograd.Function` too, gets the
ordinary tensor. It is made then, once, and replaces the lazy one: the same Python object is a `torch.Tensor` from then
on. So do all views of it, at the same time, each as a view of it made in the modes of the lazy one.

If rows of the table were read with gradients, the gradient at each place does not exist. The lazy tensor then stays in
front of the ordinary one, to raise a UserError when that gradient is requested.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from types import MethodType
from typing import Any, NoReturn
from weakref import ref

import torch
from torch import Tensor
from torch._functorch import utils
from torch.autograd import Function
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.hooks import RemovableHandle

from radixtrain.errors import UserError
from radixtrain.hf.padded.row_functions import RULES
from radixtrain.hf.padded.spread import Spread, gradient_of_rows, is_checkpointed


class SpreadRows(Tensor):
    """A tensor, (..., W), that everybody sees as an ordinary one."""

    spread: Spread
    made_by: Any

    @classmethod
    def of(cls, *spread: Any) -> SpreadRows:
        """Represent `Spread(*spread)`."""
        return cls.lazy(Spread(*spread))

    @classmethod
    def lazy(cls, spread: Spread) -> SpreadRows:
        give_functions_ordinary_tensors()
        with spread.modes._replace(inference=spread.table.is_inference()).entered(spread.table):
            found: SpreadRows = _Lazy.apply(spread.table, spread)
        with torch._C.DisableTorchFunctionSubclass():
            found.requires_grad_(spread.table.requires_grad)
        found.spread, found.made_by = spread, found.node
        spread.memory.lazy.append(ref(found))
        return found

    @property
    def node(self) -> Any:
        """Return the node that gets our gradient."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.grad_fn

    def check_is_ours(self) -> None:
        """Raise UserError if an `autograd.Function` returned this tensor: it would get no gradient."""
        if self.node is not self.made_by:
            raise UserError(
                "an autograd.Function of which the method `apply` was taken before radixtrain was imported returned "
                "shared hidden states or logits: import radixtrain before it, or call the class's own apply"
            )

    @property
    def is_lazy(self) -> bool:
        """Return whether functions may read the table. In a checkpoint they repeat what they did before."""
        memory = self.spread.memory
        if torch._C._are_functorch_transforms_active():
            return False
        if self.spread.table.is_inference() and torch.is_grad_enabled():
            return False  # if it is an error, torch raises its own
        return memory.dense is None or (memory.was_read and not memory.dense._version and is_checkpointed())

    def whole(self) -> Tensor:
        """Return the ordinary tensor, which this object becomes unless the last paragraph of the module applies."""
        spread, memory = self.spread, self.spread.memory
        shown, memory.lazy = [each() for each in memory.lazy], []  # torch swaps none with a weak reference
        for each in (*shown, self):
            if type(each) is SpreadRows:
                each._settle()
        return self if type(self) is not SpreadRows else spread.dense  # type: ignore[return-value]

    def _settle(self) -> None:
        """Become the ordinary tensor if possible. A changed one has another gradient than the rows that were read."""
        self.spread.make_dense()
        if not self.spread.memory.was_read or self.spread.is_changed:
            self._become_ordinary()

    def _become_ordinary(self) -> None:
        """Turn this object into the ordinary tensor, keeping attributes that others set, unless a view of it exists."""
        spread, dense = self.spread, self.spread.dense
        others = {name: value for name, value in self.__dict__.items() if name not in ("spread", "made_by")}
        spread.dense = None
        try:
            torch.utils.swap_tensors(self, dense)
        except RuntimeError:
            spread.dense = dense
        else:
            self.__dict__.update(others)
            spread.dense = self

    @classmethod
    @torch.compiler.disable  # so that the compiler gets ordinary tensors
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        leaves = tree_leaves((args, kwargs))
        for each in leaves:
            if type(each) is SpreadRows and each.spread.is_changed:
                each.whole()
        ours = [each for each in leaves if type(each) is SpreadRows]
        for each in ours:
            each.check_is_ours()
        if func in READ and ours and ours[0].spread.memory.was_read:
            return READ[func](*args)
        # A further lazy argument becomes ordinary in the function, and with it perhaps the one whose table is read.
        found = _of_table(func, args, kwargs) if func in RULES and len(ours) == 1 else NotImplemented
        return _of_whole(func, args, kwargs, ours) if found is NotImplemented else found

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Compute values below autograd, as `torch.func` asks for them. `_Lazy` takes their gradient back."""
        if func._schema.is_mutable:
            raise UserError(
                f"{func} would change shared hidden states or logits in place below autograd, in a torch.func "
                f"transform or in C++: clone them before it"
            )

        def values(x: object) -> Any:
            if type(x) is not SpreadRows:
                return x
            spread = x.spread
            spread.memory.was_read |= spread.table.requires_grad
            return spread.table.detach()[spread.rows].view(x.shape) if spread.dense is None else spread.dense.detach()

        args, kwargs = tree_map(values, (args, kwargs or {}))
        return func(*args, **kwargs)


class _Lazy(torch.autograd.Function):
    """A tensor without memory of its own."""

    @staticmethod
    def forward(ctx: Any, table: Tensor, spread: Spread) -> Tensor:
        ctx.way_back, shaped = gradient_of_rows(spread), spread.shaped
        places = shaped.shape, shaped.stride(), shaped.storage_offset()
        return Tensor._make_wrapper_subclass(SpreadRows, *places, dtype=table.dtype, device=table.device)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.way_back(grad), None


@cache
def give_functions_ordinary_tensors() -> None:
    """Replace what torch does first with the arguments of every `autograd.Function`, which it gives as they are.

    Many libraries hold the method `apply` of theirs, so that another one in its place would not reach them. From
    torch 2.14 on there is nothing else to replace: what those return is refused (`SpreadRows.check_is_ours`).
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
    if SpreadRows not in map(type, args) or _only_keeps(*args[:2]):
        return args
    return tuple(each.whole() if type(each) is SpreadRows else each for each in args)


def _only_keeps(first: object = None, second: object = None) -> bool:
    """Return whether a checkpoint of torch before 2.12 keeps what it got: after an empty tensor, and what was named."""
    return type(first) is Tensor and not first.numel() and isinstance(second, dict)


def _of_table(func: object, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return what a function makes of the table of its first argument; NotImplemented if it needs the whole tensor."""
    x = args[0] if args else None
    if type(x) is not SpreadRows or not x.is_lazy:
        return NotImplemented
    found = RULES[func](x.spread, func, args[1:], kwargs)
    if isinstance(found, tuple):
        parts = tuple(map(SpreadRows.lazy, found))
        return iter(parts) if func is Tensor.__iter__ else parts
    if isinstance(found, Spread):
        return x if found is x.spread else SpreadRows.lazy(found)
    return found


def _of_whole(func: Callable[..., Any], args: Any, kwargs: Any, ours: list[SpreadRows]) -> Any:
    """Return what a function makes of ordinary tensors. ours: the lazy ones among its arguments."""
    if func in WANTS_GRADIENT:
        _check_not_read(func, args, kwargs)
    args, kwargs = tree_map(lambda each: each.whole() if type(each) is SpreadRows else each, (args, kwargs))
    found = func(*args, **kwargs)
    for each in (each for each in ours if type(each) is SpreadRows):
        found = each if found is each.spread.dense else found
        each.whole()  # if it was changed
    return found


def _check_not_read(func: object, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Refuse a request for a gradient that no longer comes."""
    wanted = tree_leaves(kwargs.get("inputs", args[1:2]) if func is torch.autograd.grad else (args, kwargs))
    if any(type(each) is SpreadRows and each.spread.memory.was_read for each in wanted):
        _refuse_gradient()


def _refuse_gradient(*wanted: object) -> NoReturn:
    raise UserError(
        "the head and the loss are computed once for equal rows, so their gradient at each place of the batch does not "
        "exist: register hooks, or call retain_grad, before they run; "
        "in place of torch.autograd.grad for hidden states, call restore_model(model)"
    )


class _NoGradient(Tensor):
    """What a hook gets if it waits for a gradient that does not exist: it may read the shape, and pass it on."""

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in METADATA:
            _refuse_gradient()
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    __torch_dispatch__ = _refuse_gradient  # type: ignore[assignment]


def _register_hook(x: SpreadRows, hook: Callable[[Tensor], Any]) -> RemovableHandle:
    """Call a hook when the gradient of the table comes. FSDP and DeepSpeed learn so that a backward pass has begun."""

    def call(grad: Tensor) -> None:
        stand_in = Tensor._make_wrapper_subclass(_NoGradient, shape, dtype=grad.dtype, device=grad.device)
        returned = hook(stand_in)
        if returned is not None and returned is not stand_in:
            _refuse_gradient()

    shape = x.shape
    return x.spread.table.register_hook(call)


def _without_hooks(x: SpreadRows) -> Any:
    """Let others look at a node, as DistributedDataParallel does, though not all of its gradient arrives there."""
    with torch._C.DisableTorchFunctionSubclass():
        node: Any = x.grad_fn
    if node is not None:
        node.register_hook = node.register_prehook = _refuse_gradient
    return node


def _getters(*names: str) -> set[Any]:
    return {getattr(Tensor, name).__get__ for name in names}


READ = {  # what these are once the table was read
    **dict.fromkeys(_getters("grad_fn"), lambda x, *_: _without_hooks(x)),
    Tensor.register_hook: _register_hook,
}
WANTS_GRADIENT = {Tensor.retain_grad, torch.autograd.grad}
METADATA = {
    *_getters("shape", "dtype", "device", "ndim", "requires_grad", "is_leaf", "layout", "is_cuda", "is_sparse"),
    *_getters("is_meta", "is_nested", "is_quantized", "is_mkldnn"),
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, Tensor.is_complex, Tensor.is_inference),
    *(Tensor.__hash__, Tensor.__len__, Tensor.element_size, Tensor.get_device, Tensor.stride, Tensor.is_contiguous),
}
