"""Refuses what draws at random: a shared token would draw once, but an ordinary batch draws once per copy."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from radixtrain.errors import UserError

__all__ = ["check_drawing_modules", "check_dropout", "check_noise", "draws_in_settings"]

Dropout = nn.modules.dropout._DropoutNd
DRAWS = re.compile(r"drop(out|$)|pdrop|layerdrop|jitter")
NOT_IN_THE_DECODER = re.compile("classifier|summary")


def check_dropout(base: PreTrainedModel, decoder: nn.Module, allowed: tuple[str, ...]) -> None:
    """Refuse a model's random settings and dropout modules, before it trains.

    A dropout module in evaluation mode does not draw. If it does at a later batch, `check_drawing_modules` refuses it.

    base: names the model in errors. decoder: its text decoder. allowed: as `allow_dropout` of `prepare_model`.
    """
    for name, value in _settings(base.config.get_text_config().to_dict()):
        last = name.rpartition(".")[2]
        random = DRAWS.search(last) and not NOT_IN_THE_DECODER.search(last)
        if random and isinstance(value, float) and value > 0 and last not in allowed:
            raise UserError(
                f"{type(base).__name__} has {name}={value}: a shared token would draw once where an ordinary batch "
                f"draws once per copy; set it to 0, or allow it by name: allow_dropout=[{last!r}]"
            )
    for part in (decoder, base.get_output_embeddings()):
        if part is not None:
            check_drawing_modules(part, allowed, root=base)


def check_drawing_modules(decoder: nn.Module, allowed: tuple[str, ...], root: nn.Module | None = None) -> None:
    """Refuse a dropout module that draws. Its own mode decides, since PEFT's start in training mode in any model.

    root: the module that paths in errors start from, default `decoder`.
    """
    for module in _dropouts(decoder, allowed):
        if module.training:
            raise _dropout_refused(root or decoder, module)


def check_noise(decoder: Any, allowed: tuple[str, ...]) -> None:
    """Refuse NEFTune, which adds noise to the embeddings."""
    noise = getattr(decoder.get_input_embeddings(), "neftune_noise_alpha", None)
    if noise and decoder.training and "neftune" not in allowed:
        raise UserError(
            f"NEFTune (neftune_noise_alpha={noise}) draws one noise for a shared token where an ordinary batch "
            f"draws one per copy; remove it, or prepare_model(..., allow_dropout=['neftune'])"
        )


def draws_in_settings(base: PreTrainedModel, name: str) -> bool:
    """Whether a model has this setting, anywhere in its configuration, above 0."""
    settings = _settings(base.config.get_text_config().to_dict())
    return any(value for setting, value in settings if setting.rpartition(".")[2] == name)


def _settings(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every setting by its dotted name, those of nested parts included (DBRX: `ffn_config.moe_jitter_eps`)."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _settings(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _dropouts(root: nn.Module, allowed: tuple[str, ...]) -> Iterator[Dropout]:
    """The dropout modules with p > 0 that no name on their path allows.

    It walks the modules at every pass, which takes 0.3 ms of one core for 28 layers with LoRA (2,385 modules). Counting
    them, `len(list(root.modules()))`, takes 1.0 ms and misses an adapter that replaced another, or another `p`.
    """
    row = [root]
    while row:
        yield from [module for module in row if isinstance(module, Dropout) and module.p > 0]
        inner = [module._modules for module in row if module._modules]
        row = [child for named in inner for name, child in named.items() if name not in allowed and child is not None]


def _dropout_refused(root: nn.Module, module: Dropout) -> UserError:
    path = next(path for path, other in root.named_modules() if other is module)
    return UserError(
        f"dropout p={module.p} at {path!r}: a shared token would draw one mask where an ordinary batch draws one per "
        f"copy; set it to 0 (LoRA: lora_dropout), or allow it by name: allow_dropout=[{_short_name(path)!r}]"
    )


def _short_name(path: str) -> str:
    """`...q_proj.lora_dropout.default` -> `lora_dropout`."""
    parts = path.split(".")
    return next((part for part in reversed(parts) if "drop" in part), parts[-1])
