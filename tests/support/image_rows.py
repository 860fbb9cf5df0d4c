"""Padded calls with images, and whether their gradient is the ordinary one, of the tower too."""

import functools
import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from image_batches import ROWS, Kind, Row, batch_of, letters_of
from same_step import same_gradient
from torch import Tensor
from trainer_harness import image_keys

from radixtrain import share_prefixes, sharing_report
from radixtrain.hf.backbone import backbone_of, model_inside
from radixtrain.hf.sharing_report import SharingReport

__all__ = ["PADDED", "check_padded", "count_images", "same_call"]


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


def same_call(model: Any, inputs: dict[str, Tensor], kept: Tensor, **options: Any) -> SharingReport:
    """Assert equal gradients of a padded call that is shared, the tower's too. options: of `share_prefixes`."""

    def loss_of(model: Any) -> Tensor:
        logits = model(**inputs, use_cache=False).logits[kept]
        weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(0), dtype=logits.dtype)
        return (logits.log_softmax(-1) * weights).mean()

    rung = same_gradient(model, loss_of, partial(share_prefixes, min_ratio=0.0, **options))
    reaches_tower = any("vis" in tensor.name or "tower" in tensor.name for tensor in rung.alive)
    assert reaches_tower or "pixel_values" not in inputs, "no gradient in the tower"
    report = sharing_report(model)
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


PADDED: dict[str, Callable[..., int]] = {
    "padded on the right": check_padded,
    "padded on the left": partial(check_padded, left=True),
}
