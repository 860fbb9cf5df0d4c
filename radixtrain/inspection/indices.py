"""The arrays of a micro-batch, as the collator makes them: names, shapes, dtypes, values, and what they are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from rich.text import Text
from torch import Tensor

__all__ = ["indices"]

AXES = (
    "T tokens of all sequences, back to back; U rows, the unique tokens; B sequences; S segments, runs of rows without "
    "a branch; P distinct predictions; R rows that predict; E sequences that bring new rows."
)
MEANINGS = {
    "input_ids": "[1, U] the token of each row, depth first",
    "position_ids": "[1, U] its place in its sequence",
    "shift_labels": "[1, P] the token that each prediction asks for",
    "radix_predictor_indices": "[R] the row that each predictor is",
    "radix_prediction_rows": "[P] which of the R predictors each prediction belongs to",
    "radix_loss_weights": "[P] what the cross-entropy of each prediction counts: how many original tokens, or a weight",
    "radix_label_indices": "[P] the original token that each prediction is, if loss weights were given",
    "radix_old_logprobs": "[P] log-probability of each label by the policy that sampled it",
    "radix_advantages": "[P] the advantage of each label",
    "radix_gather_indices": "[U] the original token that each row is: its first occurrence",
    "radix_inverse_indices": "[T] the row of each original token",
    "radix_cu_seqlens": "[B + 1] where each sequence begins among the T tokens",
    "radix_segment_starts": "[S + 1] the first row of each segment",
    "radix_subtree_ends": "[S] one past the last row below each segment; row q sees row k iff k <= q < its end",
    "radix_path_keys": "the rows of all paths, back to back, for attention along paths",
    "radix_path_cu_seqlens_q": "[E + 1] where the new rows of each path begin",
    "radix_path_cu_seqlens_k": "[E + 1] where each path begins in radix_path_keys",
    "radix_level_queries": "rows below the branches of each level that has several, for attention level by level",
    "radix_level_keys": "rows of those branches",
    "radix_level_cu_seqlens_q": "bounds of the queries of each branch, level by level",
    "radix_level_cu_seqlens_k": "bounds of the keys of each branch, level by level",
    "radix_levels": "for each level: branches, longest queries, longest keys, and where they begin",
    "radix_max_seqlen": "longest sequence, in tokens",
    "radix_max_segment": "longest segment, in rows",
    "radix_max_new_tokens": "most new rows of a path",
    "radix_max_path": "longest path",
    "radix_max_position": "largest position",
    "radix_strategy": "the attention strategy that costs least",
    "radix_min_shared_tokens": "the smallest branch that it chose",
    "radix_left_padded": "1 if positions count without the padding on the left",
}
FIRST, LAST = 10, 4  # values of an array that is shortened


def indices(batch: Mapping[str, Any], full: bool = False) -> Text:
    """A legend, and every entry of a batch. full: all values; otherwise the first and the last ones.

    Raises KeyError for an entry that has no line in `MEANINGS`.
    """
    text = Text.assemble((AXES, "dim"), "\n")
    for name, value in batch.items():
        text.append(f"\n{name}", style="bold").append(f"  {_kind(value)}  ").append(MEANINGS[name], style="dim")
        text.append(f"\n    {' '.join(_values(value, full))}")
    return text


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return "ints" if isinstance(value, tuple) else type(value).__name__


def _values(value: Any, full: bool) -> Iterator[str]:
    values = torch.flatten(value).tolist() if isinstance(value, Tensor) else value
    values = list(values) if isinstance(values, list | tuple) else [values]
    is_long = not full and len(values) > FIRST + LAST
    for place, each in enumerate(values):
        if is_long and place == FIRST:
            yield f"⋯ {len(values) - FIRST - LAST:,} more ⋯"
        if not is_long or place < FIRST or place >= len(values) - LAST:
            yield f"{each:.4g}" if isinstance(each, float) else str(each)
