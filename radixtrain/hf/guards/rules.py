"""Rules for what no trial of a model shows: a table of reasons, fixes and entry points.

`guards/model.py` tries whether a model computes the same on unique tokens. It cannot see what a loss expects as labels,
what is drawn at random only in training, a limit that a few short rows do not reach, or a soft-cap that small scores do
not reach. And it cannot run while the weights are spread over processes. `RULES` holds the rest.

The entry points are `share_prefixes`, the batches of a `RadixCollator`, which a shared model takes too, `generate`, and
`score_completions`, which uses such batches without training.
The rules are applied when a model is given to one of them, and again at the next call after the model has changed:
Hugging Face reads most settings in every call. What depends on a batch is checked in `batch.py`.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import dropwhile, takewhile
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.models.auto import modeling_auto

from radixtrain.errors import TRAIN_WITHOUT_SHARING, UserError
from radixtrain.hf.attention_interface import FLASH
from radixtrain.hf.backbone import (
    Parts,
    is_attention,
    is_text,
    mixers_of,
    names_in,
    names_in_method,
    num_attention_layers,
    text_attention,
)
from radixtrain.hf.guards.code import CHUNKS
from radixtrain.hf.windows import chunk_of
from radixtrain.tree.radix_inputs import RADIX
from radixtrain.versions import before, untested

EntryPoint = Literal["share_prefixes", "RadixCollator", "generate", "score_completions"]
WITHOUT: dict[EntryPoint, str] = {
    "share_prefixes": TRAIN_WITHOUT_SHARING,
    "RadixCollator": TRAIN_WITHOUT_SHARING,
    "generate": "use model.generate",
    "score_completions": "read the logits of ordinary batches",
}
TRAINING: tuple[EntryPoint, ...] = ("share_prefixes", "RadixCollator")
STORED: tuple[EntryPoint, ...] = ("generate",)  # keys and values
COLLATED: tuple[EntryPoint, ...] = ("RadixCollator", "score_completions")
ALL: tuple[EntryPoint, ...] = (*TRAINING, "generate", "score_completions")

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
NOT_COMPUTED = {"index_topk": "sparse attention (an indexer picks keys)", "keep_window_size": "a dynamic mask"}
POSITION = re.compile(r"(^|_)(wpe|pos|position|positions)(_|$)")


class Rule(NamedTuple):
    """Something that a model must not be or have.

    why: returns what is in the way, to follow the name of the model; None if nothing is.
    entry_points: that refuse it. fix: what to do; `{without}` stands for how to work without this entry point.
    """

    why: Callable[[Parts], str | None]
    entry_points: tuple[EntryPoint, ...] = ALL
    fix: str = "{without}"


def check_supported(parts: Parts, entry_point: EntryPoint) -> None:
    """Raise UserError for a model that cannot be exact at this entry point: its name, the reason, the fix."""
    if reason := why_unsupported(parts, entry_point):
        raise UserError(reason)


def why_unsupported(parts: Parts, entry_point: EntryPoint) -> str | None:
    """Say why no call of a model can be exact at this entry point, and the fix; None if the trial decides."""
    for rule in RULES:
        if entry_point in rule.entry_points and (reason := rule.why(parts)):
            return f"{parts.name} {reason}; {rule.fix.format(without=WITHOUT[entry_point])}{untested()}"
    return None


def why_no_soft_cap(config: PreTrainedConfig) -> str | None:
    """Say why a soft-cap is left out: transformers before 5.21 chooses `sdpa` for such a model. None if it is not."""
    softcap = getattr(config, "attn_logit_softcapping", None)
    if softcap is None or config._attn_implementation != "sdpa":
        return None
    return f"a soft-cap (attn_logit_softcapping={softcap}), which attn_implementation 'sdpa' leaves out"


def padding_idx_of_positions(decoder: nn.Module) -> int | None:
    """Return the padding index after which a model such as RoBERTa counts positions, None if it counts from 0."""
    indices = (getattr(embedding, "padding_idx", None) for _, embedding in _position_embeddings(decoder))
    return next((index for index in indices if index is not None), None)


def positions_in_table(decoder: nn.Module) -> int | None:
    """Return how many tokens a model with learned positions can number; None for any other kind of positions."""
    lengths = [len(buffer) for name, buffer in decoder.named_buffers() if name.endswith(".embed_positions")]  # GPT-J
    for _, table in _position_embeddings(decoder):
        if isinstance(table, nn.Embedding):
            first = getattr(table, "offset", 0) if table.padding_idx is None else table.padding_idx + 1
            lengths.append(table.num_embeddings - int(first))
    return min(lengths, default=None)


class Limit(NamedTuple):
    """How many tokens of a sequence a model computes as in a batch of that sequence alone, and why no more."""

    reason: str
    tokens: int


def limit_of(decoder: PreTrainedModel, longest: int, max_position: int) -> Limit | None:
    """Return the limit that rows as long as these pass; None if they do not.

    A prefix would depend on the other sequences of a batch: Hugging Face takes the frequencies of some rotary
    embeddings from the largest position, that of padding included. Of exactly the number of tokens that a dynamic kind
    is for, a batch still has the frequencies that a longer one may have left. Or tokens attend within chunks of a row;
    shorter rows are as without it.
    """
    config = decoder.config
    parameters = getattr(config, "rope_parameters", None) or {}
    for rope in [parameters, *(inner for inner in parameters.values() if isinstance(inner, dict))]:  # or a layer type's
        kind = rope.get("rope_type", "")
        if "dynamic" in kind or kind == "longrope":  # as transformers asks
            name = "original_max_position_embeddings"
            tokens = rope.get(name) or getattr(config, name, None) or config.max_position_embeddings
            tokens -= "dynamic" in kind
            if max_position >= tokens:
                return Limit(f"{kind} rotary embeddings change their frequencies after {tokens} tokens", tokens)
    chunk = chunk_of(config)
    if chunk and chunk < longest:
        return Limit(f"attention within chunks of {chunk} tokens, and longer rows", chunk)
    return None


def why_padding_matters(decoder: PreTrainedModel) -> str | None:
    """Say why left padding changes the result of a sequence; None if it changes only the rounding.

    Hugging Face counts positions from the first padding token. Rotary embeddings depend only on distances, so that
    changes nothing in them; it does in every other kind of positions.
    """
    rope = getattr(decoder.config, "rope_parameters", None) or {}
    for path, _ in _position_embeddings(decoder):
        return f"learned positions ({path})"
    if not rope:
        return "positions that are not rotary embeddings"
    if getattr(decoder.config, "attn_temperature_tuning", None) or any("scaling_beta" in str(key) for key in rope):
        return "scores that are scaled by the position"
    reasons = (_why_attention_counts(module) for module in decoder.modules())
    return next(filter(None, reasons), None)


def _why_attention_counts(module: nn.Module) -> str | None:
    """Say what in an attention module depends on more than distances, judged by the order of its steps."""
    forward = type(module).forward
    if not is_attention(module):
        return None
    if "attention_scaling" in inspect.signature(forward).parameters:  # Beam
        return "scores that are scaled by the position"
    rotated = dropwhile(lambda name: "rotary" not in name, names_in_method(forward))
    before_scores = takewhile(lambda name: name != "get_interface", rotated)
    norms = (
        getattr(module, name, None) for name in before_scores if name.startswith("q") and "norm" in name
    )  # HunYuan
    has_weights = any(isinstance(norm, nn.Module) and any(True for _ in norm.parameters()) for norm in norms)
    return "a norm of queries after their rotation" if has_weights else None  # without, it undoes no rotation


def _position_embeddings(decoder: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules of the text that look up positions in a table, learned or sinusoidal."""
    for path, module in decoder.named_modules():
        own = path.rpartition(".")[2]
        if POSITION.search(own) and is_text(path) and "Rotary" not in type(module).__name__:
            yield path, module


def scaled_from(config: PreTrainedConfig) -> int | None:
    """Return from how many tokens on a model scales queries by their place; None if it never does."""
    return config.floor_scale if getattr(config, "attn_temperature_tuning", None) else None


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


def _has_no_stack_of_layers(parts: Parts) -> str | None:
    if hasattr(parts.decoder.config, "num_hidden_layers"):
        return None
    return "is not a plain decoder (one stack of num_hidden_layers)"


def _loses_its_soft_cap(parts: Parts) -> str | None:
    reason = why_no_soft_cap(parts.decoder.config)
    return reason and f"has {reason}"


def _picks_keys(parts: Parts) -> str | None:
    for key, what in NOT_COMPUTED.items():
        if value := getattr(parts.decoder.config, key, None):
            return f"has {what} ({key}={value}), which tree attention does not compute"
    return None


def _loses_its_windows(parts: Parts) -> str | None:
    """Find a flash attention that receives its window by another name: rows shorter than the window do not show it."""
    name = parts.decoder.config._attn_implementation
    if name not in FLASH or "sliding_window" in inspect.signature(flash_attention_forward).parameters:
        return None
    return f"has {name}, which no longer takes its window as `sliding_window`{untested()}"


def _drops_attention(parts: Parts) -> str | None:
    if not (dropout := getattr(parts.decoder.config, "attention_dropout", 0.0)):
        return None
    return (
        f"has attention_dropout={dropout}: a shared token would draw one mask, but an ordinary batch draws one per copy"
    )


def _computes_in_chunks(parts: Parts) -> str | None:
    size = next(filter(None, (vars(module).get(CHUNKS) for module in parts.decoder.modules())), None)
    return size and f"has layers with {CHUNKS}={size}, into which unique tokens do not fit"


def _chooses_a_span(parts: Parts) -> str | None:
    """Find a loss that is a softmax over whole rows."""
    if not parts.name.endswith("ForQuestionAnswering"):
        return None
    return "chooses a span among all places of a row, those of padding included, which share_prefixes does not compute"


def _takes_no_positions(parts: Parts) -> str | None:
    """Judge by the arguments of the backbone. A model that has only recurrent layers needs no positions."""
    takes = inspect.signature(parts.backbone.forward).parameters
    if "position_ids" in takes or not num_attention_layers(parts.decoder):
        return None
    return "does not take position_ids, so a token after a shared prefix would get the position of its row"


def _may_be_an_encoder(parts: Parts) -> str | None:
    """Find attention of which neither a flag nor the masks of the model say that it is causal, as LayoutLM's."""
    decoder_class: Any = type(parts.decoder)
    names = names_in(decoder_class)
    layers = [*text_attention(parts.decoder)]
    if not layers or any(hasattr(each, "is_causal") for each in layers) or any("causal" in name for name in names):
        return None
    return "does not say that its attention is causal, and only then a shared prefix has the same states"


def _counts_from_padding(parts: Parts) -> str | None:
    if (padding_idx := padding_idx_of_positions(parts.decoder)) is None:
        return None
    return (
        f"counts positions from padding_idx + 1 = {padding_idx + 1} (its table of positions has a padding_idx), and a "
        f"radix batch counts from 0"
    )


def _looks_through_the_batch(parts: Parts) -> str | None:
    """Find adapters that begin at some tokens, for which PEFT searches the whole batch: they may be in none."""
    for name, adapter in (getattr(parts.base, "peft_config", None) or {}).items():
        if tokens := getattr(adapter, "alora_invocation_tokens", None):
            return (
                f"has an adapter {name!r} with alora_invocation_tokens={tokens}, which begins at one place of a batch"
            )
    return None


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


RULES = (
    # What the parts of the model are.
    Rule(_encodes),
    Rule(_has_no_model_inside, fix="if that wraps one, share the model before it is wrapped; otherwise {without}"),
    Rule(_has_no_stack_of_layers),
    Rule(_contains_a_head, fix="or {without}"),
    # What its loss expects.
    Rule(
        _predicts_no_next_tokens,
        ("RadixCollator",),
        "use a ...ForCausalLM class, or share_prefixes(model) with ordinary batches",
    ),
    Rule(_predicts_no_next_tokens, ("generate", "score_completions"), "load it with AutoModelForCausalLM"),
    Rule(_has_no_head, ("generate", "score_completions"), "load it with AutoModelForCausalLM"),
    Rule(_chooses_a_span, ("share_prefixes",)),
    # What a cache of keys and values cannot hold.
    Rule(_has_recurrent_layers, STORED),
    Rule(_is_on_several_devices, STORED, "load it without a device_map, or {without}"),
    # What short rows do not reach, or what draws.
    Rule(_loses_its_soft_cap, fix="load it with 'eager' (fit: model.attn_implementation: eager)"),
    Rule(_picks_keys),
    Rule(_loses_its_windows),
    Rule(_drops_attention, TRAINING, "set attention_dropout to 0"),
    Rule(_computes_in_chunks, fix="set it to 0, which changes no result, or {without}"),
    Rule(_looks_through_the_batch, fix="leave them out, or {without}"),
    # What the trial would find too, where it can run, without the reason.
    Rule(_takes_no_positions),
    Rule(_counts_from_padding),
    Rule(_may_be_an_encoder, TRAINING, "use a decoder, or {without}"),
    Rule(_keeps_a_batch_to_itself, COLLATED, "use share_prefixes(model) with ordinary batches"),
)
