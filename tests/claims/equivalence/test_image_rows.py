"""Rows with images have the ordinary gradient by `share_prefixes`, tower and projector too.

In float64; the oracle is the model as it came from Hugging Face. The mutations at the end are mistakes of the plan and
of the tower, each of which the same check must see.
"""

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import pytest
import torch
from image_batches import KINDS, OF_SIZES, ROWS, Row, batch_of
from image_rows import PADDED, check_padded
from peft import LoraConfig, get_peft_model
from tiers import cases
from transformers.models.llava.modeling_llava import LlavaModel

from radixtrain.hf import windows
from radixtrain.images import tokens, tower
from radixtrain.images.tokens import ImageTokens
from radixtrain.images.tower import Tower
from radixtrain.tree.blocks import BlockLayout

pytestmark = pytest.mark.skipif(
    tower.FEATURES not in inspect.signature(LlavaModel.forward).parameters,
    reason="this transformers does not take the features of images ready made, so such calls run untouched",
)
SIZED = [name for name, kind in KINDS.items() if kind.has_sizes]
EITHER = pytest.mark.parametrize("check", PADDED.values(), ids=PADDED)


@EITHER
@pytest.mark.parametrize("name", cases(KINDS, ["LLaVA", "Qwen3-VL", "Idefics3", "Gemma 3"]))
def test_the_gradient_is_the_ordinary_one(name: str, check: Callable[..., int]) -> None:
    assert check(KINDS[name]) < batch_of(KINDS[name], ROWS)[1].sum()


@EITHER
@pytest.mark.parametrize("name", cases(SIZED, ["Qwen3-VL", "Mistral 3"]))
def test_images_of_different_sizes(name: str, check: Callable[..., int]) -> None:
    check(KINDS[name], OF_SIZES)


BOTH_WAYS = {"Gemma 3": 16, "Gemma 4, in both directions": 4}  # placeholders of an image, longer than the window
NEIGHBOURS: list[Row] = [["A"], ["A", 8], [7, "B"], [7, "A"], [7, "A", "B"], [7, "A", "B", 9], [7, "A", 8]]
GRIDS = ["Qwen3-VL", "Qwen2.5-VL", "GLM-4V"]
SHARED = {  # tokens after images are shared if these are equal: by their bytes, grids included, and as a whole
    "other images": ("LLaVA", [[7, 8, "A", 9, 10], [7, 8, "B", 9, 10]], 2 + 2 * (4 + 2)),
    "one image": ("LLaVA", [[7, 8, "A", 9, 10], [7, 8, "A", 9, 11]], 2 + 4 + 1 + 2),
    **{f"grids, {name}": (name, [[7, 8, "V", 9, 10], [7, 8, "W", 9, 10]], 3 + 2 * (4 + 2)) for name in GRIDS},
    **{name: (name, NEIGHBOURS, (n + 1) + 1 + n + (n + 1) + (2 * n + 1)) for name, n in BOTH_WAYS.items()},
}


@EITHER
@pytest.mark.parametrize(("name", "rows", "num_unique"), SHARED.values(), ids=SHARED)
def test_what_is_shared(name: str, rows: list[Row], num_unique: int, check: Callable[..., int]) -> None:
    assert check(KINDS[name], rows) == num_unique


@EITHER
@pytest.mark.parametrize("name", BOTH_WAYS)
def test_images_in_both_directions_by_other_strategies_and_without_types(name: str, check: Callable[..., int]) -> None:
    for attention in ("path", "reference"):
        check(KINDS[name], NEIGHBOURS, attention=attention)
    image = BOTH_WAYS[name]
    assert check(replace(KINDS[name], types=None), NEIGHBOURS) == (image + 1) + 1 + image + 2 * (image + 1)


def with_lora(model: Any) -> Any:
    names = ["q_proj", "v_proj", "qkv"]
    return get_peft_model(model, LoraConfig(r=2, target_modules=names, init_lora_weights=False)).train()


def checkpointing(model: Any) -> Any:
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def frozen_tower(model: Any) -> Any:
    """Trained is its last layer only, so that a gradient still has to reach it."""
    model.model.visual.requires_grad_(False)
    model.model.visual.merger.requires_grad_(True)
    return model


OTHERS = [("Qwen3-VL", with_lora), ("Qwen3-VL", checkpointing), ("Qwen3-VL", frozen_tower)]
MORE = [(name, change) for name in ("LLaVA", "Gemma 3") for change in (with_lora, checkpointing)]


@EITHER
@pytest.mark.parametrize(("name", "change"), cases([*OTHERS, *MORE], OTHERS))
def test_lora_recomputed_activations_and_a_frozen_tower(
    name: str, change: Callable[[Any], Any], check: Callable[..., int]
) -> None:
    check(KINDS[name], change=change)


# Mistakes. Each changes what the real function returns.


def in_pooled(change: Callable[..., Any]) -> Callable[..., Any]:
    def mistake(real: Any, self: Tower, index: Any) -> Any:
        output = real(self, index)
        output.pooler_output = tuple(change(each, index) for each in output.pooler_output)
        return output

    return mistake


def in_deepstack(change: Callable[..., Any]) -> Callable[..., Any]:
    def mistake(real: Any, self: Tower, index: Any) -> Any:
        output = real(self, index)
        output.deepstack_features = change(output.deepstack_features)
        return output

    return mistake


def of_one_copy(features: Any, index: Any) -> Any:
    is_first = torch.zeros(len(index), 1, dtype=torch.bool)
    is_first[np.unique(index.numpy(), return_index=True)[1]] = True
    return torch.where(is_first, features, features.detach())


def without_pixels(real: Any, parts: Any) -> Any:
    return real([{name: torch.zeros_like(part) for name, part in image.items()} for image in parts])


AXES = ImageTokens, "axes_at"
OF_IMAGES: dict[str, tuple[Any, ...]] = {
    "every image is the first": (tower, "distinct_images", lambda real, parts: (np.zeros(len(parts), int), [0])),
    "images without pixels": (tower, "distinct_images", without_pixels),
    "no gradient": (Tower, "features_at", in_pooled(lambda features, index: features.detach())),
    "the gradient of one copy": (Tower, "features_at", in_pooled(of_one_copy)),
    "deep features elsewhere": (Tower, "features_at", in_deepstack(lambda deep: [(each[0].flip(0),) for each in deep])),
    "deep features in another order": (Tower, "features_at", in_deepstack(lambda deep: deep[::-1])),
    "the next row of the features": (ImageTokens, "rows_at", lambda real, *args: np.roll(real(*args), 1)),
    "ids only": (ImageTokens, "codes", lambda real, self: np.where(self.is_image, 10_000, real(self))),
    "positions along each row": (*AXES, lambda real, *args: None),
    "one axis": (*AXES, lambda real, *args: real(*args)[:1].repeat(3, 0)),
    "positions of the next token": (*AXES, lambda real, *args: np.roll(real(*args), 1, axis=-1)),
}
OF_BLOCKS: dict[str, tuple[Any, ...]] = {
    "blocks in parts": (tokens, "whole_blocks", lambda real, codes, blocks: np.minimum(blocks, 0)),
    "images of neighbouring rows are one": (BlockLayout, "of", lambda real, blocks: real(np.minimum(blocks, 0))),
    "without the last row": (
        *(BlockLayout, "of"),
        lambda real, blocks: real(np.where(blocks == np.roll(blocks, -1), blocks, -1)),
    ),
    "in every layer": (windows, "_seen", lambda real, *args: (True, real(*args)[1])),
    "without a window": (windows, "_seen", lambda real, *args: (real(*args)[0], 0)),
}
MISTAKES = OF_IMAGES | OF_BLOCKS


@pytest.mark.parametrize("what", MISTAKES)
def test_a_mistake_is_seen(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    owner, name, mistake = MISTAKES[what]
    real = getattr(owner, name)
    changed: Any = lambda *args: mistake(getattr(real, "func", real), *args)  # noqa: E731
    monkeypatch.setattr(owner, name, property(changed) if isinstance(real, cached_property) else changed)
    kind, rows = ("Qwen3-VL", ROWS) if what in OF_IMAGES else ("Gemma 4, in both directions", NEIGHBOURS)
    with pytest.raises((AssertionError, RuntimeError, ValueError)):
        check_padded(KINDS[kind], rows)
