"""Rows with images as a `RadixCollator` takes them, and the oracle: the ordinary model on each row by itself."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from image_batches import IMAGE, Kind, Row, batch_of
from torch import Tensor

from radixtrain import RadixCollator, prepare_model, restore_model
from radixtrain.collators.images import TOKEN_TYPES, TYPES
from radixtrain.hf.tower import image_inputs_of
from radixtrain.verification.equivalence import compare_gradients
from radixtrain.verification.oracle import Gradients, float64_throughout, gradients_of

__all__ = ["check_rows", "features_of", "truth_of"]


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


def ordinary_terms(model: Any, features: Sequence[dict[str, Any]]) -> Iterator[Tensor]:
    count = sum(int((feature["labels"][1:] != -100).sum()) for feature in features)
    for feature in features:
        entries = {name: value for name, value in feature.items() if name != "labels"}
        entries["input_ids"] = entries["input_ids"][None]
        entries |= {name: entries[name][None] for name in (TYPES, TOKEN_TYPES) if name in entries}
        logits = model(**entries, use_cache=False).logits[0, :-1]
        yield torch.nn.functional.cross_entropy(logits, feature["labels"][1:], reduction="sum") / count


def truth_of(model: Any, features: Sequence[dict[str, Any]]) -> Gradients:
    with float64_throughout(model):
        return gradients_of(model, lambda: ordinary_terms(model, features))


def check_rows(
    kind: Kind,
    rows: Sequence[Row],
    change: Callable[[Any], Any] = lambda model: model,
    bar: float = 1e-12,
    **options: Any,
) -> dict[str, Any]:
    """Assert equal gradients. Returns the batch. change: what is done to the model. options: of the collator."""
    features = features_of(kind, rows)
    model = change(kind.build().train())
    truth = truth_of(model, features)
    batch = RadixCollator(images=image_inputs_of(model), **options)(features)
    with float64_throughout(model):
        prepare_model(model)
        found = gradients_of(model, lambda: [model(**batch, use_cache=False).loss])
        restore_model(model)
    rung = compare_gradients("float64", truth, truth, found)
    assert not rung.failed, rung.reason
    assert rung.worst.radix <= bar, rung.worst
    assert abs(found.loss - truth.loss) <= bar * abs(truth.loss)
    return batch
