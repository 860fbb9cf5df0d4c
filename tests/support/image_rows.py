"""Rows with images through either door, and whether their gradient is the ordinary one, of the tower too."""

import functools
import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from image_batches import IMAGE, ROWS, Kind, Row, batch_of, letters_of
from same_step import assert_same_gradient, same_step
from torch import Tensor
from trainer_harness import image_keys

from radixtrain import RadixCollator, image_inputs_of, share_prefixes
from radixtrain.hf.backbone import backbone_of, model_inside
from radixtrain.hf.sharing_report import SharingReport
from radixtrain.images.tokens import TOKEN_TYPES, TYPES
from radixtrain.tree.radix_inputs import layout_of
from radixtrain.verification.oracle import radix_batch

__all__ = ["DOORS", "check_padded", "check_rows", "count_images", "features_of", "same_call"]


def count_images(model: Any, has_gradients: bool = True) -> list[tuple[int, int]]:
    """How many images the tower gets in each call from now on, with gradients or without, and how many are distinct."""
    backbone, seen = backbone_of(model_inside(model)), list[tuple[int, int]]()
    real = backbone.get_image_features

    @functools.wraps(real)
    def counted(*args: Any, **given: Any) -> Any:
        given = {**inspect.signature(real).bind(*args, **given).arguments}
        given |= given.pop("kwargs", {})
        if torch.is_grad_enabled() == has_gradients:
            keys = image_keys(given)
            seen.append((len(keys), len(set(keys))))
        return real(**given)

    backbone.get_image_features = counted
    return seen


def features_of(kind: Kind, rows: Sequence[Row]) -> list[dict[str, Any]]:
    """What a processor returns for each row by itself, and labels on its text."""
    found = []
    for row in rows:
        entries: dict[str, Any] = batch_of(kind, [row])[0] if letters_of([row]) else {"input_ids": torch.tensor([row])}
        entries.pop("attention_mask", None)
        ids = entries.pop("input_ids")[0]
        entries |= {name: entries[name][0] for name in (TYPES, TOKEN_TYPES) if name in entries}
        labels = ids.masked_fill(ids == IMAGE, -100)
        labels[0] = -100  # it is never predicted
        found.append({**entries, "input_ids": ids, "labels": labels})
    return found


def same_call(model: Any, inputs: dict[str, Tensor], kept: Tensor, **options: Any) -> SharingReport:
    """Assert equal gradients of a padded call, and that it was shared. options: of `share_prefixes`."""

    def loss_of(model: Any) -> Tensor:
        logits = model(**inputs, use_cache=False).logits[kept]
        weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(0), dtype=logits.dtype)
        return (logits.log_softmax(-1) * weights).mean()

    report = assert_same_gradient(model, loss_of, partial(share_prefixes, min_ratio=0.0, **options))
    assert report.num_shared == 1, str(report)
    return report


def same_model(model: Any) -> Any:
    return model


def check_padded(
    kind: Kind,
    rows: Sequence[Row] = ROWS,
    change: Callable[[Any], Any] = same_model,
    left: bool = False,
    **options: Any,
) -> int:
    """Assert equal gradients, and that the tower had each distinct image once. Returns the unique tokens.

    change: what is done to the model. options: of `share_prefixes`.
    """
    model, letters = change(kind.build()), letters_of(rows)
    images = count_images(model)
    report = same_call(model, *batch_of(kind, rows, left), **options)
    assert images[-1] == (len(set(letters)), len(set(letters))), "each image once"
    assert (report.num_images, report.num_distinct_images) == (len(letters), len(set(letters)))
    return report.num_unique_tokens


def check_rows(
    kind: Kind,
    rows: Sequence[Row] = ROWS,
    change: Callable[[Any], Any] = same_model,
    collated: dict[str, Any] | None = None,
    **options: Any,
) -> int:
    """The same of a `RadixCollator`'s batch. collated: its options. options: of `prepare_model`."""
    features, model = features_of(kind, rows), change(kind.build().train())
    batch = RadixCollator(images=image_inputs_of(model), **(collated or {}))(features)
    images = count_images(model)
    rung = same_step(model, features, lambda model: radix_batch(model, batch), **options)
    assert images[-1] == (len({*letters_of(rows)}),) * 2, "each image once"
    assert any("vis" in tensor.name or "tower" in tensor.name for tensor in rung.alive), "no gradient in the tower"
    return layout_of(batch).num_rows


DOORS: dict[str, Callable[..., int]] = {
    "share_prefixes": check_padded,
    "share_prefixes, padded on the left": partial(check_padded, left=True),
    "RadixCollator": check_rows,
}
