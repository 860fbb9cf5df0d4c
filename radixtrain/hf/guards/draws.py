"""Refuses random draws: a shared token would draw once, but an ordinary batch draws once per copy.

`without_dropout` and `evaluating` turn draws off for a while, to compare or to measure.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from transformers import PreTrainedModel

from radixtrain.errors import UserError
from radixtrain.hf.backbone import Parts, pretrained_model_of

DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
DRAWS = re.compile(r"drop(out|$)|pdrop|layerdrop|jitter")
NOT_IN_THE_DECODER = re.compile("classifier|summary")


def check_dropout(parts: Parts, allowed: tuple[str, ...]) -> None:
    """Refuse a model's random settings and dropout modules, before it trains.

    A dropout module in evaluation mode passes. If it draws at a later batch, `check_drawing_modules` refuses it.

    allowed: as `allow_dropout` of `share_prefixes`.
    """
    for name, value in _settings(parts.base):
        last = name.rpartition(".")[2]
        is_random = DRAWS.search(last) and not NOT_IN_THE_DECODER.search(last)
        if is_random and isinstance(value, float) and value > 0 and last not in allowed:
            raise UserError(
                f"{parts.name} has {name}={value}: a shared token would draw once, but an ordinary batch draws once "
                f"per copy; set it to 0 before the model is made, or allow it by name: allow_dropout=[{last!r}]"
            )
    for part in (parts.decoder, parts.head):
        if part is not None:
            check_drawing_modules(part, allowed, root=parts.base)


def check_drawing_modules(decoder: nn.Module, allowed: tuple[str, ...], root: nn.Module | None = None) -> None:
    """Refuse a dropout module that draws. Its own mode decides, since PEFT's start in training mode in any model.

    root: the module that paths in errors start from, default `decoder`.
    """
    for module in _dropouts(decoder, allowed):
        if module.training:
            raise _dropout_refused(root or decoder, module)


def check_draws(decoder: PreTrainedModel, head: Any, allowed: tuple[str, ...], has_noise: bool = True) -> None:
    """Refuse what draws at random in this forward pass. has_noise: whether embeddings may have some of NEFTune's."""
    if has_noise:
        _check_noise(decoder, allowed)
    for part in (decoder, head):
        if part is not None:
            check_drawing_modules(part, allowed)


def _check_noise(decoder: PreTrainedModel, allowed: tuple[str, ...]) -> None:
    """Refuse NEFTune, which adds noise to the embeddings."""
    noise = getattr(decoder.get_input_embeddings(), "neftune_noise_alpha", None)
    if noise and decoder.training and "neftune" not in allowed:
        raise UserError(
            f"NEFTune (neftune_noise_alpha={noise}) draws one noise for a shared token, but an ordinary batch "
            f"draws one per copy; remove it, or allow it by name: allow_dropout=['neftune']"
        )


def generator_states(device: torch.device) -> list[Tensor]:
    """Return the states of the generators from which a pass on this device draws."""
    of_device = [] if device.type == "cpu" else [torch.get_device_module(device).get_rng_state(device)]
    return [torch.get_rng_state(), *of_device]


def has_drawn(device: torch.device, before: Sequence[Tensor]) -> bool:
    """Return whether a pass has drawn since `generator_states` returned these."""
    with _disable_current_modes():  # the states have values, also if a mode takes those of the model for fakes
        return not all(map(torch.equal, before, generator_states(device)))


def set_generator_states(device: torch.device, states: Sequence[Tensor]) -> None:
    torch.set_rng_state(states[0])
    for state in states[1:]:
        torch.get_device_module(device).set_rng_state(state, device)


def number_that_draws(decoder: nn.Module) -> str:
    """Name a number by which a module may draw, such as `layers.0.dropout=0.1`; empty without any.

    PEFT's layers hold one for each adapter, by its name.
    """
    for path, module in decoder.named_modules():
        for name, value in vars(module).items():
            numbers = value.values() if isinstance(value, dict) else [value]
            if DRAWS.search(name) and (number := next((n for n in numbers if isinstance(n, float) and n), None)):
                return f"{path}.{name}={number}"
    return ""


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Set evaluation mode, then give every module its own mode back.

    A module has one mode for all threads: if it changed, another thread that calls the model gets a UserError.
    """
    training, thread = [module for module in model.modules() if module.training], get_ident()

    def check(*_: object) -> None:
        if get_ident() != thread:
            raise UserError(
                f"another thread has temporarily put {type(model).__name__} into evaluation mode (generate does so), "
                f"in which dropout would not draw: wait for it to finish, or call model.eval() first"
            )

    if not training:
        yield
        return
    hook = model.register_forward_pre_hook(check)
    model.eval()
    try:
        yield
    finally:
        hook.remove()
        for module in training:
            module.training = True


@contextmanager
def without_dropout(model: nn.Module, allowed: Collection[str]) -> Iterator[None]:
    """Switch off all random draws for a while, so that two passes can be compared.

    model: a `PreTrainedModel`, or one wrapped by PEFT; any module if nothing is allowed. allowed: as `allow_dropout` of
        `share_prefixes`.

    Dropout modules get p = 0. What draws and is not a module stops only in evaluation mode, which is set if `allowed`
    names it.
    """
    modules = [(module, module.p) for module in model.modules() if isinstance(module, DROPOUTS)]
    with evaluating(model) if allowed and _draws_beyond_modules(model, allowed) else nullcontext():
        for module, _ in modules:
            module.p = 0.0
        try:
            yield
        finally:
            for module, p in modules:
                module.p = p


def _draws_beyond_modules(model: nn.Module, allowed: Collection[str]) -> bool:
    """Return whether an allowed name is NEFTune or a setting, of the model or an adapter, without a dropout module."""
    drawing = {name.rpartition(".")[2] for name, value in _settings(pretrained_model_of(model)) if value}
    return any(name == "neftune" or name in drawing or _draws_in_adapters(model, name) for name in allowed)


def _draws_in_adapters(model: nn.Module, setting: str) -> bool:
    """Return whether an adapter draws at random by this setting, and not in a dropout module of this name."""
    adapters = (getattr(model, "peft_config", None) or {}).values()
    paths = (path.split(".") for path, module in model.named_modules() if isinstance(module, DROPOUTS))
    return any(getattr(each, setting, None) for each in adapters) and not any(setting in path for path in paths)


def _settings(base: PreTrainedModel) -> Iterator[tuple[str, Any]]:
    """Yield every setting of the text by its dotted name, also of nested parts (DBRX: `ffn_config.moe_jitter_eps`)."""

    def dotted(config: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
        for name, value in config.items():
            if isinstance(value, Mapping):
                yield from dotted(value, f"{prefix}{name}.")
            else:
                yield f"{prefix}{name}", value

    return dotted(base.config.get_text_config().to_dict(), "")


def _dropouts(root: nn.Module, allowed: tuple[str, ...]) -> Iterator[Any]:
    """Yield the dropout modules with p > 0 that no name on their path allows.

    It walks the modules at every pass, which takes 0.3 ms of one core for 28 layers with LoRA (2,385 modules).
    """
    level = [root]
    while level:
        yield from [module for module in level if module.__dict__.get("p") and isinstance(module, DROPOUTS)]
        inner = [module._modules for module in level if module._modules]
        level = [child for named in inner for name, child in named.items() if name not in allowed and child is not None]


def _dropout_refused(root: nn.Module, module: nn.Module) -> UserError:
    path = next(path for path, other in root.named_modules() if other is module)
    parts = path.split(".")  # ...q_proj.lora_dropout.default -> lora_dropout
    name = next((part for part in reversed(parts) if "drop" in part), parts[-1])
    return UserError(
        f"dropout p={module.p} at {path!r}: a shared token would draw one mask, but an ordinary batch draws one per "
        f"copy; set it to 0 (LoRA: lora_dropout), or allow it by name: allow_dropout=[{name!r}]"
    )
