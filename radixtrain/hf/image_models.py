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

from radixtrain.hf.backbone import text_decoder_of
from radixtrain.hf.dropout import DRAWS, DROPOUTS
from radixtrain.hf.modules import names_in_method
from radixtrain.hf.names import IMAGE_TOKEN, found
from radixtrain.images.tokens import TOKEN_TYPES, TYPES, BoolArray, numbered_apart
from radixtrain.images.tower import FEATURES, OF_IMAGES, NotShared
from radixtrain.tree.arrays import IntArray
from radixtrain.tree.layout import TreeLayout

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
DROPS_PATHS = re.compile("drop_path|drop_prob")
USED = {"pooler_output", "deepstack_features"}  # entries of the tower's output with one row for each placeholder


def without_images(arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in arguments.items() if name not in {*OF_IMAGES, TYPES, TOKEN_TYPES}}


def given_of_images(backbone: PreTrainedModel, given: Mapping[str, Any]) -> set[str]:
    """List the arguments of a call that only its images need; none without images, or without a known tower."""
    if "pixel_values" not in given or not hasattr(backbone, "get_image_features"):
        return set()
    names = OF_IMAGES & _arguments(backbone.get_image_features)
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
    if positions is not None:
        return positions if positions.ndim == 3 else None
    if not counts_positions(backbone):
        return None
    count: Any = backbone.get_rope_index
    counted: Tensor = count(**{name: given[name] for name in _arguments(count) & given.keys()})[0]
    return counted


def blocks_of(backbone: PreTrainedModel, given: Mapping[str, Any], kept: BoolArray) -> IntArray | None:
    """Number the blocks of a call, whose tokens attend to each other in both directions, (T,), -1 outside.

    None for a causal model, and for a call without the types that mark them. kept: (B, L). which places are tokens.
    """
    count, types = block_function_of(backbone), given.get(types_of_mask(backbone) or "")
    if count is None or types is None:
        return None
    if types.shape != given["input_ids"].shape:
        raise NotShared(f"{types_of_mask(backbone)} is not [B, L]")
    blocks = count(types, device=types.device).cpu().numpy()
    return numbered_apart(blocks, np.arange(len(blocks))[:, None])[kept]


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
