"""What the modules of a model do, judged by the code of their classes: which attend, and which carry a state.

The code of a class is judged by the attributes and globals that it names, and by what these globals are. Nothing reads
source text or the names of local variables, so neither a comment nor a renamed variable changes an answer, and a class
typed into a shell has one. A method that was replaced earlier is read as it is now.

A *mixer* is a module whose own code speaks the cache protocol of `recurrent.py`, so it carries a state from
token to token. None is known by name. A *layer* is a decoder layer, the element of an `nn.ModuleList`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import cache
from itertools import chain
from types import CodeType, FunctionType
from typing import Any

from torch import nn
from torch.nn.utils.parametrize import ParametrizationList
from transformers import AttentionInterface, PreTrainedModel

from radixtrain.hf.backbone import is_text

OF_ALL_MODELS = ("torch.", "transformers.modeling_utils")  # they name what a model may have, not what it has
CHECKPOINT = "_gradient_checkpointing_func"  # of a module that transformers may checkpoint
EAGER = "eager_attention_forward"  # ends the name of the eager attention of a modeling file


@cache
def names_in(module_class: object) -> frozenset[str]:
    """Return the attributes and globals that its methods name, inherited ones too, but not those of torch."""
    return frozenset(name for _, name in _globals(module_class))


def names_in_method(method: Any) -> tuple[str, ...]:
    """List the attributes and globals that a method names, in the order in which its code first does."""
    function = inspect.unwrap(method)
    return tuple(_names(function.__code__)) if isinstance(function, FunctionType) else ()


def attends(module_class: object) -> bool:
    """Return whether a module takes its attention from Hugging Face's AttentionInterface."""
    return bool(interfaces_of(module_class))


@cache
def interfaces_of(module_class: object) -> tuple[AttentionInterface, ...]:
    """Return the AttentionInterfaces from which its methods may take a function; nearly always only transformers'."""
    found = (space.get(name) for space, name in _globals(module_class))
    return tuple({id(each): each for each in found if isinstance(each, AttentionInterface)}.values())


@cache
def eager_slots(module_class: object) -> list[tuple[dict[str, Any], str]]:
    """List the files, as namespaces, and the names in them where its methods find their own eager attention."""
    return [(space, name) for space, name in _globals(module_class) if name.endswith(EAGER) and name in space]


def _globals(module_class: Any) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield each name that a method has, and the globals in which it would be looked up."""
    classes = (each for each in module_class.__mro__[:-1] if not each.__module__.startswith(OF_ALL_MODELS))
    for value in [value for each in classes for value in vars(each).values()]:
        method = inspect.unwrap(getattr(value, "__func__", value))
        if isinstance(method, FunctionType):
            yield from ((method.__globals__, name) for name in _names(method.__code__))


def _names(code: CodeType) -> Iterator[str]:
    """Yield the names in a code object; functions inside a function come after it."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names(inner)


PROTOCOL = {f"{verb}_{kind}_state" for verb in ("get", "update") for kind in ("conv", "recurrent")}  # of a cache


def mixers_of(decoder: nn.Module) -> dict[str, nn.Module]:
    """Return the mixers of the text, by path; empty for a model whose layers only attend."""
    return {path: module for path, module in decoder.named_modules() if _is_mixer(type(module)) and is_text(path)}


def layer_around(decoder: nn.Module, path: str) -> nn.Module | None:
    """Return the outermost decoder layer around the module of this path; None if there is none."""
    module = decoder
    for part in path.split("."):
        is_list = isinstance(module, nn.ModuleList)
        module = getattr(module, part)
        if is_list:
            return module
    return None


def text_layers(decoder: PreTrainedModel) -> list[nn.Module]:
    """List the decoder layers of the text in order; empty if they are not one list of num_hidden_layers."""
    num_layers = getattr(decoder.config, "num_hidden_layers", None)  # BLT's has none
    lists = [
        module
        for path, module in decoder.named_modules()
        if isinstance(module, nn.ModuleList) and is_text(path) and len(module) == num_layers
    ]
    return list(lists[0]) if lists else []


def why_padding_leaks(decoder: PreTrainedModel) -> str | None:
    """Say why padding on the left changes a state in Hugging Face's own batch; None if it does not.

    The input of a mixer is 0 at padding. With a bias its projection is not, and a convolution brings that to the first
    tokens.
    """
    for path, mixer in mixers_of(decoder).items():
        for name, child in mixer.named_children():
            if (
                isinstance(child, nn.Linear)
                and child.bias is not None
                and child.in_features == decoder.config.hidden_size
            ):
                return f"left padding, which reaches the state of {type(mixer).__name__} through {path}.{name}.bias"
    return None


def num_attention_layers(decoder: PreTrainedModel) -> int:
    """Count the decoder layers that attend: all but those whose tokens meet only in a mixer or not at all.

    In Llama 3.2 Vision text skips the layers that attend to images.
    """
    config = decoder.config
    layers = config.num_hidden_layers - len(getattr(config, "cross_attention_layers", None) or ())
    if not mixers_of(decoder):
        return layers
    attending = {id(module) for layer in text_layers(decoder) for module in layer.modules() if attends(type(module))}
    return len(attending)


def _is_mixer(module_class: object) -> bool:
    return not PROTOCOL.isdisjoint(names_in(module_class))


def modules_in(root: nn.Module) -> list[nn.Module]:
    """List a module and those inside, except parametrizations, which get weights and no tokens.

    Faster than `nn.Module.modules`, which calls Python for each.
    """
    found: list[nn.Module] = []
    level = [root]
    while level:
        found += level
        inner = [module._modules for module in level if module._modules]
        children = chain.from_iterable([named.values() for named in inner])
        level = [child for child in children if child is not None and type(child) is not ParametrizationList]
    return found


def text_attention(decoder: nn.Module) -> Iterator[nn.Module]:
    """Yield the attention modules of the text: in the same file a vision tower may get its attention elsewhere."""
    return (module for path, module in decoder.named_modules() if is_attention(module) and is_text(path))


def is_attention(module: nn.Module) -> bool:
    """Return whether a module attends: as Hugging Face's attention, or by its name, which a subclass may change."""
    return attends(type(module)) or any("Attention" in each.__name__ for each in type(module).__mro__)


def name_of(module: nn.Module) -> str:
    """Return what errors call a module of a layer."""
    return f"{type(module).__name__} of layer {getattr(module, 'layer_idx', '?')}"
