"""Images of rows: which of them are one, and what stands at each of their placeholders.

    input_ids  7 <img> <img> 8    images  A    tokens compared  7 A0 A1 8
               7 <img> <img> 9            A                     7 A0 A1 9

Two images are one if the bytes of the tensors that a tower gets of them are equal. Their placeholders are compared by
the row of the features that replaces them, so tokens behind different images are never shared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from radixtrain.collators.features import packed
from radixtrain.collators.token_row import TokenRow
from radixtrain.tree.arrays import IntArray, cumulative
from radixtrain.tree.blocks import BlockLayout
from radixtrain.tree.plan import PrefixPlan
from radixtrain.tree.radix_inputs import layout_of, with_radix

BoolArray = npt.NDArray[np.bool_]
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
TYPES, TOKEN_TYPES = "mm_token_type_ids", "token_type_ids"  # 1 at placeholders of images
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Image = dict[str, Tensor]


@dataclass(frozen=True, eq=False)
class ImageInputs:
    """What a collator has to know of a model that sees images; `radixtrain.image_inputs_of(model)` finds it.

    token: id of a placeholder.
    names: the entries of a row that the tower reads, of `OF_IMAGES`.
    count_positions: `get_rope_index` of a model that counts positions of several axes; None if it counts along the row.
    arguments: what that takes.
    types: the entry of a row that marks its placeholders.
    count_blocks: (B, L) types -> (B, L), the block of tokens that attend to each other in both directions, -1 outside;
        None for a model that is causal.
    """

    token: int
    names: frozenset[str]
    count_positions: Callable[..., Any] | None = None
    arguments: frozenset[str] = frozenset()
    types: str = TYPES
    count_blocks: Callable[..., Tensor] | None = None


class SplitImages(NamedTuple):
    """The tensors of each image. is_nested: whether the model takes them as (B, images of a row, ...)."""

    images: list[Image]
    is_nested: bool


def split_images(tensors: Mapping[str, Tensor]) -> SplitImages | str:
    """The images of a call or of a row, in their order; or why they are not known. tensors: of `OF_IMAGES`."""
    rest = dict(tensors)
    parts: dict[str, list[Tensor]] = {}
    is_nested = rest["pixel_values"].ndim == 5 and "image_sizes" not in rest
    if "image_grid_thw" in rest:
        lengths = rest["image_grid_thw"].prod(-1).tolist()
        if sum(lengths) != len(rest["pixel_values"]):
            return "image_grid_thw does not name every row of pixel_values"
        parts["pixel_values"] = list(rest.pop("pixel_values").split(lengths))
    elif is_nested:  # filled up with images of zeros
        rest = {name: each.flatten(0, 1) for name, each in rest.items()}
        is_real = rest["pixel_values"].flatten(1).any(1)
        rest = {name: each[is_real] for name, each in rest.items()}
    parts |= {name: list(each.split(1)) for name, each in rest.items()}
    numbers = {len(each) for each in parts.values()}
    if len(numbers) != 1 or not min(numbers):
        return "images whose tensors are not one for each"
    return SplitImages([dict(zip(parts, each, strict=True)) for each in zip(*parts.values(), strict=True)], is_nested)


def joined(images: Sequence[Image], is_nested: bool) -> dict[str, Tensor]:
    """The arguments of a tower for these images."""
    inputs = {name: torch.cat([image[name] for image in images]) for name in images[0]}
    return {name: each[None] for name, each in inputs.items()} if is_nested else inputs


def distinct_images(images: Sequence[Image]) -> tuple[IntArray, list[int]]:
    """Which distinct image each one is, and the first of each. Only images of equal sums are compared in full.

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
    """Whether all have the same shapes and sizes, so that they have as many placeholders."""
    first, *others = images
    return all(
        first[name].shape == other[name].shape and (name == "pixel_values" or torch.equal(first[name], other[name]))
        for other in others
        for name in first
    )


def codes_of(ids: IntArray, is_image: BoolArray, rows: IntArray, axes: Iterable[IntArray]) -> IntArray:
    """(T,). Equal where two tokens have the same id, or row of the features, and the same positions.

    ids: (T,). is_image: (T,). rows: (P,), of the placeholders. axes: (T,) each, positions; empty if they count the row.
    """
    codes = ids.copy()
    codes[is_image] = ids.max(initial=0) + 1 + rows
    for axis in axes:
        places = axis - axis.min(initial=0)
        codes = np.unique(codes * (places.max(initial=0) + 1) + places, return_inverse=True)[1]
    return codes


def codes_of_blocks(codes: IntArray, blocks: IntArray) -> IntArray:
    """(T,). As `codes`, but the tokens of two blocks are the same only if the whole blocks are.

    blocks: (T,). A number for each block of each sequence, whose tokens attend to each other; -1 outside.
    """
    found: dict[bytes, int] = {}
    of_blocks, total = codes.copy(), int(codes.max(initial=0)) + 1
    starts = np.flatnonzero(np.diff(blocks, prepend=-1)).tolist()
    for start, end in pairwise([*starts, len(blocks)]):
        if blocks[start] >= 0:
            first = found.setdefault(codes[start:end].tobytes(), total)
            of_blocks[start:end] = np.arange(first, first + end - start)
            total = max(total, first + end - start)
    return of_blocks


def blocks_of_rows(blocks: IntArray, plan: PrefixPlan) -> BlockLayout | None:
    """Of the unique rows. blocks: (T,), as in `codes_of_blocks`. None if no block has two rows."""
    of_rows = blocks[plan.gather_indices]
    of_rows[plan.num_unique_tokens :] = -1
    return BlockLayout.of(of_rows)


@dataclass(eq=False)
class BatchImages:
    """The images of the features of a batch, K of them distinct, and its T tokens, of which P are placeholders.

    A piece is a run of placeholders, and the images that it shows: one, or all of a row if it is not known which
    placeholder shows which. The model checks that its tower returns as many features.

    codes: (T,), int64. Equal where tokens are the same, see `codes_of`. is_image: (T,), bool.
    rows: (P,), int64. Which row of all distinct pieces, back to back, stands at each placeholder.
    pieces: of each distinct one, its placeholders, and its images by number.
    tensors: what the tower gets, of the K images.
    axes: (A, T), int64. positions; None if they count along each row.
    blocks: (T,), int64, as in `codes_of_blocks`; None if all tokens attend only backwards.
    """

    codes: IntArray
    is_image: BoolArray
    rows: IntArray
    pieces: tuple[tuple[int, tuple[int, ...]], ...]
    tensors: dict[str, Tensor]
    axes: IntArray | None
    blocks: IntArray | None

    @classmethod
    def read(
        cls, inputs: ImageInputs, features: Sequence[Mapping[str, Any]], arrays: Sequence[TokenRow]
    ) -> BatchImages | None:
        """None if no feature has images. arrays: of the features. ValueError that names the feature and the entry."""
        both = list(zip(features, arrays, strict=True))
        of_features = [_images_of(inputs, *each, index) for index, each in enumerate(both)]
        images = [image for each in of_features if each for image in each.images]
        if not images:
            return None
        names, nested = {tuple(image) for image in images}, {each.is_nested for each in of_features if each}
        if len(names) + len(nested) > 2:
            raise ValueError(
                f"the images of a batch came with {sorted(map(list, names))} in different forms: give all features "
                f"what one processor returns"
            )
        images = _filled_up(images)
        owners, first = distinct_images(images)
        ids, _, cu_seqlens, positions, _ = packed(arrays)
        is_image = ids == inputs.token
        found: dict[tuple[int, tuple[int, ...]], int] = {}
        ranges, begin = [np.zeros(0, dtype=np.int64)], 0
        for index, each in enumerate(of_features):
            end = begin + (len(each.images) if each else 0)
            is_placeholder = is_image[cu_seqlens[index] : cu_seqlens[index + 1]]
            for piece in _pieces(is_placeholder, owners[begin:end].tolist(), images[begin:end]) if each else ():
                start = found.setdefault(piece, sum(length for length, _ in found))
                ranges.append(np.arange(start, start + piece[0]))
            begin = end
        rows = np.concatenate(ranges)
        axes = _axes(inputs, arrays, images) if inputs.count_positions else None
        tensors = joined([images[index] for index in first], nested.pop())
        counted = positions if axes is None else axes
        codes = codes_of(ids, is_image, rows, () if counted is None else np.atleast_2d(counted))
        blocks = _blocks(inputs, features, arrays)
        codes = codes if blocks is None else codes_of_blocks(codes, blocks)
        return cls(codes, is_image, rows, tuple(found), tensors, axes, blocks)

    def added_to(self, batch: dict[str, Any], plan: PrefixPlan) -> dict[str, Any]:
        """The batch of the plan with these images."""
        tokens = plan.gather_indices
        placeholders = self.is_image.cumsum()[tokens[self.is_image[tokens]]] - 1
        positions = {} if self.axes is None else {"position_ids": torch.from_numpy(self.axes[:, tokens])[:, None]}
        rows = torch.from_numpy(self.rows[placeholders])
        layout = replace(layout_of(batch), blocks=None if self.blocks is None else blocks_of_rows(self.blocks, plan))
        seen = {**batch, **positions, **self.tensors}
        return with_radix(seen, layout=layout, image_rows=rows, image_pieces=self.pieces)


def without_images(inputs: ImageInputs, features: Sequence[Mapping[str, Any]]) -> list[Any]:
    """The features without the entries that `BatchImages` reads."""
    read = inputs.names | {inputs.types}
    return [
        {name: value for name, value in each.items() if name not in read} if isinstance(each, Mapping) else each
        for each in features
    ]


def _images_of(inputs: ImageInputs, feature: Mapping[str, Any], arrays: TokenRow, index: int) -> SplitImages | None:
    """The images of a feature, None if it has none. ValueError if these are not what its placeholders show."""
    placeholders = arrays.input_ids == inputs.token
    number = int(np.count_nonzero(placeholders))
    if number != np.count_nonzero(np.asarray(feature["input_ids"]) == inputs.token):
        raise ValueError(f"feature {index}: attention_mask hides placeholders of images (token {inputs.token})")
    if feature.get(inputs.types) is not None:
        types = np.asarray(feature[inputs.types]).reshape(-1)[arrays.num_left_padding :][: len(placeholders)]
        if not np.array_equal(types, placeholders):
            raise ValueError(
                f"feature {index}: {inputs.types} marks other tokens than the placeholders of images (token "
                f"{inputs.token}): of a row with video or sound, use share_prefixes(model)"
            )
    if inputs.count_positions and arrays.position_ids is not None:
        raise ValueError(f"feature {index}: remove position_ids, which this model counts along several axes")
    tensors = {name: _tensor(feature, name, index) for name in OF_IMAGES if _is_given(inputs, feature, name)}
    if not tensors and not number:
        return None
    if "pixel_values" not in tensors or not number:
        raise ValueError(
            f"feature {index} has {number} placeholders of images (token {inputs.token}) in input_ids and "
            f"{', '.join(tensors) or 'no pixel_values'}: give it what the model's processor returns for its text and "
            f"its images, and leave truncation off"
        )
    found = split_images(tensors)
    if isinstance(found, str):
        raise ValueError(f"feature {index}: {found}; give it what the model's processor returns")
    return found


def _is_given(inputs: ImageInputs, feature: Mapping[str, Any], name: str) -> bool:
    value = feature.get(name)
    return name in inputs.names and value is not None and bool(len(value))


def _tensor(feature: Mapping[str, Any], name: str, index: int) -> Tensor:
    """An entry of a feature; lists of numbers, as a data set stores them, as `torch.tensor` reads them."""
    value = feature[name]
    try:
        if isinstance(value, list | tuple):
            found = torch.from_numpy(np.asarray(value))
            return found.to(torch.get_default_dtype()) if found.is_floating_point() else found
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"feature {index}: {name} must be a tensor, an array or nested lists of one shape") from None


def _filled_up(images: list[Image]) -> list[Image]:
    """All of one shape but for the first axis, as a processor fills them up that gets all at once."""
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


def _pieces(is_image: BoolArray, owners: list[int], images: Sequence[Image]) -> Iterable[tuple[int, tuple[int, ...]]]:
    """The pieces of a row, in its order: a run of placeholders for each image, equal parts, or one of them all."""
    bounds = np.flatnonzero(np.diff(is_image, prepend=False, append=False)).reshape(-1, 2)
    lengths = np.diff(bounds)[:, 0].tolist()
    if len(lengths) != len(owners):
        share, left = divmod(sum(lengths), len(owners))
        if left or not are_alike(images):
            return [(sum(lengths), tuple(owners))]
        lengths = [share] * len(owners)
    return [(length, (owner,)) for length, owner in zip(lengths, owners, strict=True)]


def _blocks(inputs: ImageInputs, features: Sequence[Mapping[str, Any]], arrays: Sequence[TokenRow]) -> IntArray | None:
    """(T,). As in `codes_of_blocks`; None if the features with images have no types, as then the model is causal."""
    if inputs.count_blocks is None:
        return None
    of_features, total, have_types = [], 0, set()
    for feature, own in zip(features, arrays, strict=True):
        is_image = own.input_ids == inputs.token
        blocks = inputs.count_blocks(torch.from_numpy(is_image.astype(np.int64))[None], device="cpu")[0].numpy()
        of_features.append(np.where(blocks < 0, blocks, blocks + total))
        total += int(blocks.max(initial=-1)) + 1
        if is_image.any():
            have_types.add(feature.get(inputs.types) is not None)
    if len(have_types) > 1:
        raise ValueError(
            f"some features with images have {inputs.types} and some have not: images attend in both directions only "
            f"with it, so give it to all or to none"
        )
    return np.concatenate(of_features) if have_types == {True} else None


def _axes(inputs: ImageInputs, arrays: Sequence[TokenRow], images: Sequence[Image]) -> IntArray:
    """(A, T). The positions that the model counts, of the features side by side."""
    assert inputs.count_positions is not None
    bounds = cumulative(np.array([len(each.input_ids) for each in arrays]))
    mask = np.arange(np.diff(bounds).max()) < np.diff(bounds)[:, None]
    ids = np.zeros(mask.shape, dtype=np.int64)
    ids[mask] = np.concatenate([each.input_ids for each in arrays])
    given = {"input_ids": ids, TYPES: (ids == inputs.token).astype(np.int32), "attention_mask": mask.astype(np.int64)}
    tensors = {name: torch.from_numpy(each) for name, each in given.items()}
    tensors |= {name: torch.cat([image[name] for image in images]) for name in images[0] if name != "pixel_values"}
    positions = inputs.count_positions(**{name: each for name, each in tensors.items() if name in inputs.arguments})[0]
    found: IntArray = positions.flatten(1).numpy()[:, mask.reshape(-1)]
    return found
