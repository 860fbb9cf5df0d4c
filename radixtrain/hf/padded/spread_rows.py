"""Hidden states and logits of a padded batch that are a `Spread` as long as nothing needs more of them.

Functions of a short list read its table (`row_functions.py`). Everything else gets the ordinary tensor. It is made
then, once, and replaces the lazy one: the same Python object is a `torch.Tensor` from then on. Lazy tensors made from
it are made again from the ordinary one, by the same function in the modes of that time: a view is a view of it, and a
copy is a copy, before anything is written.

If rows of the table were read with gradients, the gradient at each place does not exist. The lazy tensor then stays in
front of the ordinary one, to raise a UserError when that gradient is requested. It also stays while torch holds it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NoReturn
from weakref import ref

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.hooks import RemovableHandle

from radixtrain.errors import UserError
from radixtrain.hf.padded.row_functions import RULES
from radixtrain.hf.padded.spread import (
    CHANGED,
    Spread,
    gradient_of_rows,
    is_checkpointed,
    node_of,
    node_of_memory,
    version_of,
)

CHANGED_BEFORE = (
    "an autograd.Function or a reentrant checkpoint gets shared hidden states or logits that were changed in place "
    "while another function held them: clone them before the change"
)


class SpreadRows(Tensor):
    """A tensor, (..., W), that everybody sees as an ordinary one.

    made_by: the node that takes its gradient to the table.
    """

    spread: Spread
    made_by: Any

    @classmethod
    def of(cls, *spread: Any) -> SpreadRows:
        """Represent `Spread(*spread)`."""
        return cls.lazy(Spread(*spread))

    @classmethod
    def lazy(cls, spread: Spread, source: SpreadRows | None = None) -> SpreadRows:
        with spread.modes._replace(inference=spread.table.is_inference()).entered(spread.table):
            found: SpreadRows = _Lazy.apply(spread.table, spread)
        with torch._C.DisableTorchFunctionSubclass():
            found.requires_grad_(spread.table.requires_grad)
        found.spread, found.made_by = spread, found.node
        if source is not None and spread.func is not None:
            spread.source = source
            source.spread.derived.append(ref(found))
        return found

    @property
    def node(self) -> Any:
        """Return the node that gets our gradient."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.grad_fn

    @property
    def is_held(self) -> bool:
        """Return whether torch holds this object: a function of the user's has it as an argument, or saved it."""
        return self._use_count() > 1  # type: ignore[attr-defined]

    @property
    def is_read(self) -> bool:
        """Return whether the gradient at the places is not complete."""
        return self.spread.was_read or self.is_held

    @property
    def is_lazy(self) -> bool:
        """Return whether functions may read the table.

        Not after a function of the user's returned this tensor, and gets its gradient. In a checkpoint they repeat what
        they did before.
        """
        spread = self.spread
        if torch._C._are_functorch_transforms_active() or self.node is not self.made_by:
            return False
        if spread.table.is_inference() and torch.is_grad_enabled():
            return False  # if it is an error, torch raises its own
        return spread.dense is None or (spread.was_read and not version_of(spread.dense) and is_checkpointed())

    def enter_function(self) -> None:
        """Note that a function of the user's reads this tensor. Its gradient reaches our node before in-place changes.

        torch runs such a function without gradients; a checkpoint that is not reentrant has none for what it gets. What
        was held before the change gets torch's own error.
        """
        spread = self.spread
        is_changed = spread.dense is not None and node_of(spread.dense) is not spread.dense_node
        if not torch.is_grad_enabled():
            spread.entered.append(ref(self))
            if is_changed and spread.held is None:
                raise UserError(CHANGED_BEFORE)
        spread.mark_read(inside=True)

    def whole(self) -> Tensor:
        """Return the ordinary tensor, which this object becomes unless the last paragraph of the module applies."""
        spread, source = self.spread, self.spread.source
        if spread.dense is None and source is not None:
            source.whole()  # which makes ours
        else:
            self._settle(spread.made_dense() if spread.dense is None else spread.dense)
        return self if type(self) is not SpreadRows else spread.dense  # type: ignore[return-value]

    def follow_functions(self) -> None:
        """Give the ordinary tensor, and with it every view, what functions of the user's changed in place.

        torch gives their gradient only to the objects that they got.
        """
        entered = [get() for get in self.spread.entered]
        self.spread.entered.clear()
        for each in (*entered, self):
            if type(each) is not SpreadRows:
                continue
            spread = each.spread
            if each.node is not each.made_by:
                each._follow()
            elif not each.is_held:
                spread.held = None
            elif each is not self:  # its function still runs
                spread.entered.append(ref(each))
        dense = self.spread.dense if type(self) is SpreadRows else None
        if dense is not None and node_of(dense) is not self.spread.dense_node and not self.is_held:
            self.whole()

    def _follow(self) -> None:
        """Change the ordinary tensor as the function did, whose node is now that of this object."""
        spread, self.made_by = self.spread, self.node
        comes_after = spread.dense is not None and node_of_memory(spread.dense) is not spread.memory_node
        with spread.modes._replace(grad=True).entered(spread.table):
            with torch._C.DisableTorchFunctionSubclass():
                values = self.clone()
            if comes_after and values.requires_grad:  # the function before this one would not get its gradient
                values.register_hook(_refuse_changed)
            if spread.modes.grad:
                dense = self.whole().copy_(values)
                spread.held = None if spread.held is None else version_of(dense)
                spread.memory_node = node_of_memory(dense)
            else:  # the function has made it
                spread.source = None
                self._settle(values)

    def _settle(self, dense: Tensor) -> None:
        """Become this tensor if possible, and make what came from this object come from it."""
        spread, spread.dense = self.spread, dense
        spread.dense_node = spread.dense_node or node_of(dense)
        spread.memory_node = spread.memory_node or node_of_memory(dense)
        spread.held = None if not self.is_held else version_of(dense) if spread.held is None else spread.held
        if spread.held is not None:
            if version_of(dense) != spread.held and torch._C._current_graph_task_id() >= 0:
                raise RuntimeError(CHANGED)
        elif not spread.was_read or node_of(dense) is not spread.dense_node:  # a changed tensor has another gradient
            dense = self._turn_into(dense)
        spread.became[:] = spread.became or [dense]
        derived, spread.derived = [each() for each in spread.derived], []  # torch swaps none with a weak reference
        for each in derived:
            if each is not None and each.spread.source is not None and each.node is each.made_by:
                with each.spread.modes.entered(dense):
                    found = each.spread.func(dense)
                each.spread.source = None
                each._settle(found)

    def _turn_into(self, dense: Tensor) -> Tensor:
        """Turn this object into the ordinary tensor, keeping attributes that others set; `dense` if torch cannot."""
        spread, spread.dense = self.spread, None
        others = {name: value for name, value in self.__dict__.items() if name not in ("spread", "made_by")}
        try:
            torch.utils.swap_tensors(self, dense)
        except RuntimeError:  # a view or a function holds the ordinary one
            spread.dense = dense
            return dense
        self.__dict__.update(others)
        spread.became[:] = [self if each is dense else each for each in spread.became]
        return self

    @classmethod
    @torch.compiler.disable  # so that the compiler gets ordinary tensors
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        leaves = tree_leaves((args, kwargs))
        for each in leaves:
            if type(each) is SpreadRows:
                each.follow_functions()
        ours = [each for each in leaves if type(each) is SpreadRows]
        if func in READ and ours and ours[0].is_read:
            return READ[func](*args)
        for each in ours:
            if each.is_held:
                each.enter_function()
        # A further lazy argument becomes ordinary in the function, and with it perhaps the one whose table is read.
        found = _of_table(func, args, kwargs) if func in RULES and len(ours) == 1 else NotImplemented
        return _of_whole(func, args, kwargs, ours) if found is NotImplemented else found

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Compute values below autograd, for a call of an `autograd.Function`. `_Lazy` takes its gradient back."""

        def values(x: object) -> Any:
            if type(x) is not SpreadRows:
                return x
            spread = x.spread
            x.enter_function()
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
        return ctx.way_back(grad.whole() if type(grad) is SpreadRows else grad), None


def _of_table(func: object, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return what a function makes of the table of its first argument; NotImplemented if it needs the whole tensor."""
    x = args[0] if args else None
    if type(x) is not SpreadRows or not x.is_lazy:
        return NotImplemented
    found = RULES[func](x.spread, func, args[1:], kwargs)
    if isinstance(found, tuple):
        parts = tuple(SpreadRows.lazy(each, x) for each in found)
        return iter(parts) if func is Tensor.__iter__ else parts
    if isinstance(found, Spread):
        return x if found is x.spread else SpreadRows.lazy(found, x)
    return found


def _of_whole(func: Callable[..., Any], args: Any, kwargs: Any, ours: list[SpreadRows]) -> Any:
    """Return what a function makes of ordinary tensors. ours: the lazy ones among its arguments."""
    if func in WANTS_GRADIENT:
        _check_not_read(func, args, kwargs)
    args, kwargs = tree_map(lambda each: each.whole() if type(each) is SpreadRows else each, (args, kwargs))
    found = func(*args, **kwargs)
    for each in (each for each in ours if type(each) is SpreadRows):
        found = each if found is each.spread.dense else found
        whole = each.whole()  # if it was changed
        if type(each) is SpreadRows and each.is_held and version_of(whole) != each.spread.held:
            each.spread.entered.append(partial(_itself, each))  # the user may not keep it
    return found


def _itself(x: object) -> object:
    return x


def _check_not_read(func: object, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Refuse a request for a gradient that no longer comes."""
    wanted = tree_leaves(kwargs.get("inputs", args[1:2]) if func is torch.autograd.grad else (args, kwargs))
    if any(type(each) is SpreadRows and each.is_read for each in wanted):
        _refuse_gradient()


def _refuse_gradient(*wanted: object) -> NoReturn:
    raise UserError(
        "the head and the loss are computed once for equal rows, so their gradient at each place of the batch does not "
        "exist: register hooks, or call retain_grad, before they run; "
        "in place of torch.autograd.grad for hidden states, call restore_model(model)"
    )


def _refuse_changed(grad: Tensor) -> NoReturn:
    raise UserError(CHANGED_BEFORE)


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


def _without_hooks(node: Any) -> Any:
    """Let others look at a node, as DistributedDataParallel does, though not all of its gradient arrives there."""
    if node is not None:
        node.register_hook = node.register_prehook = _refuse_gradient
    return node


def _getters(*names: str) -> set[Any]:
    return {getattr(Tensor, name).__get__ for name in names}


READ = {  # what these are once the table was read
    **dict.fromkeys(_getters("grad_fn"), lambda x, *_: _without_hooks(x.node)),
    Tensor.register_hook: _register_hook,
}
WANTS_GRADIENT = {Tensor.retain_grad, torch.autograd.grad}
METADATA = {
    *_getters("shape", "dtype", "device", "ndim", "requires_grad", "is_leaf", "layout", "is_cuda", "is_sparse"),
    *_getters("is_meta", "is_nested", "is_quantized", "is_mkldnn"),
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, Tensor.is_complex, Tensor.is_inference),
    *(Tensor.__hash__, Tensor.__len__, Tensor.element_size, Tensor.get_device, Tensor.stride, Tensor.is_contiguous),
}
