"""Positions: a radix batch contains the position of every token. A model that counts them differently is refused."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

from torch import nn

from radixtrain.errors import UserError
from radixtrain.hf.backbone import Parts, is_text
from radixtrain.tree.layout import TreeLayout

__all__ = ["check_batch_positions", "check_model_positions", "padding_idx_of_positions", "why_padding_matters"]

POSITION = re.compile(r"(^|_)(wpe|pos|position|positions)(_|$)")


def check_model_positions(parts: Parts) -> None:
    """Refuse a model that takes no positions, or does not count them from 0."""
    name = type(parts.backbone).__name__
    if "position_ids" not in inspect.signature(parts.backbone.forward).parameters:
        raise UserError(
            f"{name} does not take position_ids, so a token after a shared prefix would get the "
            f"position of its row; train it with dedup: false"
        )
    padding_idx = padding_idx_of_positions(parts.decoder)
    if padding_idx is not None:
        raise UserError(
            f"{name} counts positions from padding_idx + 1 = {padding_idx + 1} (its table of "
            f"positions has a padding_idx), and a radix batch counts from 0; train it with dedup: false"
        )


def padding_idx_of_positions(decoder: nn.Module) -> int | None:
    """The padding index after which a model such as RoBERTa counts positions, None if it counts from 0."""
    indices = (getattr(embedding, "padding_idx", None) for _, embedding in _position_embeddings(decoder))
    return next((index for index in indices if index is not None), None)


def check_batch_positions(decoder: Any, layout: TreeLayout) -> None:
    """Refuse positions at which rotary embeddings change their frequencies.

    Hugging Face looks at the largest position of the batch; so does this. A prefix would depend on the sequences that
    are in the batch beside its own.
    """
    config = decoder.config
    parameters = getattr(config, "rope_parameters", None) or {}
    kinds = [parameters, *(inner for inner in parameters.values() if isinstance(inner, dict))]  # one, or a layer type's
    for rope in kinds:
        if rope.get("rope_type") not in ("dynamic", "longrope"):
            continue
        limit = (
            rope.get("original_max_position_embeddings")
            or getattr(config, "original_max_position_embeddings", None)
            or config.max_position_embeddings
        )
        if layout.max_position >= limit:
            raise UserError(
                f"{type(decoder).__name__} has {rope['rope_type']} rotary embeddings, whose frequencies change with "
                f"the largest position of a batch once it passes {limit} tokens, and this batch has position "
                f"{layout.max_position}; set max_length to {limit} or less"
            )


def why_padding_matters(decoder: Any) -> str | None:
    """Why left padding changes the result of a sequence; None if it changes only the rounding.

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
    return None


def _position_embeddings(decoder: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules of the text that look up positions in a table, learned or sinusoidal."""
    for path, module in decoder.named_modules():
        own = path.rpartition(".")[2]
        if POSITION.search(own) and is_text(path) and "Rotary" not in type(module).__name__:
            yield path, module
