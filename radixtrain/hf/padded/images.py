"""Images of a padded call: the vision tower computes each distinct one once, and every placeholder is one of its rows.

    input_ids  7 <img> <img> 8    images  A    features  A0 A1    tokens compared  7 A0 A1 8
               7 <img> <img> 9            A                                        7 A0 A1 9

Two images are one if the tensors that the tower gets of them are equal. Their placeholders are compared by the row of
the features that replaces them, so tokens behind different images are never shared. The decoder gets the features of
the unique tokens ready made, as `mm_encoder_outputs`; which autograd leads back to the tower, once for all copies.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from radixtrain.hf.backbone import text_decoder_of
from radixtrain.hf.dropout import DRAWS, DROPOUTS
from radixtrain.hf.padded.rows import BoolArray, PaddedRows
from radixtrain.tree.arrays import IntArray, cumulative
from radixtrain.tree.cached_layout import on_device

FEATURES = "mm_encoder_outputs"  # argument of backbones, which older transformers do not have
# What a tower may get of each image, one entry of the first axis for each; patches of image grids stand in one list.
OF_IMAGES = {"pixel_values", "image_grid_thw", "image_sizes", "pixel_attention_mask", "image_position_ids"}
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
TYPES = "mm_token_type_ids"
OPTIONS = {"vision_feature_layer", "vision_feature_select_strategy"}  # of towers of LLaVA's kind
USED = {"pooler_output", "deepstack_features"}  # of what the tower returns, with one row for each placeholder


def given_of_images(backbone: Any, given: Mapping[str, Any]) -> set[str]:
    """The arguments of a call that only its images need; none if it has no images."""
    if "pixel_values" not in given:
        return set()
    names = OF_IMAGES & inspect.signature(backbone.get_image_features).parameters.keys() & given.keys()
    config = backbone.config.get_text_config()
    # Read for positions, which are known then; in Gemma 4 for its mask, if images attend in both directions.
    reads_types = not _counts_positions(backbone) and getattr(config, "use_bidirectional_attention", True)
    return names if reads_types else names | {TYPES} & given.keys()


def why_not(backbone: Any, given: Mapping[str, Any]) -> str | None:
    """Why the images of a call cannot be shared; None if they can. Judged by what the class does with them."""
    name = type(backbone).__name__
    if (
        not {FEATURES, "pixel_values"} <= inspect.signature(backbone.forward).parameters.keys()
        or _image_token(backbone) is None
    ):
        return f"images, and {name} does not take their features ready made ({FEATURES})"
    read = set(re.findall(r'\["image"\]\.(\w+)', inspect.getsource(inspect.unwrap(type(backbone).forward))))
    if "pooler_output" not in read or read - USED:
        return f"images, of which {name} reads more than one row for each placeholder"
    if _counts_positions(backbone) and "position_ids" not in given and TYPES not in given:
        return f"images without {TYPES}, by which {name} counts positions"
    settings = backbone.config.vision_config.to_dict() if getattr(backbone.config, "vision_config", None) else {}
    draws = [key for key, value in settings.items() if DRAWS.search(key) and isinstance(value, float) and value > 0]
    if backbone.training and draws:
        return f"images, whose tower draws at random ({draws[0]})"
    decoder = set(text_decoder_of(backbone).modules())
    for module in backbone.modules():
        if module.training and module not in decoder:
            if isinstance(module, BATCH_NORMS):
                return "images, whose tower has batch norms: each image depends on the others of the batch"
            if isinstance(module, DROPOUTS) and module.p:
                return f"images, whose tower draws at random (dropout p={module.p})"
    return None


def position_ids_of(backbone: Any, given: Mapping[str, Any]) -> Tensor | None:
    """(A, B, L): positions of A axes; None if the model counts along each row, as without images."""
    positions = given.get("position_ids")
    if positions is not None or not _counts_positions(backbone):
        return positions if positions is not None and positions.ndim == 3 else None
    names = inspect.signature(backbone.get_rope_index).parameters
    return backbone.get_rope_index(**{name: value for name, value in given.items() if name in names})[0]


def _counts_positions(backbone: Any) -> bool:
    return hasattr(backbone, "get_rope_index")


def _image_token(backbone: Any) -> int | None:
    return getattr(backbone.config, "image_token_id", getattr(backbone.config, "image_token_index", None))


@dataclass(eq=False)
class Images:
    """The N images of a padded call, K of them distinct, and its T tokens, of which P are placeholders of images.

    codes: (T,), int64. Equal where two tokens have the same id, row of the features and positions.
    is_image: (T,), bool. rows: (P,), int64. The row of the features at each placeholder.
    positions: (A, B, L), and kept: (T,), int64, where in it the tokens stand; None if positions count along each row.
    """

    tower: Tower
    codes: IntArray
    is_image: BoolArray
    rows: IntArray
    positions: Tensor | None
    kept: IntArray

    @classmethod
    def read(cls, backbone: Any, given: Mapping[str, Any], rows: PaddedRows, positions: Tensor | None) -> Images | str:
        """The images of a call that can be shared, or why these cannot. Waits for the device."""
        token = _image_token(backbone)
        if (rows.input_ids[~rows.kept] == token).any():
            return "attention_mask hides placeholders of images"
        is_packed = positions is not None and len(positions) == 4 and given.get("attention_mask") is None
        if is_packed and bool((positions[0].diff(dim=-1) != 1).any()):  # type: ignore[index]
            return "position_ids jump within a row"
        tower = Tower.read(backbone, given)
        if isinstance(tower, str):
            return tower
        ids, kept = rows.input_ids[rows.kept], np.flatnonzero(rows.kept)
        is_image = ids == token
        features = tower.rows_at(int(is_image.sum()))
        if isinstance(features, str):
            return features
        codes = ids.copy()
        codes[is_image] = ids.max() + 1 + features
        for axis in () if positions is None else positions.flatten(1).cpu().numpy()[:, kept]:
            codes = np.unique(codes * (int(axis.max()) + 1) + axis, return_inverse=True)[1]
        return cls(tower, codes, is_image, features, positions, kept)

    def in_place_of(self, arguments: Mapping[str, Any], tokens: IntArray) -> dict[str, Any]:
        """The arguments of a call with the features of its unique tokens. tokens: (U,), which of the T each one is."""
        number_of = self.is_image.cumsum() - 1
        features = self.tower.features_at(self.rows[number_of[tokens[self.is_image[tokens]]]])
        left = {name: value for name, value in arguments.items() if name not in OF_IMAGES | {TYPES}}
        if self.positions is not None:
            places = on_device(self.kept[tokens], self.positions.device)
            left["position_ids"] = self.positions.flatten(1).index_select(1, places)[:, None]
        return {**left, FEATURES: {"image": features}}


@dataclass(eq=False)
class Tower:
    """What computes images.

    owners: (N,), int64. Which of the K distinct images each one is, in the order of the batch.
    inputs: the arguments of `get_image_features` for the K. is_uniform: whether all have as many placeholders.
    """

    backbone: Any
    owners: IntArray
    inputs: dict[str, Any]
    is_uniform: bool

    @classmethod
    def read(cls, backbone: Any, given: Mapping[str, Any]) -> Tower | str:
        tensors = {name: given[name] for name in OF_IMAGES & given_of_images(backbone, given)}
        if not all(isinstance(each, Tensor) for each in tensors.values()):
            return "images that are no tensors"
        parts: dict[str, list[Tensor]] = {}
        is_nested = tensors["pixel_values"].ndim == 5 and "image_sizes" not in tensors
        if "image_grid_thw" in tensors:
            lengths = tensors["image_grid_thw"].prod(-1).tolist()
            if sum(lengths) != len(tensors["pixel_values"]):
                return "image_grid_thw does not name every row of pixel_values"
            parts["pixel_values"] = list(tensors.pop("pixel_values").split(lengths))
        elif is_nested:  # (B, images of a row, ...), filled up with images of zeros
            tensors = {name: each.flatten(0, 1) for name, each in tensors.items()}
            is_real = tensors["pixel_values"].flatten(1).any(1)
            tensors = {name: each[is_real] for name, each in tensors.items()}
        parts |= {name: list(each.split(1)) for name, each in tensors.items()}
        numbers = {len(each) for each in parts.values()}
        if len(numbers) != 1 or not min(numbers):
            return "images whose tensors are not one for each"
        owners, first = _distinct([tuple(each) for each in zip(*parts.values(), strict=True)])
        inputs: dict[str, Any] = {name: torch.cat([each[index] for index in first]) for name, each in parts.items()}
        if is_nested:
            inputs = {name: each[None] for name, each in inputs.items()}
        inputs |= {name: given[name] for name in OPTIONS & given.keys()}
        return cls(backbone, owners, inputs, not {"image_sizes", "image_position_ids"} & parts.keys())

    @property
    def num_distinct(self) -> int:
        return int(self.owners.max()) + 1

    @property
    def has_copies(self) -> bool:
        return self.num_distinct < len(self.owners)

    @cached_property
    def output(self) -> Any:
        """What the tower returns of the K distinct images."""
        return self.backbone.get_image_features(**self.inputs, return_dict=True)

    def rows_at(self, num_placeholders: int) -> IntArray | str:
        """(P,), int64. The row of the features at each placeholder, in the order of the batch; or why it is not known.

        The tower runs only if images are equal: else each placeholder has a row of its own.
        """
        if not self.has_copies:
            return np.arange(num_placeholders)
        pooled, lengths = self.output.pooler_output, []
        if len(pooled) == self.num_distinct:
            lengths = [each.flatten(0, -2).shape[0] if each.ndim > 1 else 0 for each in pooled]
        elif self.is_uniform:
            total = len(_flat(pooled))
            lengths = [total // self.num_distinct] * self.num_distinct
        starts = cumulative(np.array(lengths, dtype=np.int64))
        if not lengths or starts[-1] != len(_flat(pooled)):
            return "images whose features are in one piece, so that those of each are not known"
        rows = np.concatenate([np.arange(starts[owner], starts[owner + 1]) for owner in self.owners])
        if len(rows) != num_placeholders:
            return f"{num_placeholders} placeholders of images for {len(rows)} features"
        return rows

    def features_at_each(self, rows: IntArray) -> tuple[Tensor, IntArray]:
        """All features, (rows, D), and which of them stand at each placeholder, in the shape that the model returns."""
        pooled = self.output.pooler_output
        is_whole = isinstance(pooled, Tensor) and pooled.ndim == 3
        return _flat(pooled), rows.reshape(-1, pooled.shape[1]) if is_whole else rows

    def features_at(self, rows: IntArray) -> Any:
        """The features at placeholders, as the backbone takes them. rows: (P',), int64."""
        index = on_device(rows, _flat(self.output.pooler_output).device)
        taken: dict[str, Any] = {"pooler_output": _taken(self.output.pooler_output, index)}
        if getattr(self.output, "deepstack_features", None) is not None:
            taken["deepstack_features"] = [_taken(each, index) for each in self.output.deepstack_features]
        return type(self.output)(**taken)


def _distinct(images: list[tuple[Tensor, ...]]) -> tuple[IntArray, list[int]]:
    """Which distinct image each one is, and the first of each. Only images of equal sums are compared in full."""
    sums = torch.stack([torch.stack([part.sum(dtype=torch.float64) for part in image]).cpu() for image in images])
    keys = [(*sums[index].tolist(), *(part.shape for part in image)) for index, image in enumerate(images)]
    chosen: list[int] = []
    owners: list[int] = []
    for index, image in enumerate(images):
        alike = (number for number, other in enumerate(chosen) if keys[other] == keys[index])
        same = (number for number in alike if all(map(torch.equal, images[chosen[number]], image)))
        owner = next(same, len(chosen))
        if owner == len(chosen):
            chosen.append(index)
        owners.append(owner)
    return np.array(owners), chosen


def _flat(features: Any) -> Tensor:
    """(rows, D), of one tensor or of one for each image."""
    parts = [features] if isinstance(features, Tensor) else list(features)
    return torch.cat([part.flatten(0, -2) for part in parts])


def _taken(features: Any, index: Tensor) -> Any:
    """These rows, as a tensor of as many dimensions or as a tuple of one, like the features."""
    rows = _flat(features).index_select(0, index)
    return rows.view(*[1] * (features.ndim - 2), *rows.shape) if isinstance(features, Tensor) else (rows,)
