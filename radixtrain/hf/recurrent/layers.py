"""The recurrent layers of a prepared model: their mixers run on the tree while a radix batch passes.

A mixer is reached in place of its `forward`, because it has to be called several times. It learns which batch passes
from hooks on its block: the call is among the block's keyword arguments, or on the mask, or, for models that pass
nothing on, the block's input is marked with it.

Activation checkpointing computes a block again in the backward pass. What wraps the whole block runs these hooks again;
transformers wraps only the block's `forward`, so there the hooks replace the function that does it by `Checkpoint`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from radixtrain.errors import UserError
from radixtrain.hf.recurrent.forking import why_it_cannot_fork
from radixtrain.hf.recurrent.mixers import blocks_of, mixers_of
from radixtrain.hf.recurrent.running import arguments_by_name, run_on_tree
from radixtrain.hf.windows import call_on_mask

__all__ = ["Block", "Checkpoint", "Mixer", "Progress", "install_mixers", "remove_mixers"]

logger = logging.getLogger(__name__)
MARK = "_radixtrain_call"
CHECKPOINT = "_gradient_checkpointing_func"  # of a module that transformers may checkpoint


class Progress:
    """The call of the radix batch that passes through the backbone now; None otherwise."""

    def __init__(self) -> None:
        self.call: Any = None


class Mixer:
    """Stands in for the `forward` of a mixer.

    module: the mixer. replaced: the `forward` that the module itself had, such as that of Accelerate's hooks, if any.
    call: of the radix batch that its block computes now.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.replaced = module.__dict__.get("forward")
        self.call: Any = None
        self.why_whole: dict[Any, str | None] = {}  # by device and dtype, what `why_it_cannot_fork` found

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.call is None:
            return self.original(*args, **kwargs)
        return self._on_tree(args, kwargs)

    def original(self, *args: Any, **kwargs: Any) -> Any:
        """The mixer as it was."""
        if self.replaced is not None:
            return self.replaced(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)

    @torch.compiler.disable  # host integers: traced, it would be compiled anew for every tree
    def _on_tree(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call, given = self.call, arguments_by_name(self.module, args, kwargs)
        runs = call.runs.forked
        if any(each.keeps for each in runs.calls) and self._must_be_whole(given):
            runs = call.runs.whole
        call.mixed.append(id(self.module))
        return run_on_tree(self.module, self.original, given, runs)

    def _must_be_whole(self, given: dict[str, Any]) -> bool:
        """Whether this mixer cannot fork, tried once for a device and dtype."""
        hidden = next(iter(given.values()))
        key = hidden.device, hidden.dtype, torch.is_autocast_enabled(hidden.device.type)
        if self.why_whole.get(key) is None:
            self.why_whole[key] = why_it_cannot_fork(self.module, self.original, given)
            if self.why_whole[key]:
                logger.warning(
                    "%s of layer %s computes every sequence from its first token on: %s",
                    *(type(self.module).__name__, getattr(self.module, "layer_idx", "?"), self.why_whole[key]),
                )
        return self.why_whole[key] != ""


class Block:
    """The hooks of a decoder layer with mixers in it.

    around: the modules from the layer down to its mixers, each of which transformers may compute again.
    call: of the radix batch that the layer computes now.
    """

    def __init__(self, mixers: list[Mixer], around: list[nn.Module], progress: Progress) -> None:
        self.mixers, self.around, self.progress = mixers, around, progress
        self.call: Any = None

    @torch.compiler.disable
    def enter(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Give the mixers the call that this block is part of."""
        self.give(self._call(block, args, kwargs))

    @torch.compiler.disable
    def leave(self, block: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self.give(None)

    def give(self, call: Any) -> None:
        """The mixers get this call, and so do functions that transformers computes again; None is an ordinary batch."""
        self.call = call
        for mixer in self.mixers:
            mixer.call = call
        for module in self.around:
            compute = module.__dict__.get(CHECKPOINT)
            if isinstance(compute, Checkpoint):
                compute = compute.original
            if compute is not None:
                setattr(module, CHECKPOINT, compute if call is None else Checkpoint(compute, self))

    def _call(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = [*args, *kwargs.values()]
        call = kwargs.get("radix_call") or next(filter(None, map(_marked_call, given)), None)
        if call is None and self.progress.call is not None:
            call = self.progress.call
            hidden = next(value for value in given if isinstance(value, Tensor))
            _check_mark_stays(block, hidden)
            setattr(hidden, MARK, call)
        return call


class Checkpoint:
    """In place of `original`, transformers' activation checkpointing of a module, while a radix batch passes.

    What it computes, now and again in the backward pass, finds the call that the block has now.
    """

    def __init__(self, original: Callable[..., Any], block: Block) -> None:
        self.original, self.block, self.call = original, block, block.call

    @torch.compiler.disable
    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        def with_call(*args: Any, **kwargs: Any) -> Any:
            before = self.block.call
            self.block.give(self.call)
            try:
                return function(*args, **kwargs)
            finally:
                self.block.give(before)

        return self.original(with_call, *args, **kwargs)


def _check_mark_stays(block: nn.Module, hidden: Tensor) -> None:
    """Refuse a block around which torch's reentrant checkpointing runs: it would get new tensors, without the mark.

    Inside of an autograd function gradients are off, and yet its inputs want one.
    """
    if hidden.requires_grad and not torch.is_grad_enabled():
        raise UserError(
            f"{type(block).__name__} has a recurrent state and passes no arguments on, so activation checkpointing "
            f"with use_reentrant=True would compute it again without the tree; set use_reentrant to False"
        )


def _marked_call(value: Any) -> Any:
    return (getattr(value, MARK, None) or call_on_mask(value)) if isinstance(value, Tensor) else None


def install_mixers(decoder: nn.Module, progress: Progress) -> list[nn.Module]:
    """Put a `Mixer` in place of every mixer's `forward`. Returns the mixers; none if all layers only attend."""
    by_block: dict[str, tuple[nn.Module, list[Mixer]]] = {}
    found = mixers_of(decoder)
    for path, module in found.items():
        around = blocks_of(decoder, path)
        if around is None:
            raise UserError(
                f"{type(module).__name__} ({path}) carries a state from token to token outside of the decoder layers, "
                f"so the tree cannot reach it; train it without sharing (fit: dedup: false)"
            )
        block_path, block = around
        mixer = Mixer(module)
        module.forward = mixer.forward
        by_block.setdefault(block_path, (block, []))[1].append(mixer)
    for block, mixers in by_block.values():
        hooks = Block(mixers, _around(block, mixers), progress)
        block.register_forward_pre_hook(hooks.enter, with_kwargs=True, prepend=True)
        block.register_forward_hook(hooks.leave, always_call=True)
    return list(found.values())


def _around(block: nn.Module, mixers: list[Mixer]) -> list[nn.Module]:
    """The modules of a block that have one of its mixers in them."""
    inside = {id(mixer.module) for mixer in mixers}
    return [module for module in block.modules() if inside & {id(each) for each in module.modules()}]


def remove_mixers(model: nn.Module) -> None:
    """Give every mixer its own `forward` back. The hooks of blocks are removed with all others."""
    for module in model.modules():
        mixer = getattr(module.__dict__.get("forward"), "__self__", None)
        if isinstance(mixer, Mixer):
            del module.forward
            if mixer.replaced is not None:
                module.forward = mixer.replaced
