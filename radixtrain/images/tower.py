"""A vision tower: it computes each distinct image of a call once, and its features are handed to the decoder.

The backbone gets the features of the unique tokens ready made, as `mm_encoder_outputs`; autograd leads from these back
to the tower, once for all copies of an image.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from radixtrain.images.tensors import OF_IMAGES, NotShared, are_alike, distinct_images, joined, split_images
from radixtrain.tree.arrays import IntArray, concatenate_ranges, cumulative

FEATURES = "mm_encoder_outputs"  # argument of backbones, which older transformers do not have


@dataclass(eq=False)
class Tower:
    """What computes the N images of a call, K of them distinct.

    compute: `get_image_features` of a backbone. inputs: its arguments for the K.
    owners: (N,), int64. which of the K each image is, in the order of the batch.
    is_uniform: whether all have as many placeholders.
    """

    compute: Callable[..., Any]
    inputs: dict[str, Any]
    owners: IntArray
    is_uniform: bool

    @classmethod
    def read(cls, backbone: Any, given: Mapping[str, Any], are_distinct: bool = False) -> Tower:
        """Read the images of a call of a backbone. NotShared if they are not known.

        given: its arguments. are_distinct: as a `RadixCollator` gives them.
        """
        compute = backbone.get_image_features
        read = {name: given[name] for name in inspect.signature(compute).parameters.keys() & given.keys()}
        tensors = {name: read.pop(name) for name in OF_IMAGES.keys() & read.keys()}  # left are vision_feature_layer ...
        if not all(isinstance(each, Tensor) for each in tensors.values()):
            raise NotShared("images that are no tensors")
        images, is_nested = split_images(tensors)
        every = range(len(images))
        owners, first = (np.array(every), list(every)) if are_distinct else distinct_images(images)
        chosen = [images[index] for index in first]
        return cls(compute, {**joined(chosen, is_nested), **read}, owners, are_alike(chosen))

    @property
    def num_distinct(self) -> int:
        return int(self.owners.max()) + 1

    @property
    def has_copies(self) -> bool:
        return self.num_distinct < len(self.owners)

    @cached_property
    def output(self) -> Any:
        """What the tower returns of the K distinct images."""
        return self.compute(**self.inputs, return_dict=True)

    @property
    def features(self) -> Tensor:
        """(rows, D), of the K distinct images."""
        return _flat(self.output.pooler_output)

    @cached_property
    def lengths(self) -> IntArray:
        """(K,), int64. The rows of the features of each image. Runs the tower; NotShared if they are not known."""
        pooled, total = self.output.pooler_output, len(self.features)
        lengths: Sequence[int] = []
        if len(pooled) == self.num_distinct:
            lengths = [each.flatten(0, -2).shape[0] if each.ndim > 1 else 0 for each in pooled]
        elif self.is_uniform:
            lengths = [total // self.num_distinct] * self.num_distinct
        if not lengths or sum(lengths) != total:
            raise NotShared("images whose features are in one piece, so that those of each are not known")
        return np.array(lengths, dtype=np.int64)

    def rows_of(self, images: IntArray) -> IntArray:
        """Return the rows of the features of these of the K images, back to back. Runs the tower, as `lengths` does."""
        return concatenate_ranges(cumulative(self.lengths)[images], self.lengths[images])

    def rows_at(self, num_placeholders: int) -> IntArray:
        """Find the row of the features at each placeholder, (P,), int64, in their order. NotShared if it is not known.

        Runs the tower only if images are equal: else each placeholder has a row of its own, see `check_complete`.
        """
        if not self.has_copies:
            return np.arange(num_placeholders)
        rows = self.rows_of(self.owners)
        _check_number(num_placeholders, len(rows))
        return rows

    def check_complete(self, num_placeholders: int) -> None:
        """NotShared if features and placeholders do not fit. The tower runs here, unless `rows_at` has run it."""
        if not self.has_copies:
            _check_number(num_placeholders, len(self.features))

    def features_at_each(self, rows: IntArray) -> tuple[Tensor, IntArray]:
        """Return all features, and which stand at each placeholder, in the shape that the model returns."""
        pooled = self.output.pooler_output
        is_whole = isinstance(pooled, Tensor) and pooled.ndim == 3
        return self.features, rows.reshape(-1, pooled.shape[1]) if is_whole else rows

    def argument_at(self, index: Tensor) -> dict[str, Any]:
        """Return the argument by which a backbone gets the features at placeholders. index: as in `features_at`."""
        return {FEATURES: {"image": self.features_at(index)}}

    def features_at(self, index: Tensor) -> Any:
        """Return the features at placeholders as the backbone takes them. index: (P',), int64, rows of all features."""
        index = index.to(self.features.device)
        taken: dict[str, Any] = {"pooler_output": _taken(self.output.pooler_output, index)}
        if getattr(self.output, "deepstack_features", None) is not None:
            taken["deepstack_features"] = [_taken(each, index) for each in self.output.deepstack_features]
        return type(self.output)(**taken)


def _check_number(num_placeholders: int, num_rows: int) -> None:
    if num_placeholders != num_rows:
        raise NotShared(f"{num_placeholders} placeholders of images for {num_rows} features")


def _flat(features: Any) -> Tensor:
    """(rows, D), of one tensor or of one for each image."""
    parts = [features] if isinstance(features, Tensor) else list(features)
    return torch.cat([part.flatten(0, -2) for part in parts])


def _taken(features: object, index: Tensor) -> Any:
    """These rows, as a tensor of as many dimensions or as a tuple of one, like the features."""
    rows = _flat(features).index_select(0, index)
    return rows.view(*[1] * (features.ndim - 2), *rows.shape) if isinstance(features, Tensor) else (rows,)
