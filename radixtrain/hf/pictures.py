"""The pictures of a call: which of them are one, by their bytes, and a tower that computes each distinct one once.

    pixel_values  A  B  A    owners  0 1 0    features of the tower  A0 A1 B0 B1    row of each placeholder  0 1 2 3 0 1

Whatever the backbone does to pictures before its tower, and to features after it, is upstream and stays as it is.

A tower may read several pictures at once, by attention or a batch norm. Then the features of one change with the copies
around it, and every picture is computed. So the user's own tower is tried when a call first has copies.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from types import MethodType
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from radixtrain.hf.backbone import IMAGE_TOKEN, found, text_decoder_of
from radixtrain.hf.guards.code import has_unknown_code
from radixtrain.hf.guards.draws import generator_states, has_drawn, set_generator_states
from radixtrain.hf.guards.model import what_is_wrong
from radixtrain.hf.progress import running
from radixtrain.tree.arrays import IntArray, concatenate_ranges, cumulative

# Arguments of a tower with one entry on the first axis for each picture. The patches of all grids are in one list.
OF_PICTURES = ("pixel_values", "image_grid_thw", "image_sizes", "pixel_attention_mask", "image_position_ids")
FEATURES, LEVELS = "pooler_output", "deepstack_features"  # entries of a tower's output; of levels there are several
# Entries that no backbone reads.
UNREAD = {"last_hidden_state", "hidden_states", "attentions"}
BESIDES = {"mm_token_type_ids", "token_type_ids", "labels", "num_items_in_batch"}  # which no tower reads
TOWER = "get_image_features"
REPLACED = "_radix_replaced_tower"  # what an instance had there; None if that was its class's
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Picture = dict[str, Tensor]
Tower: TypeAlias = Callable[[Sequence[Picture]], Any]  # returns the output for these pictures


@dataclass(frozen=True, eq=False)
class Pictures:
    """The pictures of a call.

    rows: (P,), int64. the distinct feature that replaces each placeholder, in the order of the batch; None if unknown.
    num_pictures, num_distinct: of the call, and how many the tower computed.
    why_every: why it computed copies too.
    """

    rows: IntArray | None
    num_pictures: int = 0
    num_distinct: int = 0
    why_every: str | None = None


def bits_of(x: Tensor) -> Tensor:
    """View a tensor as whole numbers: NaN is equal to itself, and 0 is not -0."""
    return x.detach().contiguous().view(BITS[x.dtype.itemsize])


def image_token_of(backbone: PreTrainedModel) -> int | None:
    """Return the id of placeholders; None for a backbone whose tower is not known."""
    token: int | None = found(backbone.config, IMAGE_TOKEN) if hasattr(backbone, TOWER) else None
    return token


def compute_pictures_once(backbone: PreTrainedModel) -> None:
    """Put a method in place of `get_image_features` that computes equal pictures of a shared call once."""
    if hasattr(backbone, TOWER):

        @wraps(getattr(type(backbone), TOWER))  # its name, by which a pickle finds it, and what `generate` reads
        def compute(backbone: Any, *args: Any, **kwargs: Any) -> Any:
            return _distinct_once(backbone, *args, **kwargs)

        setattr(backbone, REPLACED, vars(backbone).get(TOWER))
        setattr(backbone, TOWER, MethodType(compute, backbone))


def compute_every_picture(backbone: nn.Module) -> None:
    """Undo `compute_pictures_once`."""
    if REPLACED in vars(backbone):
        delattr(backbone, TOWER)
        if (replaced := vars(backbone).pop(REPLACED)) is not None:
            setattr(backbone, TOWER, replaced)


def _distinct_once(backbone: Any, *args: Any, **kwargs: Any) -> Any:
    """Return what the tower returns for all pictures of a call, computed of the distinct ones."""
    compute = getattr(backbone, REPLACED) or MethodType(getattr(type(backbone), TOWER), backbone)
    call = running.upstream()
    if call is None or call.backbone is not backbone:
        return compute(*args, **kwargs)
    given = {**inspect.signature(compute).bind(*args, **kwargs).arguments}
    given |= given.pop("kwargs", {})
    output, call.pictures = _computed(compute, backbone, given)
    return output


def _computed(compute: Callable[..., Any], backbone: Any, given: Mapping[str, Any]) -> tuple[Any, Pictures]:
    """Return the output for all pictures, and what they are. given: the arguments of the tower by name."""
    pictures, counts = _split(given)
    if not pictures:
        return compute(**given), Pictures(None)
    owners, first = _distinct(pictures)
    why_every = None
    if len(first) < len(pictures):
        tower = partial(_output, compute, given, counts is not None)
        why_every = _third_party_code(backbone) or what_is_wrong(
            backbone, partial(_what_features_show, tower, pictures[0])
        )
        if why_every is None:
            states = generator_states(device := pictures[0]["pixel_values"].device)
            output = tower([pictures[index] for index in first])
            lengths = _lengths(output, len(first))
            every = None if lengths is None else _of_every(output, owners, counts)
            if every is not None and lengths is not None and not has_drawn(device, states):
                return every, Pictures(_rows_of(lengths, owners), len(pictures), len(first))
            set_generator_states(device, states)
            why_every = "it returns more than the features of each, or draws at random"
    output = compute(**given)
    lengths = _lengths(output, len(pictures), is_in_rows=counts is not None)
    rows = None if lengths is None else _rows_of(lengths, np.array(first)[owners])
    return output, Pictures(rows, len(pictures), len(pictures), why_every)


def _output(compute: Callable[..., Any], given: Mapping[str, Any], in_rows: bool, pictures: Sequence[Picture]) -> Any:
    """Return what the tower returns for these pictures. in_rows: whether each stands in a row of its own."""
    chosen = {name: torch.cat([each[name] for each in pictures]) for name in pictures[0]}
    return compute(**{**given, **({name: each[:, None] for name, each in chosen.items()} if in_rows else chosen)})


def _what_features_show(tower: Tower, picture: Picture, are_alike: Callable[[Tensor, Tensor], bool]) -> str | None:
    """Say what the features of a picture show besides its own pixels; None if nothing.

    Between two others of its size they have to be the same bits when these have other pixels, as each number is then
    computed in the same order; and those of the picture alone, up to rounding.
    """
    pixels = picture["pixel_values"]
    numbers = torch.arange(pixels.numel(), device=pixels.device).view_as(pixels)
    others = [{**picture, "pixel_values": each.to(pixels)} for each in (numbers % 7 - 3, numbers % 5 - 1)]
    found = []
    for pictures in ([picture], *([each, picture, each] for each in others)):
        output = tower(pictures)
        if _lengths(output, len(pictures)) is None:
            return "it does not return the features of each"
        entries = [_features(output), *(output.get(LEVELS) or ())]
        found.append([[entry[n] for entry in entries] for n in range(len(pictures))])
    (alone,), (one, among, _), (another, changed, _) = found
    if any(map(torch.equal, one, another)):
        return "their features do not depend on pixels, so that it cannot be tried"
    has_same_bits = all(map(torch.equal, map(bits_of, among), map(bits_of, changed)))
    return None if has_same_bits and all(map(are_alike, alone, among)) else "their features change with other images"


def _features(output: Any) -> Any:
    """Return the features among what a tower returned; None if there are none. Some are an attribute, and no entry."""
    return getattr(output, FEATURES, None) if isinstance(output, Mapping) else None


def _each_has_its_gradient(pictures: Sequence[Picture]) -> bool:
    """Return whether pixels are learned, of which each copy has a gradient of its own."""
    return torch.is_grad_enabled() and any(each.requires_grad for each in pictures[0].values())


def _third_party_code(backbone: Any) -> str | None:
    """Name a module outside of the text decoder with code of a third party, which may read other pictures."""
    of_text = {backbone, *text_decoder_of(backbone).modules()}
    strange = (type(each).__name__ for each in backbone.modules() if each not in of_text and has_unknown_code(each))
    name = next(strange, None)
    return name and f"code of a third party in {name} may read several"


def gradient_is_read(backbone: Any) -> bool:
    """Return whether a backward hook of a third party reads a gradient before the text decoder. 3 us a module."""
    hooked = {module for module in backbone.modules() if module._backward_hooks or module._backward_pre_hooks}
    if hooked:
        hooked -= {backbone, *text_decoder_of(backbone).modules()} - {backbone.get_input_embeddings()}
    return any(map(has_unknown_code, hooked))


def _split(given: Mapping[str, Any]) -> tuple[list[Picture], IntArray | None]:
    """Return the pictures of a call in order, none if they are not known, and how many each row has if rows hold them.

    Rows that hold pictures are filled up with pictures of zeros, which their tower leaves out.
    """
    rest = {name: given[name] for name in OF_PICTURES if given.get(name) is not None}
    tensors = {name for name, value in given.items() if isinstance(value, Tensor)} - BESIDES
    if "pixel_values" not in rest or tensors != rest.keys():
        return [], None
    parts: dict[str, Sequence[Tensor]] = {}
    counts: IntArray | None = None
    if "image_grid_thw" in rest:
        lengths = rest["image_grid_thw"].prod(-1).tolist()
        if sum(lengths) != len(rest["pixel_values"]):
            return [], None
        parts["pixel_values"] = rest.pop("pixel_values").split(lengths)
    elif rest["pixel_values"].ndim == 5 and "image_sizes" not in rest:
        is_real = rest["pixel_values"].flatten(2).any(2)
        counts = is_real.sum(1).cpu().numpy()
        rest = {name: each[is_real] for name, each in rest.items()}
    parts |= {name: each.split(1) for name, each in rest.items()}
    if len({len(each) for each in parts.values()}) != 1:
        return [], None
    return [dict(zip(parts, each, strict=True)) for each in zip(*parts.values(), strict=True)], counts


def _distinct(pictures: Sequence[Picture]) -> tuple[IntArray, list[int]]:
    """Return the distinct picture of each, and the first copy of each. Compares in full only those of equal sums."""
    if _each_has_its_gradient(pictures):
        return np.arange(len(pictures)), [*range(len(pictures))]
    bits = [[bits_of(part) for part in picture.values()] for picture in pictures]
    sums = torch.stack([torch.stack([part.sum(dtype=torch.int64) for part in each]) for each in bits]).tolist()
    first: list[int] = []
    owners: list[int] = []
    for index in range(len(pictures)):
        alike = (n for n, other in enumerate(first) if sums[other] == sums[index])
        owner = next((n for n in alike if all(map(torch.equal, bits[first[n]], bits[index]))), len(first))
        if owner == len(first):
            first.append(index)
        owners.append(owner)
    return np.array(owners), first


def _lengths(output: Any, num_pictures: int, is_in_rows: bool = False) -> IntArray | None:
    """Count the features of each picture; None if it is not known which are whose.

    is_in_rows: whether features are joined by the rows of the batch. Then all pictures have one size.
    """
    features = _features(output)
    if features is None or any(each.ndim < 2 for each in features):
        return None
    lengths = [each.flatten(0, -2).shape[0] for each in features]
    if is_in_rows:
        return np.full(num_pictures, sum(lengths) // num_pictures)
    return np.array(lengths) if len(features) == num_pictures else None


def _rows_of(lengths: IntArray, owners: IntArray) -> IntArray:
    """Return the feature rows of these pictures, back to back. lengths: of all that were computed."""
    return concatenate_ranges(cumulative(lengths)[owners], lengths[owners])


def _of_every(output: Any, owners: IntArray, counts: IntArray | None) -> Any:
    """Return what backbones read of the output, for all pictures; None if it is not known how that has to look.

    output: for the distinct ones. owners: the distinct picture of each. counts: how many each row has, if rows hold
    them, whose features a tower joins.
    """
    features, levels = _features(output), output.get(LEVELS)
    if (
        FEATURES not in output
        or output.keys() - UNREAD - {FEATURES, LEVELS}
        or any(len(level) != len(features) for level in levels or ())
    ):
        return None
    entries = {FEATURES: _every(features, owners)}
    if counts is not None:
        entries[FEATURES] = [*torch.cat(entries[FEATURES]).split((counts * len(features[0])).tolist())]
    if levels is not None:
        entries[LEVELS] = [_every(level, owners) for level in levels]
    return type(output)(**entries)


def _every(features: Any, owners: IntArray) -> Any:
    """Return features of all pictures: one tensor, or a list with one for each."""
    if isinstance(features, Tensor):
        return features[torch.from_numpy(owners).to(features.device)]
    return type(features)(features[owner] for owner in owners)
