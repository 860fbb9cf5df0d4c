"""The images of rows: read from features, checked, and added to the batch of their unique tokens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from radixtrain.collators.features import packed
from radixtrain.collators.token_row import TokenRow
from radixtrain.images.tokens import TYPES, BoolArray, ImageInputs, ImageTokens
from radixtrain.images.tower import (
    OF_IMAGES,
    Image,
    NotShared,
    SplitImages,
    are_alike,
    distinct_images,
    filled_up,
    joined,
    split_images,
)
from radixtrain.tree.arrays import IntArray
from radixtrain.tree.plan import PrefixPlan
from radixtrain.tree.radix_inputs import with_radix

Piece = tuple[int, tuple[int, ...]]


@dataclass(eq=False)
class BatchImages:
    """The images of the features of a batch, K of them distinct.

    A piece is a run of placeholders, and the images that it shows: one, or all of a row if it is not known which
    placeholder shows which. The model checks that its tower returns as many features.

    tokens: of the features. Its rows number the placeholders of all distinct pieces, back to back.
    pieces: for each distinct piece its placeholders, and its images by number.
    tensors: what the tower gets, of the K images.
    """

    tokens: ImageTokens
    pieces: tuple[Piece, ...]
    tensors: dict[str, Tensor]

    @classmethod
    def read(
        cls, inputs: ImageInputs, features: Sequence[Mapping[str, Any]], arrays: Sequence[TokenRow]
    ) -> BatchImages | None:
        """Read the images of features; None if there are none. Raises ValueError that names the feature and the entry.

        arrays: the same features, read.
        """
        both = zip(features, arrays, strict=True)
        of_features = [_images_of(inputs, *each, index) for index, each in enumerate(both)]
        if not any(of_features):
            return None
        is_nested = _are_nested(of_features)
        images = filled_up([image for each in of_features if each for image in each.images])
        owners, first = distinct_images(images)
        ids, kept = _padded(arrays)
        is_image = kept & (ids == inputs.token)
        counts = [len(each.images) if each else 0 for each in of_features]
        rows, pieces = _numbered(_pieces(is_image, counts, owners, images))
        types = torch.from_numpy(is_image.astype(np.int64))
        axes = inputs.positions_of(_arguments(inputs, ids, kept, types, images))
        tokens = ImageTokens(
            ids=ids[kept],
            is_image=is_image[kept],
            rows=rows,
            positions=packed(arrays).position_ids if axes is None else axes.numpy()[:, kept],
            blocks=inputs.blocks_of(types, kept) if _have_types(inputs, features, of_features) else None,
        )
        return cls(tokens, pieces, joined([images[index] for index in first], is_nested))

    def added_to(self, batch: dict[str, Any], plan: PrefixPlan) -> dict[str, Any]:
        """Add these images to the batch of the plan."""
        axes = self.tokens.axes_at(plan.gather_indices)
        positions = {} if axes is None else {"position_ids": torch.from_numpy(axes)[:, None]}
        rows = torch.from_numpy(self.tokens.rows_at(plan.gather_indices))
        return with_radix({**batch, **positions, **self.tensors}, image_rows=rows, image_pieces=self.pieces)


def without_images(inputs: ImageInputs, features: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Remove from features the entries that `BatchImages` reads."""
    read = inputs.names | {inputs.types}
    return [
        {name: value for name, value in each.items() if name not in read} if isinstance(each, Mapping) else each
        for each in features
    ]


def _images_of(inputs: ImageInputs, feature: Mapping[str, Any], arrays: TokenRow, index: int) -> SplitImages | None:
    """Read the images of a feature; None without any. Raises ValueError if its placeholders show other ones."""
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
    try:
        return split_images(tensors)
    except NotShared as reason:
        raise ValueError(f"feature {index}: {reason}; give it what the model's processor returns") from None


def _is_given(inputs: ImageInputs, feature: Mapping[str, Any], name: str) -> bool:
    value = feature.get(name)
    return name in inputs.names and value is not None and bool(len(value))


def _tensor(feature: Mapping[str, Any], name: str, index: int) -> Tensor:
    """Read an entry of a feature; lists of numbers, as a data set stores them, become tensors."""
    value = feature[name]
    try:
        if isinstance(value, list | tuple):
            found = torch.from_numpy(np.asarray(value))
            return found.to(torch.get_default_dtype()) if found.is_floating_point() else found
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"feature {index}: {name} must be a tensor, an array or nested lists of one shape") from None


def _are_nested(of_features: Sequence[SplitImages | None]) -> bool:
    """Return whether the model takes all images nested. Raises ValueError if they came in different forms."""
    found = [each for each in of_features if each]
    names = {tuple(image) for each in found for image in each.images}
    if len(names) + len({each.is_nested for each in found}) > 2:
        raise ValueError(
            f"the images of a batch came with {sorted(map(list, names))} in different forms: give all features "
            f"what one processor returns"
        )
    return found[0].is_nested


def _have_types(
    inputs: ImageInputs, features: Sequence[Mapping[str, Any]], of_features: Sequence[SplitImages | None]
) -> bool:
    """Return whether features with images mark their placeholders. Raises ValueError if only some do and it matters."""
    found = {feature.get(inputs.types) is not None for feature, each in zip(features, of_features, strict=True) if each}
    if inputs.count_blocks is not None and len(found) > 1:
        raise ValueError(
            f"some features with images have {inputs.types} and some do not: images attend in both directions only "
            f"with it, so give it to all or to none"
        )
    return found == {True}


def _padded(arrays: Sequence[TokenRow]) -> tuple[IntArray, BoolArray]:
    """Pad the ids of the features with 0 on the right, (B, L), and say which are kept, (B, L)."""
    lengths = np.array([len(each.input_ids) for each in arrays])
    kept = np.arange(lengths.max()) < lengths[:, None]
    ids = np.zeros(kept.shape, dtype=np.int64)
    ids[kept] = np.concatenate([each.input_ids for each in arrays])
    return ids, kept


def _arguments(
    inputs: ImageInputs, ids: IntArray, kept: BoolArray, types: Tensor, images: Sequence[Image]
) -> dict[str, Tensor]:
    """Make the arguments from which the model counts the positions of these rows."""
    tensors = {name: torch.cat([image[name] for image in images]) for name in images[0].keys() & inputs.arguments}
    mask = torch.from_numpy(kept).long()
    return {**tensors, "input_ids": torch.from_numpy(ids), TYPES: types.int(), "attention_mask": mask}


def _pieces(is_image: BoolArray, counts: Sequence[int], owners: IntArray, images: Sequence[Image]) -> Iterator[Piece]:
    """Yield the pieces of all rows. is_image: (B, L). counts: images of each row."""
    for row, (start, end) in zip(is_image, pairwise(accumulate(counts, initial=0)), strict=True):
        if start < end:
            yield from _pieces_of_row(row, owners[start:end].tolist(), images[start:end])


def _pieces_of_row(is_image: BoolArray, owners: list[int], images: Sequence[Image]) -> list[Piece]:
    """Cut the placeholders of a row: by runs, one for each image, or into equal parts, or not at all."""
    bounds = np.flatnonzero(np.diff(is_image, prepend=False, append=False)).reshape(-1, 2)
    lengths = np.diff(bounds)[:, 0].tolist()
    if len(lengths) != len(owners):
        share, left = divmod(sum(lengths), len(owners))
        if left or not are_alike(images):
            return [(sum(lengths), tuple(owners))]
        lengths = [share] * len(owners)
    return [(length, (owner,)) for length, owner in zip(lengths, owners, strict=True)]


def _numbered(pieces: Iterable[Piece]) -> tuple[IntArray, tuple[Piece, ...]]:
    """Number the row at each placeholder over the distinct pieces, back to back, and list these pieces."""
    starts: dict[Piece, int] = {}
    ranges, total = [np.zeros(0, dtype=np.int64)], 0
    for piece in pieces:
        if piece not in starts:
            starts[piece], total = total, total + piece[0]
        ranges.append(np.arange(starts[piece], starts[piece] + piece[0]))
    return np.concatenate(ranges), tuple(starts)
