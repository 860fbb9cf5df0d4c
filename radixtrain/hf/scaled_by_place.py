"""Queries that a layer scales by their place in its hidden states, as Llama 4's layers without rotary embeddings do.

Such a layer takes no positions: it counts along its hidden states, which are the unique tokens here. It has computed
the scale of a row's place among these; attention replaces it by that of the token's place in its sequence.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig


def scaled_from(config: PreTrainedConfig) -> int | None:
    """Return from how many tokens on a model scales queries by their place; None if it never does."""
    return config.floor_scale if getattr(config, "attn_temperature_tuning", None) else None


def scales(layer: nn.Module) -> bool:
    """Return whether a layer scales its queries by their place."""
    own: Any = layer
    return bool(getattr(layer, "attn_temperature_tuning", None)) and not own.use_rope


def at_own_places(layer: nn.Module, query: Tensor, call: Any) -> Tensor:
    """Scale queries, (1, N, rows, H), by the place of each row in its sequence. call: of the layer; has `depths`."""
    own: Any = layer
    if not scales(layer):
        return query
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    computed, of_sequence = (
        (torch.log1p(torch.floor((places.float() + 1.0) / own.floor_scale)) * own.attn_scale + 1.0).to(wide)
        for places in (torch.arange(length, device=query.device) for length in (query.shape[2], call.layout.max_seqlen))
    )
    return (query * (of_sequence[call.depths] / computed)[:, None]).to(query.dtype)
