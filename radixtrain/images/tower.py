"""Images as tensors, and the vision tower that computes each distinct one of a call once.

Two images are one if the bytes of their tensors are equal. The backbone gets the features of the unique tokens ready
made, as `mm_encoder_outputs`; autograd leads from these back to the tower, once for all copies of an image.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from radixtrain.tree.arrays import IntArray, concatenate_ranges, cumulative

# Arguments of a tower with one entry on the first axis for each image. The patches of all image grids are in one list.
OF_IMAGES = {"pixel_values", "image_grid_thw", "image_sizes", "pixel_attention_mask", "image_position_ids"}
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Image = dict[str, Tensor]


class NotShared(Exception):
    """A call that cannot be shared, because of its images or anything else. The message is the reason."""


class SplitImages(NamedTuple):
    """The tensors of each image. is_nested: whether the model takes them as (B, images of a row, ...)."""

    images: list[Image]
    is_nested: bool


def split_images(tensors: Mapping[str, Tensor]) -> SplitImages:
    """Return the images of a call, in order. Raises NotShared if not known. tensors: of `OF_IMAGES`."""
    rest = dict(tensors)
    parts: dict[str, list[Tensor]] = {}
    is_nested = rest["pixel_values"].ndim == 5 and "image_sizes" not in rest
    if "image_grid_thw" in rest:
        lengths = rest["image_grid_thw"].prod(-1).tolist()
        if sum(lengths) != len(rest["pixel_values"]):
            raise NotShared("image_grid_thw does not name every row of pixel_values")
        parts["pixel_values"] = list(rest.pop("pixel_values").split(lengths))
    elif is_nested:  # filled up with images of zeros
        rest = {name: each.flatten(0, 1) for name, each in rest.items()}
        is_real = rest["pixel_values"].flatten(1).any(1)
        rest = {name: each[is_real] for name, each in rest.items()}
    parts |= {name: list(each.split(1)) for name, each in rest.items()}
    numbers = {len(each) for each in parts.values()}
    if len(numbers) != 1 or not min(numbers):
        raise NotShared("images without a tensor for each")
    return SplitImages([dict(zip(parts, each, strict=True)) for each in zip(*parts.values(), strict=True)], is_nested)


def joined(images: Sequence[Image], is_nested: bool) -> dict[str, Tensor]:
    """Return the arguments of a tower for these images."""
    inputs = {name: torch.cat([image[name] for image in images]) for name in images[0]}
    return {name: each[None] for name, each in inputs.items()} if is_nested else inputs


def distinct_images(images: Sequence[Image]) -> tuple[IntArray, list[int]]:
    """Return the distinct image of each image, and the first copy of each. Compares in full only images of equal sums.

    Compares bits: sums of integers are the same in any order, and NaN is equal to itself.
    """
    bits = [[part.contiguous().view(BITS[part.dtype.itemsize]) for part in image.values()] for image in images]
    sums = torch.stack([torch.stack([part.sum(dtype=torch.int64) for part in image]) for image in bits]).tolist()
    kinds = [[(name, part.dtype, part.shape) for name, part in image.items()] for image in images]
    chosen: list[int] = []
    owners: list[int] = []
    for index in range(len(images)):
        alike = (n for n, other in enumerate(chosen) if sums[other] == sums[index] and kinds[other] == kinds[index])
        same = (n for n in alike if all(map(torch.equal, bits[chosen[n]], bits[index])))
        owner = next(same, len(chosen))
        if owner == len(chosen):
            chosen.append(index)
        owners.append(owner)
    return np.array(owners), chosen


def are_alike(images: Sequence[Image]) -> bool:
    """Return whether all have the same shapes and sizes, so that they have as many placeholders."""
    first, *others = images
    return all(
        first[name].shape == other[name].shape and (name == "pixel_values" or torch.equal(first[name], other[name]))
        for other in others
        for name in first
    )


FEATURES = "mm_encoder_outputs"  # argument of backbones, which older transformers do not have


@dataclass(eq=False)
class Tower:
    """Computes the N images of a call, K of them distinct.

    backbone: has the tower. inputs: of its tower for the K, as the call of the backbone has them.
    ids: (1, 1), int64. any token of the call.
    owners: (N,), int64. which of the K each image is, in the order of the batch.
    is_uniform: whether all have as many placeholders. is_nested: as in `SplitImages`.
    """

    backbone: Any
    inputs: dict[str, Any]
    ids: Tensor
    owners: IntArray
    is_uniform: bool
    is_nested: bool

    @classmethod
    def read(cls, backbone: Any, given: Mapping[str, Any]) -> Tower:
        """Read the images of a call of a backbone. Raises NotShared if they are not known.

        given: its arguments.
        """
        names = inspect.signature(backbone.get_image_features).parameters.keys()
        read = {name: given[name] for name in names & given.keys()}
        tensors = {name: read.pop(name) for name in OF_IMAGES & read.keys()}  # left are vision_feature_layer ...
        if not all(isinstance(each, Tensor) for each in tensors.values()):
            raise NotShared("images that are not tensors")
        images, is_nested = split_images(tensors)
        owners, first = distinct_images(images)
        chosen = [images[index] for index in first]
        ids = given["input_ids"][:1, :1]
        return cls(backbone, {**joined(chosen, is_nested), **read}, ids, owners, are_alike(chosen), is_nested)

    @property
    def num_distinct(self) -> int:
        return int(self.owners.max()) + 1

    @property
    def has_copies(self) -> bool:
        return self.num_distinct < len(self.owners)

    @cached_property
    def output(self) -> Any:
        """Return what the tower returns for the K distinct images, after what the backbone does to these before it.

        That is read from its own call, which ends there: GOT-OCR casts them.
        """
        asked: list[tuple[tuple[Any, ...], dict[str, Any]]] = [((), self.inputs)]

        def ask(*args: object, **kwargs: object) -> None:
            asked.append((args, kwargs))
            raise InterruptedError

        asking = copy(self.backbone)
        asking.get_image_features = ask
        with suppress(Exception):  # a backbone that needs other arguments gives its tower what it got
            type(asking).forward(asking, input_ids=self.ids, **self.inputs)
        args, kwargs = asked[-1]
        return self.backbone.get_image_features(*args, **{**kwargs, "return_dict": True})

    @property
    def features(self) -> Tensor:
        """Return the features, (rows, D), of the K distinct images."""
        return _flat(self.output.pooler_output)

    @cached_property
    def lengths(self) -> IntArray:
        """Count the feature rows of each image, (K,), int64. Runs the tower; raises NotShared if they are not known."""
        pooled, total = self.output.pooler_output, len(self.features)
        lengths: Sequence[int] = []
        if len(pooled) == self.num_distinct:
            lengths = [each.flatten(0, -2).shape[0] if each.ndim > 1 else 0 for each in pooled]
        elif self.is_uniform:
            lengths = [total // self.num_distinct] * self.num_distinct
        if not lengths or sum(lengths) != total:
            raise NotShared("images whose features are in one piece, so that each image's are unknown")
        return np.array(lengths, dtype=np.int64)

    def rows_at(self, num_placeholders: int) -> IntArray:
        """Find the feature row of each placeholder, (P,), int64, in their order. Raises NotShared if it is not known.

        Runs the tower only if images are equal: else each placeholder has a row of its own, see `check_complete`.
        """
        if not self.has_copies:
            return np.arange(num_placeholders)
        rows = concatenate_ranges(cumulative(self.lengths)[self.owners], self.lengths[self.owners])
        _check_number(num_placeholders, len(rows))
        return rows

    def check_complete(self, num_placeholders: int) -> None:
        """Raise NotShared if features and placeholders do not fit. The tower runs here, unless `rows_at` has run it."""
        if not self.has_copies:
            _check_number(num_placeholders, len(self.features))

    def features_at_each(self, rows: IntArray) -> tuple[Tensor, IntArray]:
        """Return all features, and the row of each placeholder, arranged as the model's output is."""
        pooled = self.output.pooler_output
        is_whole = isinstance(pooled, Tensor) and pooled.ndim == 3
        return self.features, rows.reshape(-1, pooled.shape[1]) if is_whole else rows

    def argument_at(self, index: Tensor) -> dict[str, Any]:
        """Return the argument by which a backbone gets the features of placeholders. index: as in `features_at`."""
        return {FEATURES: {"image": self.features_at(index)}}

    def features_at(self, index: Tensor) -> Any:
        """Return the features of placeholders as the backbone takes them. index: (P',), int64, rows of all features."""
        index = index.to(self.features.device)
        taken: dict[str, Any] = {"pooler_output": _taken(self.output.pooler_output, index)}
        if getattr(self.output, "deepstack_features", None) is not None:
            taken["deepstack_features"] = [_taken(each, index) for each in self.output.deepstack_features]
        return type(self.output)(**taken)


def _check_number(num_placeholders: int, num_rows: int) -> None:
    if num_placeholders != num_rows:
        raise NotShared(f"{num_placeholders} placeholders of images for {num_rows} features")


def _flat(features: Any) -> Tensor:
    """Flatten features, of one tensor or one for each image, to (rows, D)."""
    parts = [features] if isinstance(features, Tensor) else list(features)
    return torch.cat([part.flatten(0, -2) for part in parts])


def _taken(features: object, index: Tensor) -> Any:
    """Select these rows, in the form of the features: a tensor of as many dimensions, or a tuple of one."""
    rows = _flat(features).index_select(0, index)
    return rows.view(*[1] * (features.ndim - 2), *rows.shape) if isinstance(features, Tensor) else (rows,)
