"""What a batch of a collator holds: its entries as Python values, and its predictions with their histories."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["as_python", "histories_of_rows", "predictions_of"]


def as_python(batch: dict[str, Any]) -> dict[str, Any]:
    return {name: (x.dtype, x.tolist()) if isinstance(x, torch.Tensor) else x for name, x in batch.items()}


def histories_of_rows(batch: dict[str, Any], sequences: Sequence[list[int]]) -> list[tuple[int, ...]]:
    """For every row that the model computes, the tokens up to it, read from the sequence that the row comes from."""
    if "attention_mask" in batch:
        width = batch["input_ids"].shape[1]
        return [tuple(sequences[n // width][: n % width + 1]) for n in range(batch["input_ids"].numel())]
    ends = [tuple(ids[: n + 1]) for ids in sequences for n in range(len(ids))]
    return [ends[token] for token in batch["radix_gather_indices"].tolist()]


def predictions_of(batch: dict[str, Any], sequences: Sequence[list[int]]) -> Counter[tuple[tuple[int, ...], int]]:
    """(whole history of the predictor, label) -> its weight in the loss."""
    rows, found = histories_of_rows(batch, sequences), Counter()
    predictors, labels = batch["radix_predictor_indices"].tolist(), batch["shift_labels"][0].tolist()
    weights = [float(label != -100) for label in labels]
    if "radix_loss_weights" in batch:
        predictors = [predictors[row] for row in batch["radix_prediction_rows"].tolist()]
        weights = batch["radix_loss_weights"].tolist()
    for row, label, weight in zip(predictors, labels, weights, strict=True):
        if weight:
            found[rows[row], label] += weight
    return found
