"""The recurrent layers of a shared model: their mixers run on the tree while a radix batch passes.

The `forward` of a mixer is replaced, because it has to be called several times. It learns which batch passes from
hooks on its decoder layer: the call is among the layer's keyword arguments, or on the mask, or, for models that
pass nothing on, the layer's input is marked with it.

Activation checkpointing computes a layer again in the backward pass. If it wraps the whole layer, these hooks run
again. transformers wraps only the layer's `forward`: there a `Checkpoint` around its function keeps the call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from radixtrain.errors import TRAIN_WITHOUT_SHARING, UserError
from radixtrain.hf.modules import CHECKPOINT, layer_around, mixers_of
from radixtrain.hf.progress import Progress
from radixtrain.hf.recurrent.running import arguments_by_name, cache_argument, each_tensor, run_on_tree
from radixtrain.hf.windows import on_mask
from radixtrain.versions import saying_what_was_tested

MARK = "_radixtrain_call"


class Mixer:
    """Replaces the `forward` of a mixer.

    module: the mixer. replaced: the `forward` that the module itself had, such as that of Accelerate's hooks, if any.
    progress: of the model; its layer has begun a call there.
    """

    def __init__(self, module: nn.Module, progress: Progress) -> None:
        self.module, self.progress = module, progress
        self.replaced = module.__dict__.get("forward")

    def forward(self, *args: object, **kwargs: object) -> Any:
        if self.progress.call is None:
            return self.original(*args, **kwargs)
        return self._on_tree(args, kwargs)

    def original(self, *args: object, **kwargs: object) -> Any:
        """Run the mixer without any change."""
        if self.replaced is not None:
            return self.replaced(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)

    @torch.compiler.disable  # host integers: traced, it would be recompiled for every tree
    def _on_tree(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = self.progress.call
        arguments = arguments_by_name(self.module, args, kwargs).items()
        given = {name: each_tensor(call.all_rows, call.num_rows, value) for name, value in arguments}
        call.mixed.append(id(self.module))
        output = run_on_tree(self.module, self.original, given, call.runs)
        return each_tensor(call.own_rows, call.layout.num_rows, output)


class LayerHooks:
    """Hooks by which a decoder layer begins and ends its part of a call, for the mixers in it.

    around: the modules from the layer down to its mixers, each of which transformers may compute again.
    """

    def __init__(self, around: list[nn.Module], progress: Progress) -> None:
        self.around, self.progress = around, progress

    @torch.compiler.disable
    def enter(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Begin the call that this layer is part of; None for an ordinary one."""
        self.progress.begin(self._call(layer, args, kwargs))
        for module in self.around:
            compute = module.__dict__.get(CHECKPOINT)
            if compute is not None and not isinstance(compute, Checkpoint):
                setattr(module, CHECKPOINT, Checkpoint(compute, self.progress))

    @torch.compiler.disable
    def leave(self, layer: nn.Module, args: tuple[Any, ...], output: object) -> None:
        self.progress.end()

    def _call(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = [*args, *kwargs.values()]
        call = kwargs.get("radix_call") or next(filter(None, map(_marked_call, given)), None)
        if call is None and (call := self.progress.passing) is not None:
            hidden = next(value for value in given if isinstance(value, Tensor))
            _check_mark_stays(layer, hidden)
            setattr(hidden, MARK, call)
        return call


class Checkpoint:
    """Replaces `original`, transformers' activation checkpointing of a module.

    What it recomputes in the backward pass is part of the original call.
    """

    def __init__(self, original: Callable[..., Any], progress: Progress) -> None:
        self.original, self.progress = original, progress

    @torch.compiler.disable
    def __call__(self, function: Callable[..., Any], *args: object, **kwargs: object) -> Any:
        call = self.progress.call

        def with_call(*args: object, **kwargs: object) -> Any:
            with self.progress.during(call):
                return function(*args, **kwargs)

        return self.original(with_call, *args, **kwargs)


def _check_mark_stays(layer: nn.Module, hidden: Tensor) -> None:
    """Refuse a layer around which torch's reentrant checkpointing runs: it would get new tensors, without the mark.

    Inside of an autograd function gradients are off, and yet its inputs want one.
    """
    if hidden.requires_grad and not torch.is_grad_enabled():
        raise UserError(
            f"{type(layer).__name__} has a recurrent state and passes no arguments on, so activation checkpointing "
            f"with use_reentrant=True would compute it again without the tree; set use_reentrant to False"
        )


def _marked_call(value: object) -> Any:
    written = on_mask(value)
    return written.call if written is not None else getattr(value, MARK, None) if isinstance(value, Tensor) else None


@saying_what_was_tested()
def install_mixers(decoder: nn.Module, progress: Progress) -> list[nn.Module]:
    """Replace every mixer's `forward` by a `Mixer`. Returns the modules; none if all layers only attend.

    Raises UserError for a mixer outside of the decoder layers, and for one that does not name its cache.
    """
    found = list(mixers_of(decoder).values())
    stand_ins = {id(module): Mixer(module, progress) for module in found}
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
        hooks = LayerHooks(_around(layer, inside), progress)
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
