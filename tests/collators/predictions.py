"""What the batch of a collator predicts."""

from collections import Counter
from typing import Any

from radixtrain.collators.token_row import IGNORE_INDEX


def entries_of(batch: dict[str, Any]) -> list[tuple[Any, ...]]:
    """(row that predicts, label, weight, token of the batch that it is) of each prediction; no token if merged."""
    radix = batch["radix"]
    columns = [radix.predictor_indices[radix.prediction_rows], batch["shift_labels"].flatten(), radix.loss_weights]
    columns += [] if radix.label_indices is None else [radix.label_indices]
    return list(zip(*(column.tolist() for column in columns), strict=True))


def histories_of(batch: dict[str, Any], features: list[dict[str, Any]]) -> list[tuple[int, ...]]:
    """For every row that the model computes, the tokens up to it, read from the sequence that the row comes from."""
    sequences = [feature["input_ids"] for feature in features]
    if "attention_mask" in batch:
        width = batch["input_ids"].shape[1]
        return [tuple(sequences[n // width][: n % width + 1]) for n in range(batch["input_ids"].numel())]
    ends = [tuple(ids[: n + 1]) for ids in sequences for n in range(len(ids))]
    return [ends[token] for token in batch["radix"].layout.gather_indices.tolist()]


def predictions_of(batch: dict[str, Any], features: list[dict[str, Any]]) -> Counter[tuple[tuple[int, ...], int]]:
    """(whole history of the predictor, label) -> its weight in the loss."""
    rows, found = histories_of(batch, features), Counter()
    for row, label, weight, *_ in entries_of(batch):
        if weight:
            found[rows[row], label] += weight
    return found


def expected_of(features: list[dict[str, Any]]) -> Counter[tuple[tuple[int, ...], int]]:
    """The same, counted in the features: every labelled token is predicted by the tokens before it."""
    found = Counter()
    for feature in features:
        ids, labels = feature["input_ids"], feature["labels"]
        weights = feature.get("loss_weights") or [1] * len(ids)
        for n in range(1, len(ids)):
            if labels[n] != IGNORE_INDEX:
                found[tuple(ids[:n]), labels[n]] += weights[n]
    return found
