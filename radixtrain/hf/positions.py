"""Positions: a radix batch contains the position of every token. Models that count them differently are refused.

Llama 4's layers without rotary embeddings take no positions: they scale queries by the place in their hidden states,
which are the unique tokens here. Attention replaces that scale by that of the token's place in its sequence.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from itertools import dropwhile, takewhile
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from radixtrain.hf.backbone import is_text
from radixtrain.hf.modules import is_attention, names_in_method
from radixtrain.hf.windows import chunk_of

POSITION = re.compile(r"(^|_)(wpe|pos|position|positions)(_|$)")


def padding_idx_of_positions(decoder: nn.Module) -> int | None:
    """Return the padding index after which a model such as RoBERTa counts positions, None if it counts from 0."""
    indices = (getattr(embedding, "padding_idx", None) for _, embedding in _position_embeddings(decoder))
    return next((index for index in indices if index is not None), None)


def positions_in_table(decoder: nn.Module) -> int | None:
    """Return how many tokens a model with learned positions can number; None for any other kind of positions."""
    tables = [table for _, table in _position_embeddings(decoder) if isinstance(table, nn.Embedding)]
    return min((table.num_embeddings - int(getattr(table, "offset", 0)) for table in tables), default=None)


class FrequencyChange(NamedTuple):
    """Rotary embeddings of `rope_type`, of which a batch with more than `limit` tokens gets other frequencies."""

    rope_type: str
    limit: int


def frequencies_change_at(decoder: PreTrainedModel) -> FrequencyChange | None:
    """Return where rotary embeddings change their frequencies; None if they never do.

    Hugging Face looks at the largest position of a batch, that of padding included.
    """
    config = decoder.config
    parameters = getattr(config, "rope_parameters", None) or {}
    kinds = [parameters, *(inner for inner in parameters.values() if isinstance(inner, dict))]  # one, or a layer type's
    changes = [
        FrequencyChange(
            rope["rope_type"],
            rope.get("original_max_position_embeddings")
            or getattr(config, "original_max_position_embeddings", None)
            or config.max_position_embeddings,
        )
        for rope in kinds
        if "dynamic" in rope.get("rope_type", "") or rope.get("rope_type") == "longrope"  # as transformers asks
    ]
    return min(changes, key=lambda change: change.limit, default=None)


class Limit(NamedTuple):
    """How many tokens of a sequence a model computes as in a batch of that sequence alone, and why no more."""

    reason: str
    tokens: int


def limit_of(decoder: PreTrainedModel, longest: int, max_position: int) -> Limit | None:
    """Return the limit that rows as long as these pass; None if they do not.

    A prefix would depend on the other sequences of a batch, or tokens attend within chunks of a row. Shorter rows than
    a chunk are as without it.
    """
    change, chunk = frequencies_change_at(decoder), chunk_of(decoder.config)
    if change is not None and max_position >= change.limit - has_grown(decoder):
        reason = f"{change.rope_type} rotary embeddings change their frequencies at {change.limit} tokens"
        return Limit(reason, change.limit)
    if chunk and chunk < longest:
        return Limit(f"attention within chunks of {chunk} tokens, and longer rows", chunk)
    return None


def has_grown(decoder: nn.Module) -> bool:
    """Return whether a longer batch has left its frequencies in dynamic rotary embeddings.

    Hugging Face takes them back at a batch below the limit, and keeps them at one of exactly that many tokens.
    """
    return any(
        name.endswith("max_seq_len_cached") and length > module.original_max_seq_len
        for module in decoder.modules()
        for name, length in vars(module).items()
    )


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


def scales(layer: nn.Module) -> bool:
    """Return whether a layer scales its queries by their place."""
    own: Any = layer
    return bool(layer.__dict__.get("attn_temperature_tuning")) and not own.use_rope


def at_own_places(layer: nn.Module, query: Tensor, call: Any) -> Tensor:
    """Scale queries, (1, N, rows, H), of a layer that does, by the place of each row in its sequence.

    call: of the layer; has `depths`.
    """
    own: Any = layer
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    computed, of_sequence = (
        (torch.log1p(torch.floor((places.float() + 1.0) / own.floor_scale)) * own.attn_scale + 1.0).to(wide)
        for places in (torch.arange(length, device=query.device) for length in (query.shape[2], call.layout.max_seqlen))
    )
    return (query * (of_sequence[call.depths] / computed)[:, None]).to(query.dtype)
