"""How many layers of a decoder attend, carry a state, or have an MLP: a hybrid model has layers of several kinds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from radixtrain.hf.recurrent.mixers import attends, mixers_of, text_layers

__all__ = ["ALIKE", "LayerKinds", "kinds_of_mixers"]


@dataclass(frozen=True, kw_only=True)
class LayerKinds:
    """What the mean layer has: 1, 1 and 0 in a model without recurrent layers.

    attention, mlps: layers that attend, and those with an MLP or experts, over all layers.
    mixers: modules with a recurrent state, over all layers.
    """

    attention: float = 1.0
    mlps: float = 1.0
    mixers: float = 0.0

    @classmethod
    def of(cls, decoder: Any) -> LayerKinds:
        """Counted in the layers of a text decoder; a module that several layers share counts for each of them."""
        num_mixers, layers = len(mixers_of(decoder)), text_layers(decoder)
        if not num_mixers or not layers:
            return ALIKE
        attention = sum(any(attends(type(module)) for module in layer.modules()) for layer in layers)
        mlps = sum(map(_has_mlp, layers))
        return cls(attention=attention / len(layers), mlps=mlps / len(layers), mixers=num_mixers / len(layers))


ALIKE = LayerKinds()  # as in a model without recurrent layers


def kinds_of_mixers(decoder: Any) -> list[tuple[nn.Module, int]]:
    """One mixer of each kind, and how many there are: same class, same shapes."""
    kinds: dict[tuple[Any, ...], list[nn.Module]] = {}
    for mixer in mixers_of(decoder).values():
        shapes = tuple((name, tuple(parameter.shape)) for name, parameter in mixer.named_parameters())
        kinds.setdefault((type(mixer), shapes), []).append(mixer)
    return [(alike[0], len(alike)) for alike in kinds.values()]


def _has_mlp(layer: nn.Module) -> bool:
    """Whether there is a matrix outside of attention and mixers."""
    mixers: Mapping[str, nn.Module] = mixers_of(layer)
    mixing = [*mixers.values(), *(module for module in layer.modules() if attends(type(module)))]
    inside = {id(parameter) for module in mixing for parameter in module.parameters()}
    return any(parameter.ndim > 1 and id(parameter) not in inside for parameter in layer.parameters())
