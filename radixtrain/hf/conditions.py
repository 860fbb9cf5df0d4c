"""Which models can be shared: a table of what would change the gradient, the reason, the fix and the entry points.

The entry points are `share_prefixes`, the batches of a `RadixCollator`, which a shared model takes too, and `generate`.
`CONDITIONS` is checked when a model is given to one of them, by its class, its configuration and its modules, and again
at the next call after these have changed: Hugging Face reads most settings in every call. What depends on a batch is
checked in `refusals.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

from radixtrain.errors import TRAIN_WITHOUT_SHARING, UserError
from radixtrain.hf.attention_interface import forget_attention, take_over
from radixtrain.hf.backbone import Parts, is_text
from radixtrain.hf.modules import (
    attends,
    forks_or_keeps_apart,
    is_attention,
    mixers_of,
    names_in,
    takes,
    text_attention,
    text_layers,
)
from radixtrain.hf.positions import why_counted_from_padding, why_no_positions
from radixtrain.hf.probes import check_transformers
from radixtrain.tree.radix_inputs import RADIX
from radixtrain.versions import before, untested

EntryPoint = Literal["share_prefixes", "RadixCollator", "generate"]
WITHOUT: dict[EntryPoint, str] = {
    "share_prefixes": TRAIN_WITHOUT_SHARING,
    "RadixCollator": TRAIN_WITHOUT_SHARING,
    "generate": "use model.generate",
}
TRAINING: tuple[EntryPoint, ...] = ("share_prefixes", "RadixCollator")
STORED: tuple[EntryPoint, ...] = ("generate",)  # keys and values
ALL: tuple[EntryPoint, ...] = ("share_prefixes", "RadixCollator", "generate")

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
NOT_NEXT_TOKENS = {  # classes that are called causal nevertheless
    "WhisperForCausalLM": "its loss takes labels that are shifted already",
    "MusicgenForCausalLM": "its rows are several codebooks",
    "MusicgenMelodyForCausalLM": "its rows are several codebooks",
}
EXACT_LAYERS = ("full_attention", "attention", "sliding_attention", "chunked_attention")  # chunks: `refusals.py`
STATEFUL = re.compile("linear|recurrent|mamba|conv|hybrid")  # in the name of a layer's kind
NO_PROTOCOL = (
    "whose state from token to token does not go through Hugging Face's cache (get_recurrent_state, "
    f"update_recurrent_state), so it cannot fork where rows branch{before('recurrent states that fork')}"
)
NOT_COMPUTED = {"index_topk": "sparse attention (an indexer picks keys)", "keep_window_size": "a dynamic mask"}
BOTH_WAYS = {"use_bidirectional_attention": (True, "all"), "is_causal": (False,), "is_decoder": (False,)}  # by value
CHUNKS = "chunk_size_feed_forward"  # of a layer of the BERT kind


class Condition(NamedTuple):
    """Something that a model must not be or have.

    why: returns what is in the way, to follow the name of the model; None if nothing is.
    entry_points: that refuse it. fix: what to do; `{without}` stands for how to work without this entry point.
    """

    why: Callable[[Parts], str | None]
    entry_points: tuple[EntryPoint, ...] = ALL
    fix: str = "{without}"


def check_supported(parts: Parts, entry_point: EntryPoint) -> None:
    """Raise UserError for a model that cannot be exact at this entry point: its name, the reason, the fix."""
    check_transformers(WITHOUT[entry_point])
    if reason := why_unsupported(parts, entry_point):
        raise UserError(reason)


def why_unsupported(parts: Parts, entry_point: EntryPoint) -> str | None:
    """Say why a model cannot be exact at this entry point, and the fix; None if it can."""
    forget_attention(parts.decoder)
    for condition in CONDITIONS:
        if entry_point in condition.entry_points and (reason := condition.why(parts)):
            return f"{parts.name} {reason}; {condition.fix.format(without=WITHOUT[entry_point])}{untested()}"
    return None


def traits_of(decoder: PreTrainedModel) -> tuple[str, list[nn.Module], list[Any]]:
    """Return what the conditions of a decoder depend on, to be compared: its settings, its modules, their chunks.

    To read and compare them takes 0.1 ms of one core for 28 layers, 1.4 ms with LoRA (2,329 modules).
    """
    modules: list[nn.Module] = []
    level: list[nn.Module] = [decoder]
    while level:
        modules += level
        level = [child for each in level for child in each._modules.values() if child is not None]
    return repr(vars(decoder.config)), modules, [module.__dict__.get(CHUNKS) for module in modules]


def why_no_soft_cap(config: PreTrainedConfig) -> str | None:
    """Say why a soft-cap is left out: transformers before 5.21 chooses `sdpa` for such a model. None if it is not."""
    softcap = getattr(config, "attn_logit_softcapping", None)
    if softcap is None or config._attn_implementation != "sdpa":
        return None
    return f"a soft-cap (attn_logit_softcapping={softcap}), which attn_implementation 'sdpa' leaves out"


def _encodes(parts: Parts) -> str | None:
    is_encoder = getattr(parts.base.config, "is_encoder_decoder", False)
    return "is not a plain decoder, but an encoder and a decoder" if is_encoder else None


def _has_no_model_inside(parts: Parts) -> str | None:
    if isinstance(parts.decoder, PreTrainedModel):
        return None
    return f"has its layers in a {type(parts.decoder).__name__}, which is not a PreTrainedModel, and cannot be reached"


def _contains_a_head(parts: Parts) -> str | None:
    if parts.decoder is parts.base or parts.decoder.get_output_embeddings() is None:
        return None
    path = next(path for path, module in parts.base.named_modules() if module is parts.decoder)
    return (
        f"contains a whole language model with a head of its own ({path}, a {type(parts.decoder).__name__}), so the "
        f"rows that predict cannot be picked before the head; for rows of text share that one: "
        f"share_prefixes(model.{path})"
    )


def _predicts_no_next_tokens(parts: Parts) -> str | None:
    """Check for next tokens as labels. A bare backbone passes, because its head is the user's own."""
    ancestors = [each.__name__ for each in type(parts.base).__mro__]
    is_causal = any(each in CAUSAL_CLASSES or each.endswith(CAUSAL_ENDINGS) for each in ancestors)
    if not is_causal and parts.backbone is not parts.base:
        return "is not a causal language model, whose head and loss expect next tokens as labels"
    return next(
        (f"does not predict next tokens: {NOT_NEXT_TOKENS[each]}" for each in ancestors if each in NOT_NEXT_TOKENS),
        None,
    )


def _has_no_head(parts: Parts) -> str | None:
    return "has no head that predicts next tokens" if parts.head is None else None


def _takes_its_state(parts: Parts) -> str | None:
    """Find models that take their state as an argument, as RWKV and xLSTM do."""
    for path, module in parts.decoder.named_modules():
        if path and is_text(path) and "state" in takes(type(module)):
            return f"has a {type(module).__name__} ({path}), {NO_PROTOCOL}"
    return None


def _has_other_layers(parts: Parts) -> str | None:
    """Find layers whose tokens meet elsewhere than in attention or a mixer of Hugging Face's cache protocol."""
    if not hasattr(parts.decoder.config, "num_hidden_layers"):
        return "is not a plain decoder (one stack of num_hidden_layers)"
    layers, kinds = text_layers(parts.decoder), getattr(parts.decoder.config, "layer_types", None) or ()
    mixers = set(mixers_of(parts.decoder).values())
    for index, kind in enumerate(kinds):
        is_exact = kind in EXACT_LAYERS or (index < len(layers) and forks_or_keeps_apart(layers[index]))
        is_stateful = index < len(layers) and STATEFUL.search(kind)
        if not is_exact or (is_stateful and mixers.isdisjoint(layers[index].modules())):  # a mixer in name only
            why = NO_PROTOCOL if STATEFUL.search(kind) else "which tree attention does not compute"
            return f"layer {index} is {kind!r}, {why}"
    attention = (module for layer in layers for module in layer.modules() if is_attention(module))
    if mixers or all(attends(type(module)) for module in attention):
        return _has_a_layer_out_of_reach(layers, kinds)
    return None


def _has_a_layer_out_of_reach(layers: list[nn.Module], kinds: Sequence[str]) -> str | None:
    """Judge by the modules of the layers, since a model may name no kinds of layers, or the wrong ones."""
    for index, layer in enumerate(layers):
        if any(attends(type(module)) for module in layer.modules()):
            continue
        if index < len(kinds) and kinds[index] in EXACT_LAYERS:
            return (
                f"layer {index} is {kinds[index]!r} and does not take its attention from AttentionInterface, so it "
                f"cannot be reached"
            )
        if not forks_or_keeps_apart(layer):
            return f"layer {index} is a {type(layer).__name__}, {NO_PROTOCOL}"
    return None


def _has_recurrent_layers(parts: Parts) -> str | None:
    return (
        "has recurrent layers, whose state is not kept by a cache of keys and values"
        if mixers_of(parts.decoder)
        else None
    )


def _is_on_several_devices(parts: Parts) -> str | None:
    devices = {str(parameter.device) for parameter in parts.base.parameters()}
    if len(devices) < 2 and "meta" not in devices:
        return None
    return (
        f"has weights on {', '.join(sorted(devices))}, and a cache of keys and values needs all of them on one device"
    )


def _loses_its_soft_cap(parts: Parts) -> str | None:
    reason = why_no_soft_cap(parts.decoder.config)
    return reason and f"has {reason}"


def _picks_keys(parts: Parts) -> str | None:
    for key, what in NOT_COMPUTED.items():
        if value := getattr(parts.decoder.config, key, None):
            return f"has {what} ({key}={value}), which tree attention does not compute"
    return None


def _attends_both_ways(parts: Parts) -> str | None:
    decoder_class: Any = type(parts.decoder)
    for key, values in BOTH_WAYS.items():
        if key == "is_decoder" and key not in names_in(decoder_class):  # GPT-NeoX has it, and does not read it
            continue
        if (value := getattr(parts.decoder.config, key, None)) in values:
            return (
                f"attends in both directions ({key}={value}), and a shared prefix has the same states only under "
                f"causal attention"
            )
    return None


def _drops_attention(parts: Parts) -> str | None:
    if not (dropout := getattr(parts.decoder.config, "attention_dropout", 0.0)):
        return None
    return (
        f"has attention_dropout={dropout}: a shared token would draw one mask, but an ordinary batch draws one per copy"
    )


def _computes_in_chunks(parts: Parts) -> str | None:
    size = next(filter(None, traits_of(parts.decoder)[2]), None)
    return size and f"has layers with {CHUNKS}={size}, into which unique tokens do not fit"


def _is_an_encoder(parts: Parts) -> str | None:
    """Judge by its attention modules, and by the masks that its code names."""
    layers = list(text_attention(parts.decoder))
    if not layers and mixers_of(parts.decoder):  # a recurrent state is causal
        return None
    flags = [layer.is_causal for layer in layers if hasattr(layer, "is_causal")]
    decoder_class: Any = type(parts.decoder)
    names_causal = any("causal" in name for name in names_in(decoder_class))
    if layers and (any(flags) or not flags) and names_causal:
        return None
    return (
        "attends in both directions, or not at all, and a shared prefix has the same states only under causal attention"
    )


def _chooses_a_span(parts: Parts) -> str | None:
    """Find a loss that is a softmax over whole rows."""
    if not parts.name.endswith("ForQuestionAnswering"):
        return None
    return "chooses a span among all places of a row, those of padding included, which share_prefixes does not compute"


def _cannot_be_reached(parts: Parts) -> str | None:
    classes = {type(module) for module in text_attention(parts.decoder)}
    if not classes or any(map(attends, classes)):
        return None
    return "does not take its attention from AttentionInterface, so its layers cannot be reached"


def _has_other_attention(parts: Parts) -> str | None:
    reason = take_over(parts.decoder)
    return reason and f"has attention that tree attention does not compute: {reason}"


def _keeps_a_batch_to_itself(parts: Parts) -> str | None:
    """Return why keyword arguments do not reach the backbone: runs the model, and stops it before its backbone."""
    reached: list[bool] = []

    def stop(backbone: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        reached.append(RADIX in kwargs)
        raise InterruptedError

    ids = torch.ones(1, 1, dtype=torch.long)  # on no device: nothing computes with them
    handle = parts.backbone.register_forward_pre_hook(stop, prepend=True, with_kwargs=True)
    with suppress(Exception), torch.no_grad():  # a model that expects other inputs may raise anything
        parts.base.forward(ids, **{RADIX: None})
    handle.remove()
    if all(reached):
        return None
    return (
        f"does not pass the entries of a radix batch on to its {type(parts.backbone).__name__}"
        f"{before('keyword arguments from model to backbone')}"
    )


CONDITIONS = (
    Condition(_encodes),
    Condition(_has_no_model_inside, fix="if that wraps one, share the model before it is wrapped; otherwise {without}"),
    Condition(_contains_a_head, fix="or {without}"),
    Condition(
        _predicts_no_next_tokens,
        ("RadixCollator",),
        "use a ...ForCausalLM class, or share_prefixes(model) with ordinary batches",
    ),
    Condition(_predicts_no_next_tokens, ("generate",), "load it with AutoModelForCausalLM"),
    Condition(_has_no_head, ("generate",), "load it with AutoModelForCausalLM"),
    Condition(_takes_its_state),
    Condition(_has_other_layers),
    Condition(_has_recurrent_layers, STORED),
    Condition(_is_on_several_devices, STORED, "load it without a device_map, or {without}"),
    Condition(_loses_its_soft_cap, fix="load it with 'eager' (fit: model.attn_implementation: eager)"),
    Condition(_picks_keys),
    Condition(_attends_both_ways, fix="change it, or {without}"),
    Condition(_drops_attention, TRAINING, "set attention_dropout to 0"),
    Condition(_computes_in_chunks, fix="set it to 0, which changes no result, or {without}"),
    Condition(_is_an_encoder, ("share_prefixes",), "use a decoder, or {without}"),
    Condition(_chooses_a_span, ("share_prefixes",)),
    Condition(_cannot_be_reached),
    Condition(_has_other_attention, ("RadixCollator", "generate")),
    Condition(why_no_positions),
    Condition(why_counted_from_padding),
    Condition(_keeps_a_batch_to_itself, ("RadixCollator",), "use share_prefixes(model) with ordinary batches"),
    Condition(_is_an_encoder, ("RadixCollator", "generate"), "use a decoder, or {without}"),
)
