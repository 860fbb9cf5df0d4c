"""Rows with images as a `RadixCollator` takes them, and whether their gradient is the ordinary one."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from image_batches import IMAGE, Kind, Row, batch_of
from same_step import same_step

from radixtrain import RadixCollator, image_inputs_of
from radixtrain.images.tokens import TOKEN_TYPES, TYPES
from radixtrain.verification.oracle import radix_batch

__all__ = ["check_rows", "features_of"]


def features_of(kind: Kind, rows: Sequence[Row]) -> list[dict[str, Any]]:
    """What a processor returns for each row by itself, and labels on its text."""
    found = []
    for row in rows:
        has_images = any(isinstance(part, str) for part in row)
        entries: dict[str, Any] = batch_of(kind, [row])[0] if has_images else {"input_ids": torch.tensor([row])}
        entries.pop("attention_mask", None)
        ids = entries.pop("input_ids")[0]
        entries |= {name: entries[name][0] for name in (TYPES, TOKEN_TYPES) if name in entries}
        labels = ids.masked_fill(ids == IMAGE, -100)
        labels[0] = -100  # it is never predicted
        found.append({**entries, "input_ids": ids, "labels": labels})
    return found


def check_rows(
    kind: Kind,
    rows: Sequence[Row],
    change: Callable[[Any], Any] = lambda model: model,
    **options: Any,
) -> dict[str, Any]:
    """Assert equal gradients. Returns the batch. change: what is done to the model. options: of the collator."""
    features, model = features_of(kind, rows), change(kind.build().train())
    batch = RadixCollator(images=image_inputs_of(model), **options)(features)
    same_step(model, features, lambda model: radix_batch(model, batch))
    return batch
