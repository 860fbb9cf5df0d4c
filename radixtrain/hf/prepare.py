"""Hugging Face models on unique tokens: `prepare_model` installs the hooks, `restore_model` removes them.

transformers >= 5 gives every hook that is needed:

- the attention functions that every layer calls are registered by name (`radixtrain/hf/attention.py`), and which
  window a layer has is read from its mask (`radixtrain/hf/windows.py`);
- hooks on the backbone and on the head turn a radix batch into what the layers need (`radixtrain/hf/hooks.py`).

No code of a model is changed. Whatever would change the gradient is refused, here and at every batch
(`radixtrain/hf/refusals.py`). A radix batch on any other attention would train silently with a wrong mask: Hugging Face
reads a jump in the positions as the start of a new packed document. So the hooks check that our attention is set, and
that every layer ran it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import nn
from torch.utils.hooks import RemovableHandle

from radixtrain.collators.unprepared import PREPARED, allow_watch, end_watch
from radixtrain.errors import UserError
from radixtrain.hf.adapters import check_adapters
from radixtrain.hf.attention import ATTENTION_NAME, EAGER_NAME, register_attention
from radixtrain.hf.backbone import Parts, backbone_of, parts_of, pretrained_model_of
from radixtrain.hf.hooks import BackboneHooks
from radixtrain.hf.refusals import check_choice, check_model, not_reached

__all__ = ["prepare_model", "prepared_options", "restore_model"]

STATE = "_radixtrain_state"
ModelT = TypeVar("ModelT", bound=nn.Module)


@dataclass(frozen=True)
class _State:
    """What `restore_model` needs.

    options: keyword arguments of `prepare_model`. previous: each part's configuration and its attention before.
    """

    options: dict[str, Any]
    previous: list[tuple[Any, str]]
    handles: list[RemovableHandle]


def prepare_model(
    model: ModelT, *, attention: str = "auto", kernel: str = "auto", allow_dropout: Iterable[str] = ()
) -> ModelT:
    """Make a model accept the batches of a `RadixCollator`, and still the ordinary ones. Returns the same model.

    model: a `PreTrainedModel` for causal language modelling, its bare backbone, or one wrapped by PEFT. In a multimodal
        model the text decoder is prepared: text shares, ordinary batches with images run as before. Preparing again
        replaces the earlier choice.
    attention: `auto`, `cascade`, `path`, `expand`, `reference` or `tree`; see `radixtrain.attention`. With `auto`, a
        collator that has a `step_cost` chooses for each batch.
    kernel: `auto`, `torch`, `flash_attn`, `flash_attn_3` or `eager`.
    allow_dropout: names of what may draw at random: a dropout module or a module around it, by one part of its path
        without dots (such as `lora_dropout`), or a setting of the model or of an adapter. A shared token then draws
        once, while an ordinary batch draws once per copy: still dropout, but no longer the same gradient.

    Soft-capping, sinks, sliding windows, latent attention and router losses (`output_router_logits`) are computed
    exactly.

    Raises UserError, naming the layer and the reason, for a class whose head or loss does not predict next tokens, for
    attention that is not exact (linear or sparse attention, attention dropout), for positions that are not counted
    from 0, for adapters that do not compute each token by itself, for a dropout > 0 that draws and is not allowed, and
    for an attention or kernel that cannot run. What depends on the batch, or is added later, is refused at the first
    batch that it would change.
    """
    allowed = tuple(allow_dropout)
    parts = parts_of(model)
    check_adapters(model.modules(), allowed)
    check_model(parts, allowed)
    check_choice(parts.decoder, attention, kernel)
    restore_model(model)
    _check_owner(parts.backbone)
    previous = _set_attention(parts)
    hooks = BackboneHooks(parts.base, attention, kernel, _num_text_layers(parts.decoder.config), allowed)
    options = {"attention": attention, "kernel": kernel, "allow_dropout": allowed}
    setattr(parts.base, STATE, _State(options, previous, hooks.install(parts.backbone)))
    setattr(parts.backbone, PREPARED, True)
    end_watch()
    return model


def prepared_options(model: nn.Module) -> dict[str, Any] | None:
    """The keyword arguments that `prepare_model` was given, or None for a model that is not prepared."""
    state = getattr(pretrained_model_of(model), STATE, None)
    return None if state is None else state.options


def restore_model(model: ModelT) -> ModelT:
    """Undo `prepare_model`: removes the hooks and sets the attention back. Any other model is not changed."""
    base = pretrained_model_of(model)
    state = getattr(base, STATE, None)
    if state is not None:
        for handle in state.handles:
            handle.remove()
        delattr(base, STATE)
        delattr(backbone_of(base), PREPARED)
        _set_back(state.previous)
        allow_watch()
    return model


def _check_owner(backbone: nn.Module) -> None:
    """Refuse a backbone that was prepared by itself, or with another model around it: two sets of hooks would run."""
    if hasattr(backbone, PREPARED):
        raise UserError(
            f"{type(backbone).__name__} is prepared already, by itself or with another model around it; call "
            f"restore_model with what was prepared first"
        )


def _num_text_layers(config: Any) -> int:
    """The layers that text runs through: in Llama 3.2 Vision it skips those that attend to images."""
    return config.num_hidden_layers - len(getattr(config, "cross_attention_layers", None) or ())


def _set_attention(parts: Parts) -> list[tuple[Any, str]]:
    """Set our attention in every part of the model. Returns each part's configuration, and its attention before."""
    previous = [(config, config._attn_implementation) for config in _configs(parts.base.config)]
    register_attention()
    is_eager = parts.decoder.config._attn_implementation == "eager" or not parts.decoder._supports_sdpa
    name = EAGER_NAME if is_eager else ATTENTION_NAME
    parts.base.set_attn_implementation(name)
    if parts.decoder.config._attn_implementation != name:
        _set_back(previous)
        raise not_reached(parts)
    return previous


def _configs(config: Any) -> Iterator[Any]:
    """A configuration and those of its parts."""
    yield config
    for name in config.sub_configs:
        part = getattr(config, name, None)
        if part is not None:
            yield from _configs(part)


def _set_back(previous: list[tuple[Any, str]]) -> None:
    """Set back the attention of every part, except a part whose attention the user has changed since."""
    for config, implementation in previous:
        if config._attn_implementation in (ATTENTION_NAME, EAGER_NAME):
            config._attn_implementation_internal = implementation
