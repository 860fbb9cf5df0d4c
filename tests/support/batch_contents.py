"""What a batch of a collator holds: its entries as Python values, and its predictions with their histories."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from radixtrain.tree.layout import TreeLayout
from radixtrain.tree.movable import Movable

__all__ = ["as_python", "histories_of_rows", "predictions_of", "tensors_of"]


def as_python(value: Any) -> Any:
    """Tensors as dtype and numbers, records as what they have: to compare."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.tolist()
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, Movable):
        return {name: as_python(x) for name, x in value.fields().items() if has(x)}
    return {name: as_python(x) for name, x in value.items()} if isinstance(value, dict) else value


def tensors_of(value: Any) -> list[torch.Tensor]:
    """Of a tensor, a record, or whatever holds some of them: those that move with it."""
    if isinstance(value, TreeLayout):
        return [value.rows]
    if isinstance(value, Movable):
        return tensors_of(value.fields())
    leaves = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor | Movable)]
    return [tensor for leaf in leaves for tensor in ([leaf] if isinstance(leaf, torch.Tensor) else tensors_of(leaf))]


def has(value: Any) -> bool:
    return isinstance(value, torch.Tensor | np.ndarray) or value not in (None, False, ())


def histories_of_rows(batch: dict[str, Any], sequences: Sequence[list[int]]) -> list[tuple[int, ...]]:
    """For every row that the model computes, the tokens up to it, read from the sequence that the row comes from."""
    if "attention_mask" in batch:
        width = batch["input_ids"].shape[1]
        return [tuple(sequences[n // width][: n % width + 1]) for n in range(batch["input_ids"].numel())]
    ends = [tuple(ids[: n + 1]) for ids in sequences for n in range(len(ids))]
    return [ends[token] for token in batch["radix"].layout.gather_indices.tolist()]


def predictions_of(batch: dict[str, Any], sequences: Sequence[list[int]]) -> Counter[tuple[tuple[int, ...], int]]:
    """(whole history of the predictor, label) -> its weight in the loss."""
    rows, found = histories_of_rows(batch, sequences), Counter()
    predictors, labels = batch["radix"].predictor_indices.tolist(), batch["shift_labels"].flatten().tolist()
    predictors = [predictors[row] for row in batch["radix"].prediction_rows.tolist()]
    for row, label, weight in zip(predictors, labels, batch["radix"].loss_weights.tolist(), strict=True):
        if weight:
            found[rows[row], label] += weight
    return found
