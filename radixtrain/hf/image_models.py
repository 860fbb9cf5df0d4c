"""What a model does with images, judged by the code of its class: no model is known by name."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from radixtrain.errors import UserError
from radixtrain.hf.backbone import parts_of, text_decoder_of
from radixtrain.hf.dropout import DRAWS, DROPOUTS
from radixtrain.hf.modules import names_in_method
from radixtrain.hf.names import IMAGE_TOKEN, found
from radixtrain.images.tokens import TOKEN_TYPES, TYPES, ImageInputs
from radixtrain.images.tower import FEATURES, OF_IMAGES, NotShared, Tower
from radixtrain.tree.layout import TreeLayout
from radixtrain.tree.movable import on_device
from radixtrain.tree.radix_inputs import RadixInputs

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
DROPS_PATHS = re.compile("drop_path|drop_prob")
USED = {"pooler_output", "deepstack_features"}  # entries of the tower's output with one row for each placeholder


def image_inputs_of(model: nn.Module) -> ImageInputs:
    """Find what `RadixCollator(images=...)` has to know about a model, so that its rows may have images.

    model: one that `prepare_model` takes, before or after that call. It is not kept.

    Raises UserError for a class whose images cannot be shared exactly in such a batch, with the reason.
    """
    parts = parts_of(model)
    backbone, name = parts.backbone, type(parts.backbone).__name__
    reason, types = why_not_of_class(backbone), types_of_mask(backbone)
    if reason is None and types is not None and block_function_of(backbone) is None:
        reason = f"images that attend in both directions, by {types} that {name} reads"
    if reason is not None:
        raise UserError(f"a RadixCollator takes no images of {parts.name}: {reason}; use the model's own collator")
    return inputs_of(backbone)


def inputs_of(backbone: PreTrainedModel) -> ImageInputs:
    """Return what `image_inputs_of` does, for a class whose images can be shared in at least some calls."""
    token, names = image_token_of(backbone), frozenset(OF_IMAGES.keys() & _arguments(backbone.get_image_features))
    assert token is not None
    if not counts_positions(backbone):
        types = types_of_mask(backbone) or TYPES
        return ImageInputs(token, names, types=types, count_blocks=block_function_of(backbone))
    shell: Any = object.__new__(type(backbone))  # without weights, so that it goes into workers
    nn.Module.__init__(shell)
    shell.config = backbone.config
    return ImageInputs(token, names, shell.get_rope_index, frozenset(_arguments(shell.get_rope_index)))


def with_features(backbone: PreTrainedModel, radix: RadixInputs, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of the call of a `RadixCollator`'s batch, with the features of its unique placeholders.

    radix: of the batch. given: its other arguments.

    Raises UserError for what `why_not` says, and if the tower returns other features than the collator counted.
    """
    if "pixel_values" not in given:
        raise UserError("the batch lost its pixel_values on the way: keep every key of the collator")
    reason = why_not(backbone, given)
    try:
        if reason is not None:
            raise NotShared(reason)
        tower = Tower.read(backbone, given, are_distinct=True)
        pieces = [tower.rows_of(np.array(images)) for _, images in radix.image_pieces]
    except NotShared as error:
        raise UserError(
            f"a radix batch came with {error}; use share_prefixes(model) and the model's own collator"
        ) from None
    for (length, _), rows in zip(radix.image_pieces, pieces, strict=True):
        if len(rows) != length:
            raise UserError(
                f"a row has {length} placeholders for images of {len(rows)} features: give it what the model's "
                f"processor returns for its text and its images, and leave truncation off"
            )
    places = radix.image_rows
    assert places is not None
    index = on_device(np.concatenate(pieces), places.device).index_select(0, places)
    return without_images(given) | tower.argument_at(index)


def without_images(arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in arguments.items() if name not in {*OF_IMAGES, TYPES, TOKEN_TYPES}}


def given_of_images(backbone: PreTrainedModel, given: Mapping[str, Any]) -> set[str]:
    """List the arguments of a call that only its images need; none without images, or without a known tower."""
    if "pixel_values" not in given or not hasattr(backbone, "get_image_features"):
        return set()
    names = OF_IMAGES.keys() & _arguments(backbone.get_image_features)
    types = types_of_mask(backbone)
    if types is None:
        names |= {TYPES}
    elif block_function_of(backbone) is not None:
        names |= {types}
    return names & given.keys()


def why_not_of_class(backbone: PreTrainedModel) -> str | None:
    """Say why the images of no call of a model can be shared; None if some can."""
    name = type(backbone).__name__
    if not {FEATURES, "pixel_values"} <= _arguments(backbone.forward) or image_token_of(backbone) is None:
        return f"images, and {name} does not take their features ready made ({FEATURES})"
    read = set(re.findall(r'\["image"\]\.(\w+)', inspect.getsource(inspect.unwrap(type(backbone).forward))))
    if "pooler_output" not in read or read - USED:
        return f"images, of which {name} reads more than one row for each placeholder"
    return None


def why_not(backbone: PreTrainedModel, given: Mapping[str, Any]) -> str | None:
    """Say why the images of a call cannot be shared; None if they can."""
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
    """Yield settings or attributes that are rates of something random."""
    for name, value in values.items():
        if isinstance(value, float) and value > 0 and (DRAWS.search(name) or DROPS_PATHS.search(name)):
            yield name


def axes_of(backbone: PreTrainedModel, given: Mapping[str, Any]) -> Tensor | None:
    """Return the positions of a call on A axes, (A, B, L); None if they count along each row, as without images."""
    positions: Tensor | None = given.get("position_ids")
    if positions is None:
        return inputs_of(backbone).positions_of(given)
    return positions if positions.ndim == 3 else None


def counts_positions(backbone: PreTrainedModel) -> bool:
    return hasattr(backbone, "get_rope_index")


def types_of_mask(backbone: PreTrainedModel) -> str | None:
    """Name the argument that makes images attend in both directions; None if a model reads none for its mask."""
    arguments = _arguments(backbone.forward)
    if counts_positions(backbone):  # for positions only
        return None
    if TYPES in arguments and getattr(backbone.config.get_text_config(), "use_bidirectional_attention", True):
        return TYPES
    return TOKEN_TYPES if TOKEN_TYPES in arguments else None


def block_function_of(backbone: PreTrainedModel) -> Callable[..., Tensor] | None:
    """Find the model's own function from (B, L) types to (B, L) blocks, which attend in both directions; -1 outside."""
    found = getattr(sys.modules[type(backbone).__module__], "get_block_sequence_ids_for_mask", None)
    return found if types_of_mask(backbone) else None


def types_for(backbone: PreTrainedModel, layout: TreeLayout) -> dict[str, Tensor]:
    """Make the argument that lets these rows attend in both directions."""
    name = None if layout.blocks is None else types_of_mask(backbone)
    return {} if name is None or layout.blocks is None else {name: layout.blocks.types(layout.max_seqlen)}


def without_empty_types(backbone: PreTrainedModel, given: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out types that mark no token, as processors return them for text. May wait for the device."""
    if given.keys().isdisjoint((TYPES, TOKEN_TYPES)):
        return dict(given)
    types = types_of_mask(backbone) or ""
    is_empty = types in given and block_function_of(backbone) is not None and not given[types].any()
    return {name: value for name, value in given.items() if name != types or not is_empty}


def sees_beyond_windows(backbone: PreTrainedModel) -> bool:
    """Return whether a token sees all of its image in layers with a shorter window too, as in the unified Gemma 4."""
    return "create_masks_for_vision_model" not in names_in_method(type(backbone).forward)


def _arguments(function: Any) -> set[str]:
    return set(inspect.signature(function).parameters)


def image_token_of(backbone: PreTrainedModel) -> int | None:
    token: int | None = found(backbone.config, IMAGE_TOKEN)
    return token
