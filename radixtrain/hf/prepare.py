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
from typing import Any, TypeVar

from torch import nn

from radixtrain.errors import UserError
from radixtrain.hf.adapters import check_adapters
from radixtrain.hf.attention import ATTENTION_NAME, EAGER_NAME, register_attention
from radixtrain.hf.backbone import backbone_of, pretrained_model_of, text_decoder_of
from radixtrain.hf.hooks import BackboneHooks
from radixtrain.hf.refusals import check_choice, check_model, not_reached

__all__ = ["ATTENTION_NAME", "backbone_of", "prepare_model", "prepared_options", "pretrained_model_of", "restore_model"]

STATE = "_radixtrain"
ModelT = TypeVar("ModelT", bound=nn.Module)


def prepare_model(
    model: ModelT, *, attention: str = "auto", kernel: str = "auto", allow_dropout: Iterable[str] = ()
) -> ModelT:
    """Make a model accept the batches of a `RadixCollator`, and still the ordinary ones. Returns the same model.

    model: a `PreTrainedModel` for causal language modelling, its bare backbone, or one wrapped by PEFT. In a multimodal
        model the text decoder is prepared: rows of text share, rows with images run as ordinary batches. Preparing
        again replaces the earlier choice.
    attention: `auto`, `cascade`, `path`, `expand` or `reference`; see `radixtrain.attention`. With `auto`, batches of a
        collator that has a `step_cost` bring their own choice.
    kernel: `auto`, `torch`, `flash_attn`, `flash_attn_3` or `eager`.
    allow_dropout: names to accept: of a dropout module or a module around it, one part of its path without dots (such
        as `lora_dropout`), or of a random setting of the model or of an adapter. A shared token then draws once, while
        an ordinary batch draws once per copy: still dropout, but no longer the same gradient.

    Soft-capping, sinks, sliding windows, latent attention and router losses (`output_router_logits`) are computed
    exactly.

    Raises UserError, naming the layer and the reason, for a class whose head or loss does not predict next tokens, for
    attention that is not exact (linear or sparse attention, attention dropout), for positions that are not counted
    from 0, for adapters that do not compute each token by itself, for a dropout > 0 that draws and is not allowed, and
    for a choice that cannot be met. What depends on the batch, or is added later, is refused at the first batch that it
    would change.
    """
    allowed = tuple(allow_dropout)
    base = pretrained_model_of(model)
    backbone = backbone_of(model)
    decoder = text_decoder_of(backbone)
    check_adapters(model.modules(), allowed)
    check_model(base, backbone, decoder, allowed)
    check_choice(decoder, attention, kernel)
    restore_model(model)
    _check_owner(backbone)
    previous = [(config, config._attn_implementation) for config in _configs(base.config)]
    register_attention()
    eager = decoder.config._attn_implementation == "eager" or not decoder._supports_sdpa
    name = EAGER_NAME if eager else ATTENTION_NAME
    base.set_attn_implementation(name)
    if decoder.config._attn_implementation != name:
        _set_back(previous)
        raise not_reached(base)
    for_images = getattr(decoder.config, "cross_attention_layers", None) or ()  # Llama 3.2 Vision: text skips them
    num_layers = decoder.config.num_hidden_layers - len(for_images)
    hooks = BackboneHooks(base, attention, kernel, num_layers, allowed)
    handles = [
        backbone.register_forward_pre_hook(hooks.before, with_kwargs=True),
        backbone.register_forward_hook(hooks.after, with_kwargs=True),
    ]
    head = base.get_output_embeddings()
    if head is not None:
        handles += [
            base.register_forward_pre_hook(hooks.head.enter),
            base.register_forward_hook(hooks.head.leave),
            head.register_forward_pre_hook(hooks.head.at_head),
        ]
    options = {"attention": attention, "kernel": kernel, "allow_dropout": allowed}
    setattr(base, STATE, (previous, handles, options))
    return model


def prepared_options(model: nn.Module) -> dict[str, Any] | None:
    """The keyword arguments that `prepare_model` was given, or None for a model that is not prepared."""
    state = getattr(pretrained_model_of(model), STATE, None)
    return None if state is None else state[2]


def restore_model(model: ModelT) -> ModelT:
    """Undo `prepare_model`: removes the hooks and sets the attention back. Any other model is not changed."""
    base = pretrained_model_of(model)
    if hasattr(base, STATE):
        previous, handles, _ = getattr(base, STATE)
        for handle in handles:
            handle.remove()
        delattr(base, STATE)
        _set_back(previous)
    return model


def _check_owner(backbone: nn.Module) -> None:
    """Refuse a backbone that was prepared by itself, or with another model around it: two sets of hooks would run."""
    owners = [getattr(hook, "__self__", None) for hook in backbone._forward_pre_hooks.values()]
    if any(isinstance(owner, BackboneHooks) for owner in owners):
        raise UserError(
            f"{type(backbone).__name__} is prepared already, by itself or with another model around it; call "
            f"restore_model with what was prepared first"
        )


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
