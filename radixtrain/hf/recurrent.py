"""The recurrent layers of a shared model: their mixers run on the tree while a radix batch passes.

A mixer's own `forward` is called once for each `RunGroup` of the batch. A state goes from one group to the next through
the argument for Hugging Face's cache, so the formula is the mixer's own, and so are its kernels. transformers has one
protocol for all layers with a state, the methods of `transformers.cache_utils.Cache`. A mixer reads its states by
`get_conv_state` and `get_recurrent_state`, and leaves new ones by `update_conv_state`, which returns the earlier
columns with the new ones, and by `update_recurrent_state`. `ForkedStates` speaks the protocol for one group of
runs: it gives each run the state that it starts from and stores the final ones, both with their gradients. Nothing is
written in place. The runs are made at the first mixer, from the segments that the layout has on the host.

For this the `forward` of a mixer is replaced. It learns which batch passes from hooks on its decoder layer: the call is
among the layer's keyword arguments, or on the mask. A layer that gets neither runs as an ordinary one, which the trial
of the model finds.

Activation checkpointing computes a layer again in the backward pass. If it wraps the whole layer, these hooks run
again. transformers wraps only the layer's `forward`: there a `Checkpoint` around its function keeps the call.

U unique rows; R runs of length L in a group.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from radixtrain.errors import TRAIN_WITHOUT_SHARING, UserError
from radixtrain.hf.backbone import CACHE, CHECKPOINT, is_cache, layer_around, mixers_of
from radixtrain.hf.progress import running
from radixtrain.hf.windows import on_mask
from radixtrain.kernels.rows import gather_rows
from radixtrain.tree.runs import RunLayout
from radixtrain.versions import before, saying_what_was_tested

MASK = re.compile("mask")  # in the name of an argument: runs have no padding that a mask would hide from an output
# The states of some runs, by kind (`conv` or `recurrent`) and number; the first axis counts the runs.
States = dict[tuple[str, int], Tensor]


class Mixer:
    """Replaces the `forward` of a mixer.

    module: the mixer. replaced: the `forward` that the module itself had, such as that of Accelerate's hooks, if any.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.replaced = module.__dict__.get("forward")

    def forward(self, *args: object, **kwargs: object) -> Any:
        call = running.call  # its layer has begun it
        if call is None:
            return self.original(*args, **kwargs)
        return self._on_tree(call, args, kwargs)

    def original(self, *args: object, **kwargs: object) -> Any:
        """Run the mixer without any change."""
        if self.replaced is not None:
            return self.replaced(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)

    @torch.compiler.disable  # host integers: traced, it would be recompiled for every tree
    def _on_tree(self, call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        arguments = arguments_by_name(self.module, args, kwargs).items()
        given = {name: each_tensor(lambda x: call.all_rows(x[0])[None], call.num_rows, x) for name, x in arguments}
        call.mixed.append(id(self.module))
        output = run_on_tree(self.module, self.original, given, call.runs)
        return each_tensor(lambda x: call.own_rows(x[0])[None], call.layout.num_rows, output)


class LayerHooks:
    """Hooks by which a decoder layer begins and ends its part of a call, for the mixers in it.

    around: the modules from the layer down to its mixers, each of which transformers may compute again.
    """

    def __init__(self, around: list[nn.Module]) -> None:
        self.around = around

    @torch.compiler.disable
    def enter(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Begin the call that this layer is part of; None for an ordinary one."""
        running.begin(self._call(layer, args, kwargs))
        for module in self.around:
            compute = module.__dict__.get(CHECKPOINT)
            if compute is not None and not isinstance(compute, Checkpoint):
                setattr(module, CHECKPOINT, Checkpoint(compute))

    @torch.compiler.disable
    def leave(self, layer: nn.Module, args: tuple[Any, ...], output: object) -> None:
        running.end()

    def _call(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        written = filter(None, map(on_mask, [*args, *kwargs.values()]))
        return kwargs.get("radix_call") or next((mask.call for mask in written), None)


class Checkpoint:
    """Replaces `original`, transformers' activation checkpointing of a module.

    What it recomputes in the backward pass is part of the original call.
    """

    def __init__(self, original: Callable[..., Any]) -> None:
        self.original = original

    @torch.compiler.disable
    def __call__(self, function: Callable[..., Any], *args: object, **kwargs: object) -> Any:
        call = running.call

        def with_call(*args: object, **kwargs: object) -> Any:
            with running.during(call):
                return function(*args, **kwargs)

        return self.original(with_call, *args, **kwargs)


@saying_what_was_tested()
def install_mixers(decoder: nn.Module) -> list[nn.Module]:
    """Replace every mixer's `forward` by a `Mixer`. Returns the modules; none if all layers only attend.

    Raises UserError for a mixer outside of the decoder layers, and for one that does not name its cache.
    """
    found = list(mixers_of(decoder).values())
    stand_ins = {id(module): Mixer(module) for module in found}
    by_layer: dict[nn.Module, set[int]] = {}
    for path, module in decoder.named_modules(remove_duplicate=False):  # layers may share a mixer
        if id(module) in stand_ins:
            cache_argument(module)
            layer = layer_around(decoder, path)
            if layer is None:
                raise UserError(
                    f"{type(module).__name__} ({path}) carries a state from token to token outside of the decoder "
                    f"layers, so the tree cannot reach it; {TRAIN_WITHOUT_SHARING}"
                )
            by_layer.setdefault(layer, set()).add(id(module))
    for module in found:
        module.forward = stand_ins[id(module)].forward
    for layer, inside in by_layer.items():
        hooks = LayerHooks(_around(layer, inside))
        layer.register_forward_pre_hook(hooks.enter, with_kwargs=True, prepend=True)
        layer.register_forward_hook(hooks.leave, always_call=True)
    return found


def _around(layer: nn.Module, inside: set[int]) -> list[nn.Module]:
    """List the modules of a layer that have one of its mixers in them. inside: the ids of these."""
    return [module for module in layer.modules() if inside & {id(each) for each in module.modules()}]


def remove_mixers(model: nn.Module) -> None:
    """Give every mixer its own `forward` back, and modules their checkpointing. Hooks are removed with all others."""
    for module in model.modules():
        compute = module.__dict__.get(CHECKPOINT)
        if isinstance(compute, Checkpoint):
            setattr(module, CHECKPOINT, compute.original)
        mixer = getattr(module.__dict__.get("forward"), "__self__", None)
        if isinstance(mixer, Mixer):
            del module.forward
            if mixer.replaced is not None:
                module.forward = mixer.replaced


def run_on_tree(module: nn.Module, forward: Callable[..., Any], given: Mapping[str, Any], runs: RunLayout) -> Any:
    """Return what a mixer returns for U unique rows, each computed after the rows above it on its path.

    module: the mixer. forward: its `forward`, or what stands in for that.
    given: its arguments by name, as the layer passes them. Tensors (1, U, ...), also in tuples, are cut into runs, a
        mask becomes None, a cache is left out, anything else is passed as it is.
    runs: of the batch, on the device of the rows.

    Returns what the mixer returns, one tensor or a tuple, each (1, U, ...) in the dtype that the mixer gives it.
    """
    cache, num_rows = cache_argument(module), len(runs.outputs)
    given = {name: None if MASK.search(name) else value for name, value in given.items() if name not in CACHE}
    all_rows = runs.rows.split([group.num_runs * group.length for group in runs.groups])
    all_parents = runs.parents.split([group.num_runs if group.sources else 0 for group in runs.groups])
    final: list[States] = []
    outputs = []
    for group, rows, parents in zip(runs.groups, all_rows, all_parents, strict=True):
        past = _past([final[source] for source in group.sources], parents)
        states = ForkedStates(past) if group.is_fork or past else None
        cut = partial(_cut, rows, (group.num_runs, group.length))
        inputs = {name: each_tensor(cut, num_rows, value) for name, value in given.items()}
        outputs.append(forward(**{**inputs, cache: states}))
        final.append(states.final if states is not None and group.is_fork else {})
    return _joined(outputs, runs)


def _past(sources: Sequence[States], parents: Tensor) -> States:
    """Return the states that the runs of a group start from. `gather_rows` sums the gradients of children in order.

    sources: the final states of the groups that they come from. parents: (R,), which of all these.
    """
    kinds = sources[0] if sources else {}
    return {kind: gather_rows(torch.cat([states[kind] for states in sources]), parents) for kind in kinds}


def _cut(rows: Tensor, shape: tuple[int, int], x: Tensor) -> Tensor:
    """Cut an argument of the mixer into the runs of a group: (1, U, ...) -> (R, L, ...)."""
    return gather_rows(x[0], rows).unflatten(0, shape)


def _joined(outputs: Sequence[Any], runs: RunLayout) -> Any:
    """Put the outputs of all groups at their unique rows; a mixer may return several tensors."""
    first = outputs[0]
    if isinstance(first, tuple):
        return tuple(_joined(each, runs) for each in zip(*outputs, strict=True))
    if first is None:
        return None
    flat = torch.cat([output.flatten(0, 1) for output in outputs])
    return gather_rows(flat, runs.outputs)[None]


def cache_argument(module: nn.Module) -> str:
    """Return the name of a mixer's argument for Hugging Face's cache. Raises UserError if it has none."""
    return next(name for name, each in _arguments_of(module).items() if is_cache(name, each.annotation))


def _arguments_of(module: nn.Module) -> Mapping[str, inspect.Parameter]:
    """Return the arguments of a mixer's `forward`, as the first class names them that names the cache.

    A subclass may pass on what it gets by `*args` and `**kwargs`.
    """
    for each in type(module).__mro__:
        own = vars(each).get("forward")
        arguments = inspect.signature(own).parameters if own else {}
        if any(is_cache(name, argument.annotation) for name, argument in arguments.items()):
            return arguments
    raise UserError(
        f"{type(module).__name__} has a recurrent state, and its forward does not name the cache that it gets "
        f"({' or '.join(CACHE)}), so its state cannot fork{before('recurrent states that fork')}; name it, or train "
        f"without sharing (fit: dedup: false)"
    )


def arguments_by_name(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call of the mixer, without the call of the batch, which its runs replace."""
    names = list(_arguments_of(module))[1:]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    given.pop("radix_call", None)
    return given


class ForkedStates:
    """Replaces Hugging Face's cache.

    past: the states that the runs start from; empty for runs that start from nothing.
    final: the states after the last row, those of padding included, so groups with padding leave none to read.
    """

    def __init__(self, past: Mapping[tuple[str, int], Tensor] | None = None) -> None:
        self.past: States = dict(past or {})
        self.final: States = {}

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Return the last inputs of a convolution: (runs, channels, width). None: start from nothing."""
        return self.past.get(("conv", state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Return the recurrent state, (runs, ...), in the mixer's shape and dtype. None: start from nothing."""
        return self.past.get(("recurrent", state_idx))

    def update_conv_state(
        self,
        conv_states: Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **kwargs: object,
    ) -> Tensor:
        """Keep the last `conv_kernel_size` columns, with zeros before a sequence that has fewer.

        conv_states: (runs, channels, length). the new columns. Returns the earlier ones and these.
        """
        past = self.past.get(("conv", state_idx))
        columns = conv_states if past is None else torch.cat([past, conv_states], dim=-1)
        width = conv_kernel_size or conv_states.shape[-1]
        missing = max(0, width - columns.shape[-1])
        self.final["conv", state_idx] = nn.functional.pad(columns, (missing, 0))[..., -width:]
        return columns

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: object
    ) -> Tensor:
        """Keep a final state, (runs, ...), and return it."""
        self.final["recurrent", state_idx] = recurrent_states
        return recurrent_states

    def is_recording_past(self, layer_idx: int) -> bool:
        """Return True, which keeps a mixer from its path for one generated token, where it writes into the state."""
        return True


def each_tensor(change: Callable[[Tensor], Tensor], num_rows: int, value: Any) -> Any:
    """Change every tensor (1, rows, ...) of a value, those of tuples too."""
    if isinstance(value, tuple):
        return tuple(each_tensor(change, num_rows, each) for each in value)
    return change(value) if isinstance(value, Tensor) and value.shape[:2] == (1, num_rows) else value
