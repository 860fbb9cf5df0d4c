"""The vision tower of a model: it computes each distinct image once, and its features are handed to the decoder.

The backbone gets the features of the unique tokens ready made, as `mm_encoder_outputs`; autograd leads from these back
to the tower, once for all copies of an image. Judged by what a class does: no model is known by its name.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from radixtrain.collators.images import (
    OF_IMAGES,
    TOKEN_TYPES,
    TYPES,
    ImageInputs,
    are_alike,
    distinct_images,
    joined,
    split_images,
)
from radixtrain.errors import UserError
from radixtrain.hf.backbone import parts_of, text_decoder_of
from radixtrain.hf.class_code import names_in_method
from radixtrain.hf.dropout import DRAWS, DROPOUTS
from radixtrain.tree.arrays import IntArray, concatenate_ranges, cumulative
from radixtrain.tree.blocks import BlockLayout
from radixtrain.tree.cached_layout import on_device
from radixtrain.tree.radix_inputs import RadixInputs

FEATURES = "mm_encoder_outputs"  # argument of backbones, which older transformers do not have
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
DROPS_PATHS = re.compile("drop_path|drop_prob")
USED = {"pooler_output", "deepstack_features"}  # of what the tower returns, with one row for each placeholder


def image_inputs_of(model: nn.Module) -> ImageInputs:
    """What `RadixCollator(images=...)` has to know of a model, so that its rows may have images.

    model: that `prepare_model` takes, before or after. It is not kept.

    Raises UserError for a class whose images cannot be shared exactly in such a batch, with the reason.
    """
    parts = parts_of(model)
    backbone, name = parts.backbone, type(parts.backbone).__name__
    reason, types, blocks = why_not_of_class(backbone), types_of_mask(backbone), block_function_of(backbone)
    if reason is None and types is not None and blocks is None:
        reason = f"images that attend in both directions, by {types} that {name} reads"
    if reason is not None:
        raise UserError(f"a RadixCollator takes no images of {parts.name}: {reason}; use the model's own collator")
    token, names = image_token_of(backbone), frozenset(OF_IMAGES.keys() & _arguments(backbone.get_image_features))
    assert token is not None
    if not counts_positions(backbone):
        return ImageInputs(token, names, types=types or TYPES, count_blocks=blocks)
    shell: Any = object.__new__(type(backbone))  # without weights, so that it goes into workers
    nn.Module.__init__(shell)
    shell.config = backbone.config
    return ImageInputs(token, names, shell.get_rope_index, frozenset(_arguments(shell.get_rope_index)))


def with_features(backbone: PreTrainedModel, radix: RadixInputs, given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of the call of a `RadixCollator`'s batch, with the features of its unique placeholders.

    radix: of the batch. given: its other arguments.

    Raises UserError for what `why_not` says, and if the tower returns other features than the collator counted.
    """
    if "pixel_values" not in given:
        raise UserError("the batch lost its pixel_values on the way: keep every key of the collator")
    reason = why_not(backbone, given)
    tower = reason if reason is not None else Tower.read(backbone, given, are_distinct=True)
    lengths = tower if isinstance(tower, str) else tower.lengths
    if isinstance(lengths, str):
        raise UserError(f"a radix batch came with {lengths}; use share_prefixes(model) and the model's own collator")
    assert isinstance(tower, Tower)
    starts, pieces = cumulative(lengths)[:-1], []
    for length, images in radix.image_pieces:
        numbers = np.array(images)
        pieces.append(concatenate_ranges(starts[numbers], lengths[numbers]))
        if len(pieces[-1]) != length:
            raise UserError(
                f"a row has {length} placeholders for images of {len(pieces[-1])} features: give it what the model's "
                f"processor returns for its text and its images, and leave truncation off"
            )
    rows = radix.image_rows
    assert rows is not None
    features = tower.features_at(on_device(np.concatenate(pieces), rows.device).index_select(0, rows))
    return {**without_images(given), FEATURES: {"image": features}}


def without_images(arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in arguments.items() if name not in {*OF_IMAGES, TYPES, TOKEN_TYPES}}


def given_of_images(backbone: PreTrainedModel, given: Mapping[str, Any]) -> set[str]:
    """The arguments of a call that only its images need; none if it has no images."""
    if "pixel_values" not in given:
        return set()
    names = OF_IMAGES.keys() & _arguments(backbone.get_image_features)
    types = types_of_mask(backbone)
    if types is None:
        names |= {TYPES}
    elif block_function_of(backbone) is not None:
        names |= {types}
    return names & given.keys()


def why_not_of_class(backbone: PreTrainedModel) -> str | None:
    """Why the images of no call of a model can be shared; None if some can."""
    name = type(backbone).__name__
    if not {FEATURES, "pixel_values"} <= _arguments(backbone.forward) or image_token_of(backbone) is None:
        return f"images, and {name} does not take their features ready made ({FEATURES})"
    read = set(re.findall(r'\["image"\]\.(\w+)', inspect.getsource(inspect.unwrap(type(backbone).forward))))
    if "pooler_output" not in read or read - USED:
        return f"images, of which {name} reads more than one row for each placeholder"
    return None


def why_not(backbone: PreTrainedModel, given: Mapping[str, Any]) -> str | None:
    """Why the images of a call cannot be shared; None if they can."""
    reason = why_not_of_class(backbone)
    if reason is not None:
        return reason
    if counts_positions(backbone) and "position_ids" not in given and TYPES not in given:
        return f"images without {TYPES}, by which {type(backbone).__name__} counts positions"
    if torch.is_grad_enabled() and any(getattr(given.get(name), "requires_grad", False) for name in OF_IMAGES):
        return "images that require a gradient, of which each copy has its own"
    decoder = set(text_decoder_of(backbone).modules())
    training = [each for each in backbone.modules() if each.training and each not in decoder and each is not backbone]
    if training:
        settings = backbone.config.vision_config.to_dict() if getattr(backbone.config, "vision_config", None) else {}
        drawn = next(_draws(settings), None)
        if drawn is not None:
            return f"images, whose tower draws at random ({drawn})"
    for module in training:
        if isinstance(module, BATCH_NORMS):
            return "images, whose tower has batch norms: each image depends on the others of the batch"
        if isinstance(module, DROPOUTS) and module.p:
            return f"images, whose tower draws at random (dropout p={module.p})"
        drawn = next(_draws(vars(module)), None)
        if drawn is not None:
            return f"images, whose tower draws at random ({type(module).__name__}.{drawn})"
    return None


def _draws(values: Mapping[str, Any]) -> Iterator[str]:
    """Settings or attributes that are rates of something random."""
    for name, value in values.items():
        if isinstance(value, float) and value > 0 and (DRAWS.search(name) or DROPS_PATHS.search(name)):
            yield name


def position_ids_of(backbone: Any, given: Mapping[str, Any]) -> Tensor | None:
    """(A, B, L): positions of A axes; None if the model counts along each row, as without images."""
    positions = given.get("position_ids")
    if positions is not None or not counts_positions(backbone):
        return positions if positions is not None and positions.ndim == 3 else None
    names = _arguments(backbone.get_rope_index)
    return backbone.get_rope_index(**{name: value for name, value in given.items() if name in names})[0]


def counts_positions(backbone: PreTrainedModel) -> bool:
    return hasattr(backbone, "get_rope_index")


def types_of_mask(backbone: PreTrainedModel) -> str | None:
    """The argument by which a model makes images attend in both directions; None if it reads none for its mask."""
    arguments = _arguments(backbone.forward)
    if counts_positions(backbone):  # for positions only
        return None
    if TYPES in arguments and getattr(backbone.config.get_text_config(), "use_bidirectional_attention", True):
        return TYPES
    return TOKEN_TYPES if TOKEN_TYPES in arguments else None


def block_function_of(backbone: PreTrainedModel) -> Callable[..., Tensor] | None:
    """The model's own (B, L) types -> (B, L) blocks, in which tokens attend in both directions, -1 outside of them."""
    found = getattr(sys.modules[type(backbone).__module__], "get_block_sequence_ids_for_mask", None)
    return found if types_of_mask(backbone) else None


def types_for(backbone: PreTrainedModel, blocks: BlockLayout | None, longest: int) -> dict[str, Tensor]:
    """The argument that makes these rows attend in both directions. longest: sequence, in tokens."""
    name = None if blocks is None else types_of_mask(backbone)
    return {} if name is None or blocks is None else {name: blocks.types(longest)}


def without_empty_types(backbone: PreTrainedModel, given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call without types that mark no token, as processors return them for text. May wait."""
    types = types_of_mask(backbone) or ""
    is_empty = types in given and block_function_of(backbone) is not None and not given[types].any()
    return {name: value for name, value in given.items() if name != types or not is_empty}


def sees_beyond_windows(backbone: PreTrainedModel) -> bool:
    """Whether a token sees all of its image in layers with a shorter window too, as in the unified Gemma 4."""
    return "create_masks_for_vision_model" not in names_in_method(type(backbone).forward)


def _arguments(function: Any) -> set[str]:
    return set(inspect.signature(function).parameters)


def image_token_of(backbone: PreTrainedModel) -> int | None:
    return getattr(backbone.config, "image_token_id", getattr(backbone.config, "image_token_index", None))


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
    def read(cls, backbone: PreTrainedModel, given: Mapping[str, Any], are_distinct: bool = False) -> Tower | str:
        """Of the images of a call. are_distinct: as a `RadixCollator` gives them."""
        tensors = {name: given[name] for name in OF_IMAGES.keys() & given_of_images(backbone, given)}
        if not all(isinstance(each, Tensor) for each in tensors.values()):
            return "images that are no tensors"
        split = split_images(tensors)
        if isinstance(split, str):
            return split
        every = range(len(split.images))
        owners, first = (np.array(every), list(every)) if are_distinct else distinct_images(split.images)
        chosen = [split.images[index] for index in first]
        options = {  # such as vision_feature_layer
            name: given[name] for name in _arguments(backbone.get_image_features) & given.keys() - OF_IMAGES.keys()
        }
        return cls(backbone, owners, {**joined(chosen, split.is_nested), **options}, are_alike(chosen))

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

    @cached_property
    def lengths(self) -> IntArray | str:
        """(K,), int64. The rows of the features of each image; or why they are not known. The tower runs."""
        pooled, total = self.output.pooler_output, len(_flat(self.output.pooler_output))
        lengths: Sequence[int] = []
        if len(pooled) == self.num_distinct:
            lengths = [each.flatten(0, -2).shape[0] if each.ndim > 1 else 0 for each in pooled]
        elif self.is_uniform:
            lengths = [total // self.num_distinct] * self.num_distinct
        if not lengths or sum(lengths) != total:
            return "images whose features are in one piece, so that those of each are not known"
        return np.array(lengths, dtype=np.int64)

    def rows_at(self, num_placeholders: int) -> IntArray | str:
        """(P,), int64. The row of the features at each placeholder, in the order of the batch; or why it is not known.

        The tower runs only if images are equal: else each placeholder has a row of its own.
        """
        if not self.has_copies:
            return np.arange(num_placeholders)
        lengths = self.lengths
        if isinstance(lengths, str):
            return lengths
        starts = cumulative(lengths)[:-1]
        rows = concatenate_ranges(starts[self.owners], lengths[self.owners])
        return rows if len(rows) == num_placeholders else _other_number(num_placeholders, len(rows))

    def why_not_complete(self, num_placeholders: int) -> str | None:
        """Why features and placeholders do not fit, if `rows_at` has not run the tower, which runs here."""
        rows = len(_flat(self.output.pooler_output))
        return None if self.has_copies or rows == num_placeholders else _other_number(num_placeholders, rows)

    def features_at_each(self, rows: IntArray) -> tuple[Tensor, IntArray]:
        """All features, (rows, D), and which of them stand at each placeholder, in the shape that the model returns."""
        pooled = self.output.pooler_output
        is_whole = isinstance(pooled, Tensor) and pooled.ndim == 3
        return _flat(pooled), rows.reshape(-1, pooled.shape[1]) if is_whole else rows

    def features_at(self, index: Tensor) -> Any:
        """The features at placeholders, as the backbone takes them. index: (P',), int64, rows of all features."""
        index = index.to(_flat(self.output.pooler_output).device)
        taken: dict[str, Any] = {"pooler_output": _taken(self.output.pooler_output, index)}
        if getattr(self.output, "deepstack_features", None) is not None:
            taken["deepstack_features"] = [_taken(each, index) for each in self.output.deepstack_features]
        return type(self.output)(**taken)


def _other_number(num_placeholders: int, num_rows: int) -> str:
    return f"{num_placeholders} placeholders of images for {num_rows} features"


def _flat(features: Any) -> Tensor:
    """(rows, D), of one tensor or of one for each image."""
    parts = [features] if isinstance(features, Tensor) else list(features)
    return torch.cat([part.flatten(0, -2) for part in parts])


def _taken(features: Any, index: Tensor) -> Any:
    """These rows, as a tensor of as many dimensions or as a tuple of one, like the features."""
    rows = _flat(features).index_select(0, index)
    return rows.view(*[1] * (features.ndim - 2), *rows.shape) if isinstance(features, Tensor) else (rows,)
