"""What a radix batch contains when it reaches the backbone: all that the collator gave, and only what can be used.

Trainers and wrappers drop entries, add others, and cut tensors (`radixtrain/hf/trainers.py`). Any of this would change
the gradient, so it is refused.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from transformers import Cache

from radixtrain.errors import UserError
from radixtrain.tree.layout import PREFIX, TreeLayout

__all__ = ["check_inputs", "layout_of", "split_inputs"]

# Arguments of a forward pass that cannot be used with a radix batch, by pattern, and what to do instead.
NOT_USABLE = {
    "^attention_mask$": "a radix batch has no padding: take the mask out, and train prompt or prefix tuning without it",
    "^past_key_values$": "a cache, or prefix tuning, puts keys in front of every sequence: use an ordinary batch",
    "token_type_ids$": "they are not part of a radix batch: use an ordinary batch",
    "pixel|image|video|audio|^input_features": "a radix batch is text only: use an ordinary batch",
}
# Outputs that would hold the unique tokens, not the tokens of each sequence.
RETURNED_PER_TOKEN = ("output_hidden_states", "output_attentions")


def split_inputs(
    backbone: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The `radix_` entries of a call, and its other arguments by name."""
    entries = {name: value for name, value in kwargs.items() if name.startswith(PREFIX)}
    given: dict[str, Any] = {}
    if entries:
        given = dict(zip(inspect.signature(backbone.forward).parameters, args, strict=False))
        given.update((name, value) for name, value in kwargs.items() if name not in entries)
    return entries, given


def layout_of(entries: Mapping[str, Any]) -> TreeLayout:
    """The layout of a batch. UserError names an entry that was lost on the way."""
    try:
        return TreeLayout.from_batch(entries)
    except KeyError as missing:
        raise UserError(
            f"the batch lost its entry {missing}: keep every key of the collator (remove_unused_columns does not "
            f"touch them)"
        ) from None


def check_inputs(decoder: Any, given: Mapping[str, Any], layout: TreeLayout) -> None:
    """Refuse a batch that lost tokens or positions, and what cannot be used with a batch of unique tokens.

    given: the arguments of the call that are not entries of the layout.
    """
    _check_complete(given, layout)
    for name, value in given.items():
        reason = next((reason for pattern, reason in NOT_USABLE.items() if re.search(pattern, name)), None)
        if reason and isinstance(value, Tensor | Cache):
            raise UserError(f"a radix batch came with {name}; {reason}")
    for name in RETURNED_PER_TOKEN:
        wanted = given.get(name)
        if getattr(decoder.config, name, False) if wanted is None else wanted:
            raise UserError(
                f"{name} would hold unique tokens, not those of each sequence; turn it off, or use an ordinary batch"
            )


def _check_complete(given: Mapping[str, Any], layout: TreeLayout) -> None:
    """Unique tokens, as ids or as embeddings, and their positions."""
    rows = given.get("input_ids")
    rows = given.get("inputs_embeds") if rows is None else rows
    if rows is None or tuple(rows.shape[:2]) != (1, layout.num_rows):
        came = None if rows is None else tuple(rows.shape)
        raise UserError(
            f"a radix batch of {layout.num_rows} unique tokens needs input_ids [1, {layout.num_rows}], got {came}; "
            f"something on the way cut the batch or added tokens to it (prompt tuning does)"
        )
    positions = given.get("position_ids")
    if positions is None or positions.shape[-1] != layout.num_rows:
        came = None if positions is None else tuple(positions.shape)
        raise UserError(
            f"a radix batch of {layout.num_rows} unique tokens needs its position_ids [1, {layout.num_rows}], got "
            f"{came}: without them a token after a shared prefix would get the position of its row; keep every key of "
            f"the collator"
        )
