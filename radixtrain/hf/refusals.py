"""Refuses whatever would change the gradient. Errors name the model or the layer, the reason and the fix.

Once, when a model is prepared, by its class, its configuration and its modules (`check_model`, `check_choice`); and on
every radix batch, by what depends on the batch or was added since (`check_pass`): a trainer may add adapters with
dropout, or noise on the embeddings, after `prepare_model`. What a layer asks its attention function for is checked in
`attention_interface.py`, random draws in `dropout.py`, positions in `positions.py`, adapters in `adapters.py`.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.models.auto import modeling_auto

from radixtrain.attention import STRATEGIES, choose_attention
from radixtrain.errors import TRAIN_WITHOUT_SHARING, UserError
from radixtrain.hf.attention_interface import take_over
from radixtrain.hf.backbone import Parts, is_text, pretrained_model_of
from radixtrain.hf.class_code import attends, names_in
from radixtrain.hf.dropout import check_drawing_modules, check_dropout, check_noise
from radixtrain.hf.model_dims import ModelDimensions
from radixtrain.hf.positions import check_model_positions, check_position, positions_in_table, why_padding_matters
from radixtrain.hf.probes import check_transformers
from radixtrain.hf.recurrent.mixers import (
    forks_or_keeps_apart,
    mixers_of,
    num_attention_layers,
    text_layers,
)
from radixtrain.hf.windows import chunk_of
from radixtrain.tree.context import WITH_CONTEXT
from radixtrain.tree.layout import TreeLayout
from radixtrain.tree.radix_inputs import RADIX
from radixtrain.versions import before

CAUSAL_CLASSES = {
    name
    for mapping in (
        modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    )
    for name in mapping.values()
}
CAUSAL_ENDINGS = ("ForCausalLM", "LMHeadModel")  # of classes that transformers does not list
EXACT_LAYERS = ("full_attention", "attention", "sliding_attention", "chunked_attention")  # see `_check_chunks`
NOT_NEXT_TOKENS = {  # classes that are called causal all the same
    "WhisperForCausalLM": "its loss takes labels that are shifted already",
    "MusicgenForCausalLM": "its rows are several codebooks",
    "MusicgenMelodyForCausalLM": "its rows are several codebooks",
}
STATEFUL = re.compile("linear|recurrent|mamba|conv|hybrid")  # in the name of a layer's kind
NO_PROTOCOL = (
    "whose state from token to token does not go through Hugging Face's cache (get_recurrent_state, "
    f"update_recurrent_state), so it cannot fork where rows branch{before('recurrent states that fork')}"
)
GENERATE_WITHOUT_SHARING = "use model.generate"
NOT_COMPUTED = {"index_topk": "sparse attention (an indexer picks keys)", "keep_window_size": "a dynamic mask"}


def check_model(parts: Parts, allowed: tuple[str, ...], any_head: bool) -> None:
    """Refuse a model that cannot compute unique tokens exactly, as far as this is known before the first batch.

    allowed: as `allow_dropout` of `prepare_model`. any_head: False for the batches of a `RadixCollator`, whose labels
    are next tokens.
    """
    check_transformers()
    _check_decoder(parts)
    if not any_head and (reason := why_not_next_tokens(parts)):
        raise UserError(reason)
    _check_states(parts.name, parts.decoder)
    _check_layers(parts.name, parts.decoder)
    _check_attention(parts.name, parts.decoder.config)
    if dropout := getattr(parts.decoder.config, "attention_dropout", 0.0):
        raise UserError(
            f"{parts.name} has attention_dropout={dropout}: a shared token would draw one mask, but an ordinary batch "
            f"draws one per copy; set attention_dropout to 0"
        )
    if any_head:
        _check_causal(parts)
        if parts.name.endswith("ForQuestionAnswering"):  # its loss is a softmax over whole rows
            raise UserError(
                f"{parts.name} chooses a span among all places of a row, those of padding included, which "
                f"share_prefixes does not compute; train it without share_prefixes"
            )
    _check_reached(parts)
    if not any_head:
        check_own_attention(parts.name, parts.decoder)
    check_model_positions(parts)
    check_dropout(parts, allowed)
    if not any_head and (reason := why_no_radix_batch(parts)):
        raise UserError(reason)


@contextmanager
def in_words_of_generation() -> Iterator[None]:
    """Inside, an error that advises to train without sharing advises to generate without it."""
    try:
        yield
    except UserError as error:
        if TRAIN_WITHOUT_SHARING not in str(error):
            raise
        raise UserError(str(error).replace(TRAIN_WITHOUT_SHARING, GENERATE_WITHOUT_SHARING)) from None


@in_words_of_generation()
def check_generation(parts: Parts, longest: int) -> None:
    """Refuse a model that cannot generate from stored keys and values exactly.

    longest: tokens of the longest prompt and its answer, without the last one, which is never computed.
    """
    check_transformers()
    _check_decoder(parts)
    reason = why_not_next_tokens(parts)
    if reason:
        raise UserError(f"{reason.partition(':')[0]}; generation needs a model as AutoModelForCausalLM loads it")
    if parts.head is None:
        raise UserError(f"{parts.name} has no head that predicts next tokens; load it with AutoModelForCausalLM")
    _check_states(parts.name, parts.decoder)
    _check_layers(parts.name, parts.decoder)
    check_cacheable(parts, TRAIN_WITHOUT_SHARING)
    _check_attention(parts.name, parts.decoder.config)
    _check_reached(parts)
    check_own_attention(parts.name, parts.decoder)
    check_model_positions(parts)
    _check_chunks(parts.decoder, longest)
    check_position(parts.decoder, longest - 1)
    table = positions_in_table(parts.decoder)
    if table is not None and longest > table:
        raise UserError(
            f"{parts.name} has a table of {table} positions, and the longest prompt with its answer would have "
            f"{longest + 1} tokens; lower max_new_tokens, or set max_length to {table + 1}"
        )


def check_cacheable(parts: Parts, instead: str) -> None:
    """Refuse a model of which keys and values do not say all, or are on several devices. instead: what to do."""
    if mixers_of(parts.decoder):
        raise UserError(
            f"{parts.name} has recurrent layers, whose state is not kept by a cache of keys and values; {instead}"
        )
    devices = {str(parameter.device) for parameter in parts.base.parameters()}
    if len(devices) > 1 or "meta" in devices:
        raise UserError(
            f"{parts.name} has weights on {', '.join(sorted(devices))}, and a cache of keys and values needs all of "
            f"them on one device: load it without a device_map, or {instead}"
        )


def why_not_across(parts: Parts, attention: str, allowed: Sequence[str]) -> str | None:
    """Why a prefix cannot be kept from one micro-batch to the next; None if it can. Arguments: of `prepare_model`."""
    layers = text_layers(parts.decoder)
    if mixers_of(parts.decoder):
        return f"{parts.name} has recurrent layers, whose states are not kept from one micro-batch to the next"
    attending = sum(_is_attention(module) and is_text(path) for path, module in parts.decoder.named_modules())
    runs_again = len(set(map(id, layers))) < len(layers) or 0 < attending < num_attention_layers(parts.decoder)
    if runs_again or _attends_twice(parts.decoder):
        return f"{parts.name} attends several times with one module, and keys are kept once for each"
    if attention not in ("auto", *WITH_CONTEXT):
        return f"attention {attention!r} cannot attend to rows of an earlier micro-batch; auto, cascade and path can"
    if allowed:
        return f"a kept prefix is computed twice, and what allow_dropout={list(allowed)} names would draw twice"
    return None


def _attends_twice(decoder: Any) -> bool:
    """Whether some layer calls its attention function several times (DiffLlama), judged by its source.

    Only to say it early: one that is not seen here is refused at its first pass (`BackboneHooks.after`).
    """
    with suppress(OSError, TypeError):  # no source
        sources = (inspect.getsource(each.forward) for each in _attention_classes(decoder))
        return any(source.count("attention_interface(") > 1 for source in sources)
    return False


def check_choice(decoder: Any, attention: str, kernel: str) -> None:
    """Refuse an unknown name, and a kernel that does not run on the device where the model is now."""
    if attention not in ("auto", *STRATEGIES) or kernel != "auto":
        weight = next(decoder.parameters())
        softcap = getattr(decoder.config, "attn_logit_softcapping", None) is not None
        head_dim = ModelDimensions.of(decoder.config).widest_head_dim
        choose_attention(attention, kernel, weight.device, weight.dtype, head_dim, softcap=softcap)


def check_pass(decoder: Any, head: Any, layout: TreeLayout, left_padded: bool, allowed: tuple[str, ...]) -> None:
    """Refuse what makes this forward pass inexact, although the model could be prepared.

    left_padded: whether a feature of the batch was padded on the left and had no positions.
    """
    _check_chunks(decoder, layout.max_seqlen)
    check_position(decoder, layout.max_position)
    reason = why_padding_matters(decoder) if left_padded else None
    if reason:
        raise UserError(
            f"a feature is padded on the left, so Hugging Face counts its positions from the padding, and "
            f"{type(decoder).__name__} has {reason}; leave the padding to the collator, or give position_ids"
        )
    check_draws(decoder, head, allowed)


def check_draws(decoder: Any, head: Any, allowed: tuple[str, ...]) -> None:
    """Refuse what draws at random in this forward pass."""
    check_noise(decoder, allowed)
    for part in (decoder, head):
        if part is not None:
            check_drawing_modules(part, allowed)


def check_own_attention(name: str, decoder: Any) -> None:
    """Refuse attention of which a plan does not know what it computes. name: of the model, in the error."""
    if reason := why_other_attention(decoder):
        raise UserError(f"{name}: {reason}, and tree attention would compute something else; {TRAIN_WITHOUT_SHARING}")


def why_other_attention(decoder: Any) -> str | None:
    """Why the attention that a decoder would run now is not what tree attention computes; None if it is.

    `share_prefixes` asks it at every call, and leaves a call with other attention as it is.
    """
    if not getattr(decoder.config, "is_causal", True):
        return "its configuration says is_causal=False"
    return _why_no_soft_cap(decoder.config) or take_over(decoder)


def _check_reached(parts: Parts) -> None:
    """Refuse a model none of whose attention layers takes its function from AttentionInterface."""
    classes = _attention_classes(parts.decoder)
    if classes and not any(map(attends, classes)):
        raise UserError(
            f"{parts.name} does not take its attention from AttentionInterface, so its layers cannot be reached; "
            f"{TRAIN_WITHOUT_SHARING}"
        )


def _check_decoder(parts: Parts) -> None:
    """Refuse a model that is not one causal decoder with a head after it."""
    if getattr(parts.base.config, "is_encoder_decoder", False):
        raise UserError(f"{parts.name} is not a plain decoder, but an encoder and a decoder; {TRAIN_WITHOUT_SHARING}")
    if not isinstance(parts.decoder, PreTrainedModel):
        raise UserError(
            f"{parts.name} has its layers in a {type(parts.decoder).__name__}, which is no PreTrainedModel, so they "
            f"cannot be reached; if that wraps one, prepare the model before it is wrapped; otherwise "
            f"{TRAIN_WITHOUT_SHARING}"
        )
    if parts.decoder is not parts.base and parts.decoder.get_output_embeddings() is not None:
        path = next(path for path, module in parts.base.named_modules() if module is parts.decoder)
        raise UserError(
            f"{parts.name} contains a whole language model with a head of its own ({path}, a "
            f"{type(parts.decoder).__name__}), so the rows that predict cannot be picked before the head; for rows of "
            f"text prepare that one: prepare_model(model.{path})"
        )


def why_not_next_tokens(parts: Parts) -> str | None:
    """Why this class cannot use the labels of a `RadixCollator`; None if its head predicts next tokens.

    A bare backbone is not refused, because its head is the user's own.
    """
    name = parts.name
    ancestors = [each.__name__ for each in type(parts.base).__mro__]
    is_causal = any(each in CAUSAL_CLASSES or each.endswith(CAUSAL_ENDINGS) for each in ancestors)
    if not is_causal and parts.backbone is not parts.base:
        return (
            f"{name} is not a causal language model: the labels of a RadixCollator are next tokens, which its head and "
            f"its loss do not expect. Use a ...ForCausalLM class, or share_prefixes(model) with ordinary batches"
        )
    excluded = (why for each, why in NOT_NEXT_TOKENS.items() if each in ancestors)
    return next((f"{name} does not predict next tokens: {why}" for why in excluded), None)


def why_no_radix_batch(parts: Parts) -> str | None:
    """Why a model cannot use the batches of a `RadixCollator`; None if it can."""
    if reason := why_not_next_tokens(parts):
        return reason
    if _passes_on(parts):
        return None
    return (
        f"{parts.name} does not pass the entries of a radix batch on to its {type(parts.backbone).__name__}"
        f"{before('keyword arguments from model to backbone')}; use share_prefixes(model) with ordinary batches"
    )


def _passes_on(parts: Parts) -> bool:
    """Whether keyword arguments of the model reach its backbone, before which a call with one is stopped."""
    reached: list[bool] = []

    def stop(backbone: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        reached.append(RADIX in kwargs)
        raise InterruptedError

    ids = torch.ones(1, 1, dtype=torch.long)  # on no device: nothing computes with them
    handle = parts.backbone.register_forward_pre_hook(stop, prepend=True, with_kwargs=True)
    with suppress(Exception), torch.no_grad():  # a model that expects other inputs may raise anything
        parts.base.forward(ids, **{RADIX: None})
    handle.remove()
    return all(reached)


def _check_layers(name: str, decoder: Any) -> None:
    """Refuse layers of a kind that is not computed exactly. name: the class of the model.

    A layer is computed exactly if its tokens meet in attention, in a mixer that speaks Hugging Face's cache protocol,
    or not at all.
    """
    config = decoder.config
    if not hasattr(config, "num_hidden_layers"):
        raise UserError(
            f"{name} is not a plain decoder (one stack of num_hidden_layers); train it without sharing (fit: dedup: "
            f"false)"
        )
    layers, layer_types = text_layers(decoder), getattr(config, "layer_types", None) or ()
    mixers = set(mixers_of(decoder).values())
    for index, layer_type in enumerate(layer_types):
        is_exact = layer_type in EXACT_LAYERS or (index < len(layers) and forks_or_keeps_apart(layers[index]))
        is_stateful = index < len(layers) and STATEFUL.search(layer_type)
        if not is_exact or (is_stateful and mixers.isdisjoint(layers[index].modules())):  # a mixer by its name only
            why = NO_PROTOCOL if STATEFUL.search(layer_type) else "which tree attention does not compute"
            raise UserError(f"{name} layer {index} is {layer_type!r}, {why}; {TRAIN_WITHOUT_SHARING}")
    attention = (module for layer in layers for module in layer.modules() if _is_attention(module))
    if mixers or all(attends(type(module)) for module in attention):
        _check_hybrid(name, layers, layer_types)


def _check_hybrid(name: str, layers: list[nn.Module], layer_types: Sequence[str]) -> None:
    """As `_check_layers`, by the modules of the layers: a model may name no kinds of layers, or the wrong ones."""
    for index, layer in enumerate(layers):
        if any(attends(type(module)) for module in layer.modules()):
            continue
        if index < len(layer_types) and layer_types[index] in EXACT_LAYERS:
            raise UserError(
                f"{name} layer {index} is {layer_types[index]!r} and does not take its attention from "
                f"AttentionInterface, so it cannot be reached; {TRAIN_WITHOUT_SHARING}"
            )
        if not forks_or_keeps_apart(layer):
            raise UserError(f"{name} layer {index} is a {type(layer).__name__}, {NO_PROTOCOL}; {TRAIN_WITHOUT_SHARING}")


def _check_states(name: str, decoder: Any) -> None:
    """Refuse a module that takes its state as an argument, as in RWKV and xLSTM."""
    for path, module in decoder.named_modules():
        if path and is_text(path) and "state" in inspect.signature(type(module).forward).parameters:
            raise UserError(
                f"{name} has a {type(module).__name__} ({path}), {NO_PROTOCOL}; train it without sharing (fit: dedup: "
                f"false)"
            )


def check_soft_cap(name: str, config: Any) -> None:
    """Refuse `sdpa` for a model with a soft-cap: transformers before 5.21 chooses it, and leaves the soft-cap out."""
    if reason := _why_no_soft_cap(config):
        raise UserError(f"{name} has {reason}; load it with 'eager' (fit: model.attn_implementation: eager)")


def _why_no_soft_cap(config: Any) -> str | None:
    softcap = getattr(config, "attn_logit_softcapping", None)
    if softcap is None or config._attn_implementation != "sdpa":
        return None
    return f"a soft-cap (attn_logit_softcapping={softcap}), which attn_implementation 'sdpa' leaves out"


def added_losses(model: nn.Module) -> list[tuple[Any, str, str]]:
    """What a model adds to its cross-entropy: the configuration, the key that turns it on, and its name."""
    adapters = (getattr(model, "peft_config", None) or {}).values()
    keys = [
        (pretrained_model_of(model).config.get_text_config(), "output_router_logits", "router loss"),
        *((adapter, "orth_reg_weight", "regularizer of AdaLoRA") for adapter in adapters),
    ]
    return [(config, key, name) for config, key, name in keys if getattr(config, key, None)]


def check_only_cross_entropy(model: nn.Module) -> None:
    """Refuse a model whose own loss is another one, where the loss is the cross-entropy of the predictions."""
    base: Any = pretrained_model_of(model)
    for config, key, name in added_losses(model):
        raise UserError(
            f"{type(base).__name__} adds a {name} ({key}={getattr(config, key)}), which is not part of the loss here; "
            f"set {key} to {type(getattr(config, key))()}, or use the drop-in RadixCollator with the model's own loss"
        )
    origin = str(base.loss_function.__module__)
    if not origin.startswith(("transformers.", "radixtrain.")):
        raise UserError(
            f"{type(base).__name__} has a loss_function of its own ({origin}), and the loss here is the "
            f"cross-entropy; use the drop-in RadixCollator with the model's own loss"
        )


def _check_attention(name: str, config: Any) -> None:
    """Refuse attention that sees other tokens than plain causal attention, or leaves out a part of its formula."""
    check_soft_cap(name, config)
    for key, what in NOT_COMPUTED.items():
        if getattr(config, key, None):
            raise UserError(
                f"{name} has {what} ({key}={getattr(config, key)}), which tree attention does not compute; "
                f"{TRAIN_WITHOUT_SHARING}"
            )
    both_ways = {"use_bidirectional_attention": (True, "all"), "is_causal": (False,)}
    for key in (key for key, values in both_ways.items() if getattr(config, key, None) in values):
        raise UserError(
            f"{name} attends in both directions ({key}={getattr(config, key)}), and a shared prefix has the same "
            f"states only under causal attention; change it, or {TRAIN_WITHOUT_SHARING}"
        )


def _check_causal(parts: Parts) -> None:
    """Refuse an encoder, by its attention modules and by the masks that its code names."""
    layers = [module for path, module in parts.decoder.named_modules() if _is_attention(module) and is_text(path)]
    if not layers and mixers_of(parts.decoder):  # a state goes only forward
        return
    flags = [layer.is_causal for layer in layers if hasattr(layer, "is_causal")]
    decoder_class: Any = type(parts.decoder)
    names_causal = any("causal" in name for name in names_in(decoder_class))
    if not layers or (flags and not any(flags)) or not names_causal:
        raise UserError(
            f"{parts.name} attends in both directions, or not at all, and a shared prefix has the same states only "
            f"under causal attention; use a decoder, or train it without share_prefixes"
        )


def _is_attention(module: nn.Module) -> bool:
    return any("Attention" in each.__name__ for each in type(module).__mro__)  # a subclass may have any name


def _attention_classes(decoder: nn.Module) -> set[Any]:
    """Of the text: in the same file a vision tower may take its attention from elsewhere."""
    return {type(module) for path, module in decoder.named_modules() if _is_attention(module) and is_text(path)}


def _check_chunks(decoder: Any, max_seqlen: int) -> None:
    """Refuse chunks that are shorter than a sequence; longer ones change nothing."""
    chunk = chunk_of(decoder.config)
    if chunk and chunk < max_seqlen:
        raise UserError(
            f"{type(decoder).__name__} attends within chunks of {chunk} tokens (attention_chunk_size), and this "
            f"batch has a sequence of {max_seqlen}; set max_length to {chunk} or less, and the chunks change nothing"
        )
