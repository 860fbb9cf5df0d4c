"""Refuses what would change the gradient of this batch. Errors name the model or the layer, the reason and the fix.

What a model is and has is judged once (`conditions.py`); here is what depends on the batch or was added since: a
trainer may add adapters with dropout, or noise on the embeddings, after `prepare_model`. What a layer asks its
attention function for is checked in `attention_interface.py`, random draws in `dropout.py`, adapters in `adapters.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from radixtrain.attention import STRATEGIES, choose_attention
from radixtrain.errors import TRAIN_WITHOUT_SHARING, UserError
from radixtrain.hf.backbone import Parts, pretrained_model_of
from radixtrain.hf.conditions import (
    attends_several_times,
    check_supported,
    text_attention,
    why_no_soft_cap,
    why_other_attention,
)
from radixtrain.hf.dropout import check_drawing_modules, check_noise
from radixtrain.hf.positions import check_position, positions_in_table, why_padding_matters
from radixtrain.hf.recurrent.mixers import mixers_of, num_attention_layers, text_layers
from radixtrain.hf.step_cost import ModelDimensions
from radixtrain.hf.windows import chunk_of
from radixtrain.tree.context import WITH_CONTEXT
from radixtrain.tree.layout import TreeLayout


def check_generation(parts: Parts, longest: int) -> None:
    """Refuse a model that cannot generate from stored keys and values exactly.

    longest: tokens of the longest prompt and its answer, without the last one, which is never computed.
    """
    check_supported(parts, "generate")
    _check_chunks(parts.decoder, longest)
    check_position(parts.decoder, longest - 1)
    table = positions_in_table(parts.decoder)
    if table is not None and longest > table:
        raise UserError(
            f"{parts.name} has a table of {table} positions, and the longest prompt with its answer would have "
            f"{longest + 1} tokens; lower max_new_tokens, or set max_length to {table + 1}"
        )


def why_not_across(parts: Parts, attention: str, allowed: Sequence[str]) -> str | None:
    """Why a prefix cannot be kept from one micro-batch to the next; None if it can. Arguments: of `prepare_model`."""
    layers = text_layers(parts.decoder)
    if mixers_of(parts.decoder):
        return f"{parts.name} has recurrent layers, whose states are not kept from one micro-batch to the next"
    attending = sum(1 for _ in text_attention(parts.decoder))
    runs_again = len(set(map(id, layers))) < len(layers) or 0 < attending < num_attention_layers(parts.decoder)
    if runs_again or attends_several_times(parts.decoder):
        return f"{parts.name} attends several times with one module, and keys are kept once for each"
    if attention not in ("auto", *WITH_CONTEXT):
        return f"attention {attention!r} cannot attend to rows of an earlier micro-batch; auto, cascade and path can"
    if allowed:
        return f"a kept prefix is computed twice, and what allow_dropout={list(allowed)} names would draw twice"
    return None


def check_choice(decoder: PreTrainedModel, attention: str, kernel: str) -> None:
    """Refuse an unknown name, and a kernel that does not run on the device where the model is now."""
    if attention not in ("auto", *STRATEGIES) or kernel != "auto":
        weight = next(decoder.parameters())
        softcap = getattr(decoder.config, "attn_logit_softcapping", None) is not None
        head_dim = ModelDimensions.of(decoder.config).widest_head_dim
        choose_attention(attention, kernel, weight.device, weight.dtype, head_dim, softcap=softcap)


def check_pass(
    decoder: PreTrainedModel, head: object, layout: TreeLayout, left_padded: bool, allowed: tuple[str, ...]
) -> None:
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


def check_draws(decoder: PreTrainedModel, head: Any, allowed: tuple[str, ...]) -> None:
    """Refuse what draws at random in this forward pass."""
    check_noise(decoder, allowed)
    for part in (decoder, head):
        if part is not None:
            check_drawing_modules(part, allowed)


def check_own_attention(name: str, decoder: PreTrainedModel) -> None:
    """Refuse attention of which a plan does not know what it computes. name: of the model, in the error."""
    if reason := why_other_attention(decoder):
        raise UserError(f"{name}: {reason}, and tree attention would compute something else; {TRAIN_WITHOUT_SHARING}")


def check_soft_cap(name: str, config: PreTrainedConfig) -> None:
    """Refuse `sdpa` for a model with a soft-cap: transformers before 5.21 chooses it, and leaves the soft-cap out."""
    if reason := why_no_soft_cap(config):
        raise UserError(f"{name} has {reason}; load it with 'eager' (fit: model.attn_implementation: eager)")


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


def _check_chunks(decoder: PreTrainedModel, max_seqlen: int) -> None:
    """Refuse chunks that are shorter than a sequence; longer ones change nothing."""
    chunk = chunk_of(decoder.config)
    if chunk and chunk < max_seqlen:
        raise UserError(
            f"{type(decoder).__name__} attends within chunks of {chunk} tokens (attention_chunk_size), and this "
            f"batch has a sequence of {max_seqlen}; set max_length to {chunk} or less, and the chunks change nothing"
        )
