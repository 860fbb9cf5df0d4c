"""What a batch of a collator holds: its entries as Python values, and its predictions with their histories.

Rows of which one has a weight that the loss cannot hold.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from radixtrain.tree.layout import SECTIONS, TreeLayout
from radixtrain.tree.radix_inputs import RadixInputs


def as_python(value: Any) -> Any:
    """Tensors as dtype and numbers, records as what they have: to compare."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.tolist()
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, TreeLayout):
        return {name: value.section(name).tolist() for name in SECTIONS if len(value.section(name))}
    if isinstance(value, RadixInputs):
        tensors = {name: value.tensor(name) for name in value.sections if name != "plan"}
        known = {name: x for name, x in vars(value).items() if name not in ("host", "rows", "sections")}
        return {name: as_python(x) for name, x in {"layout": value.layout, **tensors, **known}.items() if has(x)}
    return {name: as_python(x) for name, x in value.items()} if isinstance(value, dict) else value


def tensors_of(value: Any) -> list[torch.Tensor]:
    """Of a record, or whatever holds some of them and tensors: those that move with it."""
    leaves = [x.rows if isinstance(x, TreeLayout | RadixInputs) else x for x in tree_leaves(value)]
    return [x for x in leaves if isinstance(x, torch.Tensor)]


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


def write_overflowing(folder: Path) -> Path:
    """20 rows of tokens, of which the 8th makes its step overflow: with `on_nonfinite: skip`, one of each epoch."""
    draw = random.Random(0)
    path = folder / "rows.jsonl"
    with path.open("w", encoding="utf-8") as file:
        for number in range(20):
            ids = [*range(40, 60), *(draw.randrange(40, 200) for _ in range(6))]
            weights = [0.0] * 20 + [2e38 if number == 7 else 1.0] * 6
            file.write(f"{json.dumps({'input_ids': ids, 'labels': ids, 'loss_weights': weights})}\n")
    return path
