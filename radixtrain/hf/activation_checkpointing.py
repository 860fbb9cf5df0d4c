"""Activation checkpointing of a share of the decoder layers: these recompute in the backward pass and keep nothing."""

from __future__ import annotations

import logging
from typing import Any

from radixtrain.errors import UserError
from radixtrain.hf.backbone import START_CHECKPOINTING, STOP_CHECKPOINTING, found, parts_of, text_layers

logger = logging.getLogger(__name__)


def num_recomputed(share: float, num_layers: int) -> int:
    """Return the number of layers nearest to a share of them, halves rounded up."""
    return int(share * num_layers + 0.5)


def recomputes(index: int, num_recomputed: int, num_layers: int) -> bool:
    """Return whether a layer recomputes, if that many layers do at even distances.

    The last one is the first to keep its activations: they are used as soon as the backward pass begins.
    """
    num_stored = num_layers - num_recomputed
    return (num_layers - 1 - index) * num_stored % num_layers >= num_stored


def recompute(model: Any, share: float) -> None:
    """Switch on checkpointing in a share of the decoder layers, without reentrance. It can be called again.

    model: a `PreTrainedModel`, or one wrapped by PEFT. share: from 0, which switches it off, to 1, with towers and
    nested blocks.

    UserError if the model has no checkpointing, or has no list of layers to take a share of.
    """
    base, _, decoder = parts_of(model)
    if share == 0:
        found(base, STOP_CHECKPOINTING)()
        return
    if not base.supports_gradient_checkpointing:
        raise UserError(f"model.activation_checkpointing: {type(base).__name__} has none; set it to false")
    found(base, START_CHECKPOINTING)({"use_reentrant": False})
    if share == 1:
        return
    layers: list[Any] = list(dict.fromkeys(text_layers(decoder)))
    if not layers or not all(hasattr(layer, "gradient_checkpointing") for layer in layers):
        raise UserError(
            f"model.activation_checkpointing {share}: the decoder layers of {type(base).__name__} are not one list, of "
            f"which a share could recompute; set it to true or false"
        )
    count = num_recomputed(share, len(layers))
    for index, layer in enumerate(layers):
        for module in layer.modules() if not recomputes(index, count, len(layers)) else ():
            if hasattr(module, "gradient_checkpointing"):
                module.gradient_checkpointing = False
    logger.info("%d of %d decoder layers recompute their activations", count, len(layers))
