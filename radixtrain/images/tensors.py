"""Images as tensors, as a vision tower takes them: those of each image, and which images are one.

Two images are one if the bytes of their tensors are equal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from radixtrain.tree.arrays import IntArray

# What a tower may get of each image, one entry of the first axis for each, and what fills up smaller images beside
# larger ones. The patches of image grids stand in one list.
OF_IMAGES = {
    "pixel_values": 0,
    "image_grid_thw": 0,
    "image_sizes": 0,
    "pixel_attention_mask": 0,
    "image_position_ids": -1,
}
SAYS_WHAT_IS_REAL = {"image_sizes", "pixel_attention_mask", "image_position_ids"}
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Image = dict[str, Tensor]


class NotShared(Exception):
    """Images of a call or a row that cannot be shared. The message says which, as the end of a sentence."""


class SplitImages(NamedTuple):
    """The tensors of each image. is_nested: whether the model takes them as (B, images of a row, ...)."""

    images: list[Image]
    is_nested: bool


def split_images(tensors: Mapping[str, Tensor]) -> SplitImages:
    """Return the images of a call or a row, in order. NotShared if they are not known. tensors: of `OF_IMAGES`."""
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
        raise NotShared("images whose tensors are not one for each")
    return SplitImages([dict(zip(parts, each, strict=True)) for each in zip(*parts.values(), strict=True)], is_nested)


def joined(images: Sequence[Image], is_nested: bool) -> dict[str, Tensor]:
    """Return the arguments of a tower for these images."""
    inputs = {name: torch.cat([image[name] for image in images]) for name in images[0]}
    return {name: each[None] for name, each in inputs.items()} if is_nested else inputs


def distinct_images(images: Sequence[Image]) -> tuple[IntArray, list[int]]:
    """Say which distinct image each one is, and list the first of each. Only images of equal sums are compared in full.

    By their bits: sums of whole numbers are the same in any order, and NaN is equal to itself.
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
    """Say whether all have the same shapes and sizes, so that they have as many placeholders."""
    first, *others = images
    return all(
        first[name].shape == other[name].shape and (name == "pixel_values" or torch.equal(first[name], other[name]))
        for other in others
        for name in first
    )


def filled_up(images: Sequence[Image]) -> list[Image]:
    """Bring all to one shape but for the first axis, as a processor fills them up that gets all at once.

    ValueError for images of several kinds, or of several sizes if nothing says which pixels are filled in.
    """
    filled: list[Image] = [{} for _ in images]
    for name in images[0]:
        shapes = [image[name].shape[1:] for image in images]
        dtypes = {image[name].dtype for image in images}
        if len(dtypes) > 1 or len(set(map(len, shapes))) > 1:
            found = ", ".join(sorted({f"{image[name].dtype} {tuple(image[name].shape)}" for image in images}))
            raise ValueError(f"{name}: the images of a batch must have one dtype and as many axes, got {found}")
        if len(sizes := {*map(tuple, shapes)}) > 1 and not images[0].keys() & SAYS_WHAT_IS_REAL:
            raise ValueError(
                f"{name}: the images of a batch have several sizes, {sorted(sizes)}, and nothing says which pixels are "
                f"filled in: give the processor's pixel_attention_mask or image_sizes too, or images of one size"
            )
        largest = [max(sizes) for sizes in zip(*shapes, strict=True)]
        for image, own in zip(images, filled, strict=True):
            missing = [most - size for most, size in zip(largest, image[name].shape[1:], strict=True)]
            widths = [width for short in reversed(missing) for width in (0, short)]
            own[name] = functional.pad(image[name], widths, value=OF_IMAGES[name]) if any(missing) else image[name]
    return filled
