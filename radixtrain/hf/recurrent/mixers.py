"""Which modules of a model carry a state from token to token, and which layer each of them belongs to.

A *mixer* is a module whose own code speaks the cache protocol of `running.py`. None is known by its name: its code says
so. A *layer* is a decoder layer, the element of an `nn.ModuleList`.
"""

from __future__ import annotations

import inspect
import re

from torch import nn
from transformers import PreTrainedModel

from radixtrain.hf.backbone import is_text
from radixtrain.hf.class_code import attends, names_in

PROTOCOL = {f"{verb}_{kind}_state" for verb in ("get", "update") for kind in ("conv", "recurrent")}  # of a cache
CACHE = re.compile("cache|past|^state$")  # in the name of an argument of forward
MIXES_TOKENS = (nn.Conv1d, nn.RNNBase, nn.MultiheadAttention)


def mixers_of(decoder: nn.Module) -> dict[str, nn.Module]:
    """The mixers of the text, by path; empty for a model whose layers only attend."""
    return {path: module for path, module in decoder.named_modules() if is_text(path) and _is_mixer(type(module))}


def layer_around(decoder: nn.Module, path: str) -> nn.Module | None:
    """The outermost decoder layer around the module of this path; None if there is none."""
    module = decoder
    for part in path.split("."):
        is_list = isinstance(module, nn.ModuleList)
        module = getattr(module, part)
        if is_list:
            return module
    return None


def text_layers(decoder: PreTrainedModel) -> list[nn.Module]:
    """The decoder layers of the text in order; empty if they are not one list of num_hidden_layers."""
    num_layers = getattr(decoder.config, "num_hidden_layers", None)  # BLT's has none
    lists = [
        module
        for path, module in decoder.named_modules()
        if isinstance(module, nn.ModuleList) and is_text(path) and len(module) == num_layers
    ]
    return list(lists[0]) if lists else []


def why_padding_leaks(decoder: PreTrainedModel) -> str | None:
    """Why padding on the left changes a state in Hugging Face's own batch; None if it does not.

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
    """The decoder layers that attend: all, but for those whose tokens meet only in a mixer or not at all.

    In Llama 3.2 Vision text skips the layers that attend to images.
    """
    config = decoder.config
    layers = config.num_hidden_layers - len(getattr(config, "cross_attention_layers", None) or ())
    if not mixers_of(decoder):
        return layers
    attending = {id(module) for layer in text_layers(decoder) for module in layer.modules() if attends(type(module))}
    return len(attending)


def forks_or_keeps_apart(layer: nn.Module) -> bool:
    """Whether the tokens of a layer meet in a mixer, or not at all: no module in it takes a cache or mixes tokens."""
    inside = [module for module in layer.modules() if module is not layer]
    return any(_is_mixer(type(module)) for module in inside) or not any(map(_mixes_tokens, inside))


def _mixes_tokens(module: nn.Module) -> bool:
    """Whether tokens may meet in a module: it convolves or attends, or its `forward` takes a cache."""
    takes = inspect.signature(type(module).forward).parameters
    return isinstance(module, MIXES_TOKENS) or any(map(CACHE.search, takes))


def _is_mixer(module_class: object) -> bool:
    return not PROTOCOL.isdisjoint(names_in(module_class))
