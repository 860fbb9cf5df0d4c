"""The model of a run cut to a few layers, with random weights: what `report` times in place of the model itself."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch

from radixtrain.errors import UserError, first_line
from radixtrain.hf.config import read_config
from radixtrain.training.start.loading import auto_class, with_training_options

__all__ = ["layer_period", "random_trainable"]

MAX_PERIOD = 8


def random_trainable(settings: Any, num_layers: int, device: torch.device) -> Any:
    """The model that the settings of a `RadixModule` describe, with the first layers only and random weights.

    It is in training mode, with adapters and activation checkpointing as configured, and not prepared. On the meta
    device nothing is allocated. The global random state does not change. UserError if the model cannot be made so.
    """
    config = _cut(read_config(settings.model_name_or_path), num_layers)
    dtype = getattr(torch, settings.dtype) if settings.dtype != "auto" else config.dtype or torch.float32
    options = {"dtype": dtype, "attn_implementation": settings.attn_implementation}
    drawn_on = [device] if device.type == "cuda" else []  # by default all GPUs of the machine, with a warning
    try:
        with torch.random.fork_rng(drawn_on), device:
            model = auto_class(settings.model_name_or_path).from_config(config, trust_remote_code=False, **options)
            return with_training_options(model, settings).train()
    except (ValueError, ImportError, RuntimeError, IndexError, AttributeError) as error:
        reason = f"{type(config).__name__} cannot be made with {num_layers} layers: {first_line(error)}"
        raise UserError(f"model.model_name_or_path {settings.model_name_or_path!r}: {reason}") from error


def layer_period(config: Any) -> int:
    """Layers after which their kinds repeat, by the configuration's `layer_types`; 1 if it has none.

    The number of layers if they repeat only after more than `MAX_PERIOD`: then no part stands for the whole.
    """
    text = config.get_text_config()
    kinds = getattr(text, "layer_types", None) or [""] * text.num_hidden_layers
    periods = range(1, min(MAX_PERIOD, len(kinds)) + 1)
    return next((n for n in periods if all(kind == kinds[i % n] for i, kind in enumerate(kinds))), len(kinds))


def _cut(config: Any, num_layers: int) -> Any:
    """The configuration with fewer layers; what it lists for each layer is cut too."""
    config = deepcopy(config)
    text = config.get_text_config()
    whole = text.num_hidden_layers
    if num_layers == whole:
        return config
    lists = {name: value for name, value in vars(text).items() if isinstance(value, list) and len(value) == whole}
    for name, value in lists.items():
        setattr(text, name, value[:num_layers])
    text.num_hidden_layers = num_layers
    return config
